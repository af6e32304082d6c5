"""Tokenizing in other processes.

A worker is a plain child process at the other end of a pipe: it gets the encoder, then chunks of rows, to answer each.
No `__main__` is imported twice and torch is not loaded. A worker ends when its pipe ends, so it cannot outlive its
parent. Chunks go round robin and come back in the order they were sent, so the result is the same for any number of
workers.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from surefoot.data.encode import Encoder, Outcome
from surefoot.data.rows import Checked
from surefoot.errors import ModelError, SurefootError

Chunk = Sequence[Checked]


def encode_chunks(chunks: Iterable[Chunk], encoder: Encoder, num_workers: int) -> Generator[list[Outcome]]:
    """Encode each chunk, in order, in this process (`num_workers` 0) or in others.

    Raises:
        ModelError: the tokenizer cannot encode such rows.
        SurefootError: a worker process died.
    """
    if num_workers == 0:
        for chunk in chunks:
            yield [encoder.encode(row) for row in chunk]
        return
    pool = _Pool(encoder, num_workers)
    try:
        for chunk in chunks:
            if pool.in_flight == num_workers:
                yield pool.receive()
            pool.send(chunk)
        while pool.in_flight:
            yield pool.receive()
    finally:
        pool.close()


class _Pool:
    """Workers with at most one chunk each. A worker reads its chunk whole before it answers, and gets the next one only
    when its answer has been read: neither side ever waits for the other to make room in a pipe."""

    def __init__(self, encoder: Encoder, num_workers: int) -> None:
        self._all: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._sent = self._received = 0
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        try:
            for _ in range(num_workers):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                with theirs:
                    end = theirs.fileno()
                    command = [sys.executable, "-P", "-m", "surefoot.data.workers", str(end)]
                    quiet = subprocess.DEVNULL
                    self._all.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=[end], env=env))
            for number in range(num_workers):
                self._send(number, encoder)
        except BaseException:
            self.close()
            raise

    @property
    def in_flight(self) -> int:
        return self._sent - self._received

    def send(self, chunk: Chunk) -> None:
        self._send(self._sent % len(self._all), chunk)
        self._sent += 1

    def receive(self) -> list[Outcome]:
        """The oldest chunk's result."""
        number = self._received % len(self._all)
        self._received += 1
        try:
            answer: list[Outcome] | ModelError = self._pipes[number].recv()
        except (EOFError, OSError) as error:
            raise self._died(number) from error
        if isinstance(answer, ModelError):
            raise answer
        return answer

    def _send(self, number: int, value: Encoder | Chunk) -> None:
        try:
            self._pipes[number].send(value)
        except OSError as error:
            raise self._died(number) from error

    def _died(self, number: int) -> SurefootError:
        worker = self._all[number]
        worker.kill()
        return SurefootError(
            f"a tokenizing process died (exit status {worker.wait()}); its last words, if any, are above; "
            "data.num_workers: 0 tokenizes in the main process"
        )

    def close(self) -> None:
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.wait()
        for pipe in self._pipes:
            pipe.close()


def _serve(pipe: Connection[Any, Any]) -> None:
    encoder: Encoder = pipe.recv()
    while True:
        chunk: Chunk = pipe.recv()
        try:
            pipe.send([encoder.encode(row) for row in chunk])
        except ModelError as error:
            pipe.send(error)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    logging.disable()  # the parent has said it all
    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # the parent is gone
        sys.exit(1)
