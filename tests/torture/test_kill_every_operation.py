"""A save that replaces a step of a branch left behind, and prunes, is killed before each of its operations."""

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


def save_6_again_and_prune(directory: Path) -> None:
    with runs.manager(directory, keep_top_k=1) as manager:
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


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
def test_a_kill_before_any_operation_loses_nothing(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(storage, "exchange", lambda a, b: False)
    template = memory_path / "template"
    branch_left_behind(template)
    killed = kill_before_each(save_6_again_and_prune, template, memory_path, check)
    names = {operation.name for operation in killed}
    assert {"mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir"} <= names
    assert ("exchange" in names) == can_exchange
    assert {Path(operation.path).name for operation in killed} >= {
        "manifest.json",
        "step_6",
        "latest_checkpoint_status.json",
    }
