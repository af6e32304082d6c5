"""Stop a process before each single storage operation that it makes, and look at what it leaves behind.

A scenario runs in a forked child, so that torch is loaded once. Its first run is only counted; then it runs once for
each operation, on a fresh copy of the same directory, and is killed by SIGKILL just before that operation.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from surefoot.checkpoint import storage

Scenario = Callable[[Path], None]


class Operation(NamedTuple):
    """What was about to happen when the process was killed: the number, the name, and the path."""

    index: int
    name: str
    path: str


def operations_of(scenario: Scenario, template: Path, workdir: Path) -> list[Operation]:
    """All storage operations of one undisturbed run, in their order, including those of background threads."""
    log = workdir / "operations.log"
    directory = _fresh_copy(template, workdir)

    def note(name: str, path: str) -> None:
        with log.open("a") as file:
            file.write(f"{name}\t{path}\n")

    log.write_text("")
    status = _in_child(scenario, directory, note)
    assert status == 0, f"the undisturbed scenario ended with status {status}"
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    return [Operation(index, name, path) for index, (name, path) in enumerate(lines)]


def kill_before_each(
    scenario: Scenario,
    template: Path,
    workdir: Path,
    check: Callable[[Path, Operation], None],
    choose: Callable[[list[Operation]], Iterable[Operation]] = lambda operations: operations,
) -> list[Operation]:
    """Kill the scenario before each operation (or before those that `choose` picks) and `check` what is left.

    Args:
        template: the directory's content before the scenario; not changed. Each run gets a copy.
        check: gets the directory left behind; raises when it is not as it must be.

    Returns:
        The operations before which the scenario was killed.
    """
    operations = operations_of(scenario, template, workdir)
    chosen = list(choose(operations))
    for operation in chosen:
        directory = _fresh_copy(template, workdir)
        seen = iter(range(len(operations) + 1))

        def kill(name: str, path: str, seen: Iterable[int] = seen, victim: int = operation.index) -> None:
            if next(iter(seen)) == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        status = _in_child(scenario, directory, kill)
        assert status == -signal.SIGKILL, f"not killed before {operation}: status {status}"
        try:
            check(directory, operation)
        except Exception as error:
            raise AssertionError(f"after a kill before {operation}: {error!r}") from error
    return chosen


def _fresh_copy(template: Path, workdir: Path) -> Path:
    directory = workdir / "live"
    if directory.exists():
        shutil.rmtree(directory)
    shutil.copytree(template, directory)
    return directory


def _in_child(scenario: Scenario, directory: Path, observer: Callable[[str, str], None]) -> int:
    """Exit status of a forked child that runs the scenario; minus the signal when one killed it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            storage.observers[:] = [observer]
            scenario(directory)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
