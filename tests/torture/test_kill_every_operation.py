"""A resume whose save replaces a step of a branch left behind, and prunes, is killed before each operation."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.checkpoint import storage, verify_checkpoint
from tests.checkpoint import runs
from tests.torture.kill_every_operation import Operation, kill_before_each

OLD, NEW = 0, 1


def branch_left_behind(directory: Path) -> None:
    """Steps 2, 4 and 6 of a first attempt; a second one goes on from 4."""
    first = runs.manager(directory)
    for step in (2, 4, 6):
        runs.save(first, step, OLD)
    first.start_attempt(first.choose_resume(directory / "step_4"))


def resume_save_6_again_and_prune(directory: Path) -> None:
    with runs.manager(directory, keep_top_k=1) as manager:
        manager.open(resume=True)
        manager.start_attempt(manager.choose_resume())
        manager.save(6, {"step": 6}, runs.writers(6, NEW))


def check(directory: Path, operation: Operation) -> None:
    """What is in sight is sound; the run goes on from the old or the new state; and it can save."""
    manager = runs.manager(directory, keep_top_k=1)
    manager.open(resume=True)
    for info in manager.list_checkpoints():
        assert verify_checkpoint(info.path).sound, info
        assert info.state in ("complete", "left_behind"), info
        if info.step == 6:
            assert runs.version_of(info.path) == (6, OLD if info.state == "left_behind" else NEW)
    point = manager.choose_resume()
    assert not point.skipped
    assert point.path is not None
    assert runs.version_of(point.path) in ((4, OLD), (6, NEW))
    manager.start_attempt(point)
    runs.save(manager, 6, NEW + 1)
    assert runs.steps(manager) == [6]
    assert runs.version_of(directory / "step_6") == (6, NEW + 1)
    assert list((directory / ".trash").iterdir()) == []


def test_a_kill_before_any_operation_loses_nothing(memory_path: Path) -> None:
    template = memory_path / "template"
    branch_left_behind(template)
    killed = kill_before_each(resume_save_6_again_and_prune, template, memory_path, check)
    names = {operation.name for operation in killed}
    assert names == {"mkdir", "open", "write", "fsync", "close", "rename", "exchange", "unlink", "rmdir"}
    assert {Path(operation.path).name for operation in killed} >= {
        "manifest.json",
        "step_6",
        "latest_checkpoint_status.json",
    }


def only_step_2(directory: Path) -> None:
    runs.save(runs.manager(directory), 2, OLD)


def save_2_again(directory: Path) -> None:
    with runs.manager(directory) as manager:
        manager.save(2, {"step": 2}, runs.writers(2, NEW))


def check_only_step_2(directory: Path, operation: Operation) -> None:
    """The run's only checkpoint is there all the time, in its old or its new form."""
    manager = runs.manager(directory)
    manager.open(resume=True)
    point = manager.choose_resume()
    manager.shutdown()
    assert point.path == directory / "step_2"
    assert runs.version_of(point.path) in ((2, OLD), (2, NEW))
    assert not list(directory.glob(".swap*"))


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
def test_replacing_the_only_checkpoint_never_loses_it(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(storage, "exchange", lambda a, b: False)
    template = memory_path / "template"
    only_step_2(template)

    def from_the_commit_on(operations: list[Operation]) -> list[Operation]:
        return operations[max(o.index for o in operations if o.path.endswith("manifest.json") and o.name == "close") :]

    killed = kill_before_each(save_2_again, template, memory_path, check_only_step_2, from_the_commit_on)
    assert any(operation.name == "exchange" for operation in killed) == can_exchange
    assert any(operation.path.endswith(".swap_step_2") for operation in killed) != can_exchange
