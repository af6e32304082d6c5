"""Tokenizing in other processes.

A worker is a plain child process that reads frames of JSON from its standard input and answers with arrays on its
standard output: nothing but data crosses, no `__main__` is imported twice, torch is not loaded. A worker ends when its
input ends, so it cannot outlive its parent. Chunks go round robin and come back in the order they were sent, so the
result is the same for any number of workers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import IO

from surefoot.data.encode import Encoded, Encoder, EncodingOptions, options_as_json, options_from_json
from surefoot.data.rows import Row
from surefoot.errors import ModelError, SurefootError


def encode_chunks(
    chunks: Iterable[Sequence[Row]], options: EncodingOptions, encoder: Encoder, num_workers: int
) -> Generator[tuple[int, Encoded]]:
    """Encode each chunk, in order, in this process (`num_workers` 0) or in others. Yields rows done and the result.

    Raises:
        ModelError: the tokenizer cannot encode such rows.
        SurefootError: a worker process died.
    """
    if num_workers == 0:
        for chunk in chunks:
            yield len(chunk), encoder.encode(chunk)
        return
    with _Pool(options, num_workers) as pool:
        for chunk in chunks:
            if pool.is_full:
                yield pool.receive()
            pool.send(chunk)
        while pool.is_busy:
            yield pool.receive()


class _Pool:
    """Workers with at most one chunk each. A worker reads its chunk whole before it answers, and gets the next one only
    when its answer has been read: neither side ever waits for the other to make room in a pipe."""

    def __init__(self, options: EncodingOptions, num_workers: int) -> None:
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        self._busy: deque[tuple[subprocess.Popen[bytes], int]] = deque()
        self._all: list[subprocess.Popen[bytes]] = []
        package_root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        try:
            for _ in range(num_workers):
                command = [sys.executable, "-P", "-m", "surefoot.data.workers"]
                worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
                self._all.append(worker)
                self._idle.append(worker)
                self._write(worker, options_as_json(options))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    @property
    def is_full(self) -> bool:
        return not self._idle

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def send(self, chunk: Sequence[Row]) -> None:
        worker = self._idle.popleft()
        plain = [asdict(replace(row, extra={})) for row in chunk]
        self._write(worker, json.dumps(plain).encode())
        self._busy.append((worker, len(chunk)))

    def receive(self) -> tuple[int, Encoded]:
        """The oldest chunk's result."""
        worker, num_rows = self._busy.popleft()
        assert worker.stdout is not None
        frames = [_read_frame(worker.stdout) for _ in range(3)]
        header, ids, mask = (frame if frame is not None else self._died(worker) for frame in frames)
        if header.startswith(b"!"):
            raise ModelError(header[1:].decode())
        self._idle.append(worker)
        return num_rows, Encoded.from_frames(header, ids, mask)

    def _write(self, worker: subprocess.Popen[bytes], frame: bytes) -> None:
        assert worker.stdin is not None
        try:
            _write_frame(worker.stdin, frame)
        except BrokenPipeError:
            self._died(worker)

    def _died(self, worker: subprocess.Popen[bytes]) -> bytes:
        worker.kill()
        raise SurefootError(
            f"a tokenizing process died (exit status {worker.wait()}); its last words, if any, are above; "
            "data.num_workers: 0 tokenizes in the main process"
        )

    def _end(self) -> None:
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:  # what the worker did not read any more is still in the buffer
                        continue


def _write_frame(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(struct.pack("<Q", len(frame)) + frame)
    pipe.flush()


def _read_frame(pipe: IO[bytes]) -> bytes | None:
    """`None` when the other side is gone."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    body = pipe.read(size)
    return body if len(body) == size else None


def _serve(read: IO[bytes], write: IO[bytes]) -> None:
    first = _read_frame(read)
    if first is None:
        return
    encoder = Encoder(options_from_json(first))
    while (frame := _read_frame(read)) is not None:
        try:
            answer = encoder.encode([Row(**row) for row in json.loads(frame)]).to_frames()
        except ModelError as error:
            answer = (b"!" + str(error).encode(), b"", b"")
        for part in answer:
            _write_frame(write, part)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    logging.disable()  # the parent has said it all
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    try:
        _serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)
