"""Real child processes for a fraction of a second each: they are forked from a process that has only imported.

A fork of a process in which torch has already run may hang, and importing torch anew takes seconds. So one server
process imports everything once, runs nothing itself, and forks a child for each job.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surefoot.checkpoint.processes import die_with_parent
from surefoot.config_file import algorithm_names, load_algorithm
from surefoot.errors import SurefootError

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
_IMPORT_PATIENCE_S = 600.0  # reading all that from disk, on a busy machine
# What a first run imports besides: else every child would.
_IMPORTS = (
    "surefoot.cli",
    "tests.helpers.runs",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.processing_utils",
)


class Child:
    """A forked process. Its pid stays its own until `wait` has returned."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self.pid = pid
        self._server, self._log = server, log
        self._status: int | None = None
        self._waiting: int | None = None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # ended, and waited for, a moment ago
            if self._status is None:
                os.kill(self.pid, number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit status, or minus the signal that ended it. One that hangs leaves its stacks in the log."""
        status = self.wait_a_little(timeout_s)
        if status is None:
            os.kill(self.pid, signal.SIGABRT)  # faulthandler writes where it hangs
            self.wait_a_little(timeout_s)
            raise AssertionError(f"child {self.pid} did not end in {timeout_s} s:\n{self.log}")
        return status

    def wait_a_little(self, timeout_s: float) -> int | None:
        """The same; `None` if it has not ended by then."""
        if self._status is None:
            if self._waiting is None:
                self._waiting = self._server.send({"wait": self.pid})
            try:
                self._status = self._server.answer(self._waiting, timeout_s)["status"]
            except TimeoutError:
                return None
        return self._status

    @property
    def log(self) -> str:
        """What the child wrote to its standard output and error."""
        return self._log.read_text(errors="replace")


class ForkServer:
    """Start children with `start`; one at a time. Use as a context manager."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(os.getpid())],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._unread, self._sent = b"", 0

    def __enter__(self) -> ForkServer:
        self.answer(0, _IMPORT_PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its child dies with it
        self._process.communicate()

    def start(self, target: Callable[..., Any], *args: Any, log: Path) -> Child:
        """Run `target(*args)` in a child. `target` is a module's function, the arguments go through JSON; the child's
        exit status is what `target` returns, or 1 after an exception, whose traceback is in the log."""
        plain = [str(arg) if isinstance(arg, Path) else arg for arg in args]
        job = {"module": target.__module__, "function": target.__qualname__, "args": plain, "log": str(log)}
        return Child(self, self.answer(self.send(job))["pid"], log)

    def call(self, target: Callable[..., Any], *args: Any, log: Path) -> int:
        return self.start(target, *args, log=log).wait()

    def send(self, request: dict[str, Any]) -> int:
        """Returns the number that its answer carries."""
        assert self._process.stdin is not None
        self._sent += 1
        self._process.stdin.write(json.dumps({**request, "number": self._sent}).encode() + b"\n")
        return self._sent

    def answer(self, number: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Of the request of this number, or with 0 that the server is ready. Late answers to others, which nobody waits
        for any more, are passed over. Raises `TimeoutError`."""
        while (found := self._next_answer(timeout_s))["number"] != number:
            pass
        return found

    def _next_answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            data = self._process.stdout.read(65536)
            assert data, f"the fork server ended with status {self._process.wait()}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


def wait_for(path: Path, child: Child | None = None, timeout_s: float = PATIENCE_S) -> None:
    """Until a file appears that the child makes."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear: {child.log if child else ''}"
        time.sleep(0.002)


def forked(function: Callable[[], Any]) -> int:
    """For a child of the server that forks. Exit status: 0, 2 after an error raised on purpose, 1 after any
    other; minus a signal."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent(parent)
            function()
            status = 0
        except SurefootError:
            traceback.print_exc()
            status = 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ----------------------------------------------------------------------------------------------------- in the server


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in _IMPORTS:
        importlib.import_module(name)
    for algorithm in algorithm_names():
        load_algorithm(algorithm)
    answers.write(json.dumps({"number": 0}) + "\n")
    for line in _lines():
        request = json.loads(line)
        if "wait" in request:
            answer = {"status": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            request["server"] = os.getpid()
            pid = os.fork()
            if pid == 0:
                _work(request)
            answer = {"pid": pid}
        answers.write(json.dumps({**answer, "number": request["number"]}) + "\n")


def _lines() -> Iterator[bytes]:
    """Unbuffered: a child must not inherit what its parent has read ahead."""
    data = b""
    while chunk := os.read(0, 65536):
        data += chunk
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            yield line


def _work(request: dict[str, Any]) -> None:
    """In the child: never returns."""
    status: Any = 1
    with _output_to(request["log"]):
        try:
            import torch

            faulthandler.enable()
            die_with_parent(request["server"])
            torch.set_num_threads(1)
            function = getattr(importlib.import_module(request["module"]), request["function"])
            status = function(*request["args"])
        except SystemExit as stop:
            status = stop.code
        except BaseException:
            traceback.print_exc()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


@contextmanager
def _output_to(log: str) -> Iterator[None]:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    _serve()
