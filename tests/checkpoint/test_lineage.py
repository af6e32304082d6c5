"""Attempts, branches left behind, and which checkpoint a resume takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from surefoot.checkpoint import CheckpointManager, verify_checkpoint
from surefoot.checkpoint.lineage import Attempt, LineageEntry, read_attempt, write_attempt
from surefoot.errors import CorruptCheckpoint
from tests.checkpoint import runs


def started(folder: Path, resume: bool, explicit: Path | None = None) -> CheckpointManager:
    """A manager that has taken hold of the directory and put its attempt on record, as a run does."""
    manager = runs.manager(folder)
    manager.open(resume=resume)
    manager.start_attempt(manager.choose_resume(explicit) if resume else None)
    return manager


def states(folder: Path) -> dict[int, str]:
    return {info.step: info.state for info in runs.manager(folder).list_checkpoints()}


def test_who_owns_what() -> None:
    entries = LineageEntry(1, 0, None, None), LineageEntry(3, 10, None, "c", "k"), LineageEntry(4, 20, None, "d", "l")
    line = Attempt("r", entries)
    owned = {(0, 10): True, (0, 11): False, (1, 20): True, (1, 21): False, (2, 99): True}
    assert {(i, step): line.owns(Attempt("r", entries[: i + 1]), step) for i, step in owned} == owned
    assert not line.owns(Attempt("another", entries[:1]), 5)
    for other in (entries[1]._replace(key="m"), entries[1]._replace(attempt=2)):
        assert not line.owns(Attempt("r", (entries[0], other)), 15)


def test_two_copies_of_a_run_that_both_go_on_are_told_apart(memory_path: Path) -> None:
    first, copy = memory_path / "first", memory_path / "copy"
    runs.save(started(first, resume=False), 2)
    shutil.copytree(first, copy)
    for folder in (first, copy):
        manager = started(folder, resume=True)
        assert manager.attempt.number == 2
        runs.save(manager, 4)
        manager.shutdown()
    started(first, resume=True, explicit=copy / "step_4").shutdown()  # and dies before its first save
    assert states(first) == {2: "complete", 4: "left_behind"}
    assert runs.manager(first).choose_resume().path == copy / "step_4"
    shutil.rmtree(copy / "step_4")
    shutil.copytree(first / "step_4", copy / "step_4")
    assert states(copy) == {2: "complete", 4: "left_behind"}


def test_record_round_trip_and_damage(memory_path: Path) -> None:
    assert read_attempt(memory_path) is None
    attempt = Attempt.first().resumed(4, "/rescue/step_4", "abc", 2)
    write_attempt(memory_path, attempt)
    assert read_attempt(memory_path) == attempt
    body = json.loads((memory_path / "attempt.json").read_text())
    assert body["attempt"] == 2
    assert [entry[:4] for entry in body["lineage"]] == [[1, 0, None, None], [2, 4, "/rescue/step_4", "abc"]]
    assert len({entry[4] for entry in body["lineage"]}) == 2
    path = memory_path / "attempt.json"
    path.write_text(path.read_text().replace('"attempt": 2', '"attempt": 3'))
    with pytest.raises(ValueError, match="checksum"):
        read_attempt(memory_path)


def test_a_resume_leaves_later_steps_behind(memory_path: Path) -> None:
    first = started(memory_path, resume=False)
    for step in (2, 4, 6):
        runs.save(first, step)
    second = started(memory_path, resume=True, explicit=memory_path / "step_4")
    assert states(memory_path) == {2: "complete", 4: "complete", 6: "left_behind"}
    assert second.get_latest_checkpoint_path() == memory_path / "step_4"
    second.shutdown()
    assert runs.manager(memory_path).choose_resume().step == 4  # never picked up by mistake


def test_what_was_left_behind_is_not_pruned_and_is_replaced_when_its_step_comes(memory_path: Path) -> None:
    first = started(memory_path, resume=False)
    for step in (2, 4, 6):
        runs.save(first, step)
    started(memory_path, resume=True, explicit=memory_path / "step_2").shutdown()
    second = runs.manager(memory_path, keep_top_k=1)
    runs.save(second, 4, version=1)
    assert states(memory_path) == {4: "complete", 6: "left_behind"}  # 2 is pruned, 6 does not count
    runs.save(second, 6, version=1)
    assert states(memory_path) == {6: "complete"}
    assert runs.version_of(memory_path / "step_6") == (6, 1)


def test_each_manifest_tells_what_its_attempt_went_on_from(memory_path: Path) -> None:
    first = started(memory_path, resume=False)
    runs.save(first, 2)
    second = started(memory_path, resume=True)
    runs.save(second, 4)
    info = second.list_checkpoints()[-1]
    assert info.manifest is not None
    origin = second.list_checkpoints()[0].manifest
    assert origin is not None
    assert info.manifest.lineage == second.attempt.lineage
    assert [entry[:4] for entry in info.manifest.lineage] == [(1, 0, None, None), (2, 2, None, origin.checksum)]


def test_a_new_attempt_that_saved_nothing_goes_on_from_its_origin(memory_path: Path) -> None:
    runs.save(started(memory_path, resume=False), 2)
    started(memory_path, resume=True).shutdown()
    third = started(memory_path, resume=True)
    assert third.attempt.number == 3
    assert third.attempt.lineage[-1].from_step == 2
    third.shutdown()


def test_a_run_that_died_before_its_first_save_starts_from_zero(memory_path: Path) -> None:
    started(memory_path, resume=False).shutdown()
    point = runs.manager(memory_path).choose_resume()
    assert (point.path, point.step, point.skipped) == (None, 0, ())
    assert started(memory_path, resume=True).attempt.number == 2


@pytest.mark.parametrize(
    "damage", ["optimizer removed", "weights cut", "empty folder", "manifest flipped", "bit flipped"]
)
def test_resume_takes_the_newest_that_verifies_and_tells_what_it_skipped(memory_path: Path, damage: str) -> None:
    manager = started(memory_path, resume=False)
    for step in (10, 20):
        runs.save(manager, step)
    (memory_path / "tmp_step_30").mkdir()
    broken = memory_path / "step_20"
    weights = broken / "policy" / "weights" / "model.safetensors"
    if damage == "optimizer removed":
        shutil.rmtree(broken / "policy" / "optimizer")
    elif damage == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "empty folder":
        shutil.rmtree(broken)
        broken.mkdir()
    elif damage == "manifest flipped":
        text = (broken / "manifest.json").read_text()
        (broken / "manifest.json").write_text(text.replace('"step": 20', '"step": 21'))
    else:
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    point = runs.manager(memory_path).choose_resume()
    assert point.path == memory_path / "step_10"
    assert [path for path, _ in point.skipped] == [broken]
    assert point.skipped[0][1]
    with pytest.raises(CorruptCheckpoint, match="step_20"):
        runs.manager(memory_path).choose_resume(broken)


def test_checkpoints_that_are_all_broken_are_an_error_not_a_fresh_start(memory_path: Path) -> None:
    runs.save(started(memory_path, resume=False), 2)
    (memory_path / "step_2" / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"(?s)no checkpoint.*step_2.*manifest"):
        runs.manager(memory_path).choose_resume()


@pytest.mark.parametrize("record", [None, "{broken"])
def test_without_a_sound_record_the_highest_attempt_decides_and_it_is_said(
    memory_path: Path, record: str | None
) -> None:
    first = started(memory_path, resume=False)
    for step in (2, 4, 6):
        runs.save(first, step)
    second = started(memory_path, resume=True, explicit=memory_path / "step_2")
    runs.save(second, 4)
    (memory_path / "attempt.json").unlink()
    if record is not None:
        (memory_path / "attempt.json").write_text(record)
    point = runs.manager(memory_path).choose_resume()
    assert point.path == memory_path / "step_4"
    assert any("attempt 2 was the last" in note for note in point.notes)
    assert states(memory_path) == {2: "complete", 4: "complete", 6: "left_behind"}


def test_a_checkpoint_of_another_run_in_the_directory_is_left_behind(memory_path: Path) -> None:
    runs.save(started(memory_path / "a", resume=False), 8)
    runs.save(started(memory_path / "b", resume=False), 2)
    shutil.copytree(memory_path / "a" / "step_8", memory_path / "b" / "step_8")
    assert states(memory_path / "b") == {2: "complete", 8: "left_behind"}
    assert runs.manager(memory_path / "b").choose_resume().step == 2


def test_going_on_from_another_runs_checkpoint_adopts_none_of_its_attempts(memory_path: Path) -> None:
    runs.save(started(memory_path / "a", resume=False), 8)
    runs.save(started(memory_path / "b", resume=False), 2)
    second = started(memory_path / "b", resume=True, explicit=memory_path / "a" / "step_8")
    assert [entry.attempt for entry in second.attempt.lineage] == [2]
    assert states(memory_path / "b") == {2: "left_behind"}
    assert second.choose_resume().path == memory_path / "a" / "step_8"
    second.shutdown()


def test_going_on_in_an_empty_directory_gets_a_number_of_its_own(memory_path: Path) -> None:
    runs.save(started(memory_path / "a", resume=False), 8)
    moved = started(memory_path / "b", resume=True, explicit=memory_path / "a" / "step_8")
    assert [entry.attempt for entry in moved.attempt.lineage] == [1, 2]
    runs.save(moved, 10)
    assert states(memory_path / "b") == {10: "complete"}
    assert runs.manager(memory_path / "b").choose_resume().path == memory_path / "b" / "step_10"


def test_an_origin_that_is_no_longer_the_same_is_skipped(memory_path: Path) -> None:
    home, rescue = memory_path / "home", memory_path / "rescue"
    runs.save(started(home, resume=False), 2)
    shutil.copytree(home / "step_2", rescue / "step_2")
    started(home, resume=True, explicit=rescue / "step_2").shutdown()
    shutil.rmtree(rescue / "step_2")
    runs.save(runs.manager(rescue), 2, version=9)
    assert verify_checkpoint(rescue / "step_2").sound
    point = runs.manager(home).choose_resume()
    assert point.path == home / "step_2"
    shutil.rmtree(home / "step_2")
    with pytest.raises(CorruptCheckpoint, match="not the checkpoint that this run went on from"):
        runs.manager(home).choose_resume()


def test_a_directory_copied_under_another_step_is_broken(memory_path: Path) -> None:
    runs.save(started(memory_path, resume=False), 2)
    shutil.copytree(memory_path / "step_2", memory_path / "step_9")
    assert states(memory_path) == {2: "complete", 9: "broken"}
