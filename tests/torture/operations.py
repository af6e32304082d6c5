"""A real run is killed before each single storage operation, or has each one fail.

The run is a resume that saves a step again which a branch left behind, and prunes. Everything happens in one child of
the fork server, which only forks: torch runs in its children alone.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from pathlib import Path
from typing import Any

from surefoot.checkpoint import storage
from tests.helpers import runs
from tests.helpers.fork_server import ForkServer, forked
from tests.torture.kill_every_operation import Operation, kill_before_each, operations_of
from tests.torture.real_runs import (
    SETTINGS,
    STEPS,
    Progress,
    Reference,
    Tally,
    assert_all_sound,
    finish,
    fresh,
    sampled,
)

BRANCH_AT = STEPS - 1  # one step is trained and saved anew


def torture(
    server: ForkServer,
    reference: Reference,
    folder: Path,
    how: str,
    count: int | None = None,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Tally:
    """`how`: "kill", "kill without exchange", or "fail". `count`: so many operations; `None`: each."""
    tally = Tally(f"operations: {how}")
    fresh(folder)
    log = folder / "log"
    words = (reference.case, reference.file, reference.straight, folder, how, count, seed)
    child = server.start(_torture, *words, log=log)
    with tally.judging(f"seed {seed}"):
        status = None
        while status is None:
            status = child.wait_a_little(1.0)
            tally.done = _lines(folder / "done")
            progress(tally.done)
        assert status == 0, child.log[-4000:]
    if how == "fail":
        tally.notes = f"{_lines(folder / 'stopped')} stopped the run, the others did not matter"
    return tally


def _lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def _torture(case: str, file: str, straight: str, folder: str, how: str, count: int | None, seed: int) -> int:
    reference = Reference(case, Path(file), Path(straight), 0.0, 0.0)
    workdir = Path(folder) / "work"
    template = Path(folder) / "template"
    assert forked(lambda: _make_template(reference, template)) == 0
    done = (Path(folder) / "done").open("a", buffering=1)

    def check(directory: Path, operation: Operation) -> None:
        assert_all_sound(directory)
        assert forked(lambda: finish(runs.resumed(directory))) == 0, "it could not be resumed"
        # After a kill between the exchange and its fsync, the old step of the branch left behind has this name. It
        # stays, as a save that did not finish would, until its step is saved again.
        reference.assert_equals_straight(directory, may_stay=(f"tmp_step_{STEPS}",))
        done.write(f"{operation}\n")

    def choose(operations: list[Operation]) -> list[Operation]:
        return sampled(operations, count, seed)

    if how == "kill without exchange":
        storage.exchange = lambda a, b: False
    workdir.mkdir()
    if how == "fail":
        _fail_each(template, workdir, check, choose)
    else:
        kill_before_each(_go_on, template, workdir, check, choose)
    return 0


def _make_template(reference: Reference, template: Path) -> None:
    """A run that was resumed from a step before its last, and died before its next save."""
    words = (f"run_dir={template}", *SETTINGS, "checkpointing.keep_top_k=3")
    finish(runs.started(reference.file, *words))
    runs.resumed(template, checkpoint=template / "checkpoints" / f"step_{BRANCH_AT}").checkpoints.shutdown()


def _go_on(directory: Path) -> None:
    finish(runs.resumed(directory, "checkpointing.keep_top_k=1"))


def _fail_each(template: Path, workdir: Path, check: Any, choose: Any) -> None:
    """Each operation fails once with an I/O error: the run stops with an error of its own, or does without."""
    for operation in choose(operations_of(_go_on, template, workdir)):
        directory = fresh(workdir / "live")
        shutil.copytree(template, directory, dirs_exist_ok=True)
        status = forked(functools.partial(_go_on_with_a_failure, directory, operation.index))
        if status == 2:
            with (workdir.parent / "stopped").open("a") as stopped:
                stopped.write(f"{operation}\n")
        assert status in (0, 2), (
            f"after {operation} failed, the run ended with a bare traceback, or was killed: {status}"
        )
        try:
            check(directory, operation)
        except Exception as error:
            raise AssertionError(f"after {operation} failed: {error!r}") from error


def _go_on_with_a_failure(directory: Path, index: int) -> None:
    left = iter(range(index, -1, -1))

    def fail(name: str, path: str) -> None:
        if next(left, -1) == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    storage.observers[:] = [fail]
    _go_on(directory)
