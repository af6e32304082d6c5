"""Calls in worker processes, each with a time limit that really ends it.

A worker is two small processes at the other end of a socket. The *runner* calls functions, in its main thread, so that
they may use signals. The *guard* is its parent: it calls nothing, and when the socket or the runner ends it kills all
that the runner has left behind, orphans included (on Linux it is their reaper). So a call ends when we close the
socket, whether it sleeps, loops in C or has forked, and nothing outlives this process, even if that is killed.

Requests and answers are lines of JSON: nothing is unpickled, and what a function prints goes to standard error. Workers
start as fresh interpreters with the parent's import path; `__main__` is not run again. What is called a request says by
its `spec`: the name of a module of this folder, and what that module's `calls` makes a function of.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, SurefootError
from surefoot.rollout.reward_calls import RewardError

LOAD_TIMEOUT_S = 120.0  # for importing what a function needs
_LONGEST_S = 1e8  # three years; a socket takes no limit of any length
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from surefoot.rollout.workers import main; main(int(sys.argv[1]))"
)


class CallFailed(Exception):
    """A call gave no result.

    Attributes:
        kind: an exception's name, "timeout" or "died": what failures are told apart by.
        details: the traceback, where there is one.
    """

    def __init__(self, kind: str, message: str, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


# --------------------------------------------------------------------------------------------------------- the parent


class Workers:
    """As many workers as there are callers at one time, started when they are needed and replaced when they have ended.
    Callers may be threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    def call(self, spec: str, given: Any, timeout_s: float) -> Any:
        """Call the function that `spec` stands for; with `None`, only load it, which takes as long as it takes.

        Args:
            spec, given: JSON; a JSON value.

        Raises:
            ConfigError, RewardError: the function cannot be had, or what it returned is no reward.
            CallFailed: it raised, took longer than its time, or ended its process.
            TypeError: `given` is no JSON value.
        """
        worker = self._take()
        try:
            worker.load(spec)
            return None if given is None else worker.call(spec, given, timeout_s)
        finally:
            self._put(worker)

    def close(self) -> None:
        """End all workers and all that they have started. Calls in flight fail."""
        with self._lock:
            self._closed = True
            workers, self._all = self._all, set()
        for worker in workers:
            worker.end()

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise CallFailed("died", "the workers are closed")
            if not self._idle:
                worker = _Worker()
                self._all.add(worker)
                return worker
            return self._idle.pop()

    def _put(self, worker: _Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
            else:
                self._all.discard(worker)


class _Worker:
    def __init__(self) -> None:
        self.alive = True
        self._loaded: set[str] = set()
        self._socket, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            command = [sys.executable, "-P", "-c", _BOOT, str(end), json.dumps(sys.path)]
            env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONHASHSEED": "0"}
            self._guard = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[end], start_new_session=True, env=env
            )

    def load(self, spec: str) -> None:
        if spec not in self._loaded:
            self.call(spec, None, LOAD_TIMEOUT_S)
            self._loaded.add(spec)

    def call(self, spec: str, given: Any, timeout_s: float) -> Any:
        line = json.dumps([spec, given]).encode() + b"\n"
        try:
            answer = json.loads(self._exchange(line, timeout_s))
        except TimeoutError:
            self.end()
            raise CallFailed("timeout", f"it took longer than {timeout_s:g} s and was ended") from None
        except (OSError, ValueError):
            status = self.end()
            how = f"by {signal.Signals(status - 128).name}" if status > 128 else f"exit status {status}"
            raise CallFailed("died", f"its process died ({how})") from None
        if "value" in answer:
            return answer["value"]
        if answer["expected"]:
            raise (ConfigError if answer["kind"] == "ConfigError" else RewardError)(answer["message"])
        raise CallFailed(answer["kind"], f"{answer['kind']}: {answer['message']}", answer["traceback"])

    def _exchange(self, line: bytes, timeout_s: float) -> bytes:
        timeout_s = min(timeout_s, _LONGEST_S)
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        self._socket.sendall(line)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
            answer += (part := self._socket.recv(1 << 16))
            if not part:
                raise ConnectionResetError
        return bytes(answer)

    def end(self) -> int:
        """End the worker and all that it has started; the guard's exit status."""
        self.alive = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the guard, and whoever waits for an answer
        try:
            status = self._guard.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            status = self._guard.wait()
        self._socket.close()
        return status


# --------------------------------------------------------------------------------------------------------- the worker


def main(end: int) -> None:
    """The guard's life: start the runner, wait for either end, leave nothing behind."""
    parent = os.getppid()
    os.set_inheritable(end, False)
    _process_control(_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, _stay)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGINT, signal.SIGTERM):  # a stop of the whole job is the parent's to carry out
        signal.signal(number, _stay)
    runner = os.fork()
    if runner == 0:
        _run(end)
    polled = select.poll()
    polled.register(end, 0)  # tells of the other end's closing alone
    polled.register(woken, select.POLLIN)
    status = None
    while status is None and os.getppid() == parent:
        ready = [fd for fd, _ in polled.poll(1000)]
        if end in ready:
            break
        if ready:
            os.read(woken, 4096)
        status = _reap(runner)
    with suppress(ProcessLookupError):
        os.killpg(runner, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    sys.exit(status or 0)


def _reap(runner: int) -> int | None:
    """Take leave of whatever has ended; the runner's status as a shell gives it, once it is among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == runner:
                code = os.waitstatus_to_exitcode(ended[1])
                return 128 - code if code < 0 else code
    return None


def _children() -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found


def _run(end: int) -> None:
    """The runner's life: a call for each line, until the socket ends."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _process_control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.setpgid(0, 0)
    runner = os.getpid()
    os.register_at_fork(after_in_child=_be_ordinary)
    status = 1
    try:
        with socket.socket(fileno=end) as connection, connection.makefile("rb") as requests:
            for line in requests:
                answer = _answer(line)
                if os.getpid() != runner:  # the function forked, and its child has come back here
                    break
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.sendall(answer)
        status = 0
    finally:
        os._exit(status)


def _answer(line: bytes) -> bytes:
    spec, given = json.loads(line)
    try:
        call = _loaded(spec)
        return json.dumps({"value": None if given is None else call(given)}).encode() + b"\n"
    except BaseException as error:  # SystemExit as well: it is the function's, not ours
        answer = {"kind": type(error).__name__, "message": str(error), "expected": isinstance(error, SurefootError)}
        return json.dumps({**answer, "traceback": traceback.format_exc()}).encode() + b"\n"


@functools.cache
def _loaded(spec: str) -> Callable[[Any], Any]:
    module, values = json.loads(spec)
    call: Callable[[Any], Any] = importlib.import_module(f"surefoot.rollout.{module}").calls(values)
    return call


def _be_ordinary() -> None:
    """What a function forks obeys signals as any process does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stay(*_: Any) -> None:
    pass


def _process_control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
