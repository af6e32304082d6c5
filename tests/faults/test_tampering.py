"""Checkpoints that somebody edited, cut, moved or mixed with other files. A resume believes only what it can prove,
says what it skipped, and touches nothing that is not a run's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot import loop
from surefoot.checkpoint import verify_checkpoint
from surefoot.checkpoint.directory import inspect_checkpoint
from surefoot.checkpoint.sealed import seal
from surefoot.errors import CorruptCheckpoint
from tests.faults.project import Project, joined
from tests.helpers import runs

Tamper = Callable[[Path], Any]


def edit_json(name: str, **changes: Any) -> Tamper:
    def tamper(checkpoint: Path) -> None:
        path = checkpoint / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return tamper


def reseal(change: Callable[[dict[str, Any]], Any]) -> Tamper:
    """A manifest with another content and a checksum that agrees: what only somebody who knows the format can do."""

    def tamper(checkpoint: Path) -> None:
        path = checkpoint / "manifest.json"
        body = json.loads(path.read_text())
        body.pop("checksum")
        change(body)
        path.write_bytes(seal(body))

    return tamper


def list_file(path: str) -> Tamper:
    """Let the manifest's first entry name another file; the hash of an existing one stays."""
    return reseal(lambda body: body["files"][0].update(path=path))


def cut(name: str, to: int) -> Tamper:
    return lambda checkpoint: os.truncate(checkpoint / name, to)


def link(name: str) -> Tamper:
    """The file is moved away, and a link stands in its place: the bytes are still the right ones."""

    def tamper(checkpoint: Path) -> None:
        away = checkpoint.parent / f"away_{Path(name).name}"
        (checkpoint / name).rename(away)
        (checkpoint / name).symlink_to(away)

    return tamper


def replace_by_link(checkpoint: Path) -> None:
    away = checkpoint.parent / "away"
    checkpoint.rename(away)
    checkpoint.symlink_to(away)


def swap(checkpoint: Path) -> None:
    """Step 4's content under step 6's name."""
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step_4"), checkpoint)


WEIGHTS = "policy/weights/model.safetensors"
TAMPERS: dict[str, Tamper] = {
    "training info edited": edit_json("training_info.json", step=5),
    "clock edited": edit_json("clock/clock.json", step=100),
    "clock with the same length": lambda c: (c / "clock/clock.json").write_text(
        (c / "clock/clock.json").read_text().replace('"step": 6', '"step": 7')
    ),
    "manifest edited": edit_json("manifest.json", step=6),
    "manifest missing": lambda c: (c / "manifest.json").unlink(),
    "manifest empty": cut("manifest.json", 0),
    "manifest cut": cut("manifest.json", 500),
    "manifest is a folder": lambda c: ((c / "manifest.json").unlink(), (c / "manifest.json").mkdir()),
    "manifest of nonsense": lambda c: (c / "manifest.json").write_bytes(b"\xff" * 100),
    "manifest nested too deeply": lambda c: (c / "manifest.json").write_text("[" * 100_000),
    "manifest names a path outside": list_file("../step_4/training_info.json"),
    "manifest names an absolute path": list_file("/etc/passwd"),
    "manifest names a path twice": reseal(lambda body: body["files"].append(body["files"][0])),
    "manifest names itself": list_file("manifest.json"),
    "manifest of another step": reseal(lambda body: body.update(step=8)),
    "manifest of a newer schema": reseal(lambda body: body.update(schema_version=99)),
    "manifest with extents that overlap": reseal(lambda body: body["files"][0]["extents"][0].__setitem__(0, 1)),
    "manifest with other types": reseal(lambda body: body.update(files={"a": 1})),
    "manifest with a huge number": reseal(lambda body: body["files"][0].update(size=10**400)),
    "manifest with a list for a number": reseal(lambda body: body["files"][0]["extents"][0].__setitem__(1, [1])),
    "weights missing": lambda c: (c / WEIGHTS).unlink(),
    "weights cut": cut(WEIGHTS, 1000),
    "weights empty": cut(WEIGHTS, 0),
    "weights longer": lambda c: (c / WEIGHTS).write_bytes((c / WEIGHTS).read_bytes() + b"\0"),
    "weights behind a link": link(WEIGHTS),
    "folder behind a link": link("policy"),
    "optimizer missing": lambda c: shutil.rmtree(c / "policy" / "optimizer"),
    "cursor emptied": lambda c: (c / "source/cursor.json").write_text(""),
    "weights are a pipe": lambda c: ((c / WEIGHTS).unlink(), os.mkfifo(c / WEIGHTS)),
    "another step's content": swap,
    "a link in place of the step": replace_by_link,
    "a file in place of the step": lambda c: (shutil.rmtree(c), c.write_text("mine")),
    "an empty folder": lambda c: (shutil.rmtree(c), c.mkdir()),
}

# Sound in themselves, so they may be resumed from when they are named; but they are not what step 6 was.
MISPLACED = ("manifest of another step", "another step's content")


@pytest.mark.parametrize("name", TAMPERS)
def test_a_resume_falls_back_and_says_so(
    project: Project, memory_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    checkpoints = project.finished_copy(memory_path / "run")
    TAMPERS[name](checkpoints / "step_6")
    listed = inspect_checkpoint(checkpoints / "step_6", 6).state
    if name not in MISPLACED:
        with pytest.raises(CorruptCheckpoint, match="step_6"):
            runs.resumed(memory_path / "run", checkpoint=checkpoints / "step_6")
    run = joined(runs.resumed(memory_path / "run"))
    assert run.clock.step == 4
    assert any("SKIPPED" in r.getMessage() and "step_6" in r.getMessage() for r in caplog.records)
    loop.train(run)
    project.assert_equals_straight(memory_path / "run")
    if listed == "broken":  # else it is the run's own, by its manifest, and was replaced
        assert os.path.lexists(checkpoints / "step_6.bak_1"), "what was not ours to judge is set aside, not deleted"


def test_no_checkpoint_is_sound(project: Project, memory_path: Path) -> None:
    """Then starting again from step 0 would throw a run away: it is an error that names each."""
    checkpoints = project.finished_copy(memory_path / "run")
    for step in (2, 4, 6):
        cut(WEIGHTS, 100)(checkpoints / f"step_{step}")
    with pytest.raises(CorruptCheckpoint) as caught:
        runs.resumed(memory_path / "run")
    for step in (2, 4, 6):
        assert f"step_{step}" in str(caught.value)


def foreign_things(checkpoints: Path, outside: Path) -> dict[Path, bytes]:
    """Files that are not the run's, everywhere, under names as close to its own as can be."""
    outside.mkdir()
    contents = {
        outside / "kept.txt": b"outside",
        checkpoints / "notes.txt": b"notes",
        checkpoints / "step_7x" / "mine.txt": b"seven",
        checkpoints / "step_" / "mine.txt": b"none",
        checkpoints / "step_-2" / "mine.txt": b"minus",
        checkpoints / "xstep_2" / "mine.txt": b"x",
        checkpoints / "step_2.old" / "mine.txt": b"old",
        checkpoints / "tmp_step_x" / "mine.txt": b"tmp",
        checkpoints / ".trash" / "mine.txt": b"trash",
        checkpoints / "step_2" / "mine.txt": b"inside a checkpoint",
    }
    for path, data in contents.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (checkpoints / "step_9").symlink_to(outside)
    (checkpoints / "step_2" / "link").symlink_to(outside)
    contents.pop(checkpoints / "step_2" / "mine.txt")  # goes with the checkpoint that it was put into, if that goes
    return contents


def test_nothing_foreign_is_touched_by_saves_and_pruning(project: Project, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    checkpoints = project.finished_copy(run_dir)
    contents = foreign_things(checkpoints, memory_path / "outside")
    run = joined(runs.resumed(run_dir, "max_num_steps=12", "checkpointing.keep_top_k=1"))
    assert run.clock.step == 6
    loop.train(run)
    assert not (checkpoints / "step_2").exists(), "pruned, with the link in it, which was not followed"
    assert {path: path.read_bytes() for path in contents} == contents
    assert (checkpoints / "step_9").is_symlink()
    assert verify_checkpoint(checkpoints / "step_12").sound


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_foreign_thing_has_the_name_of_the_step_to_be_saved(project: Project, memory_path: Path, kind: str) -> None:
    run_dir, outside = memory_path / "run", memory_path / "outside"
    checkpoints = project.finished_copy(run_dir)
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    taken = checkpoints / "step_8"
    if kind == "folder":
        shutil.copytree(outside, taken)
    elif kind == "link":
        taken.symlink_to(outside)
    else:
        taken.write_text("mine")
    loop.train(joined(runs.resumed(run_dir, "max_num_steps=8")))
    aside = checkpoints / "step_8.bak_1"
    assert (aside if kind == "file" else aside / "mine.txt").read_text() == "mine"
    assert aside.is_symlink() == (kind == "link")
    assert (outside / "mine.txt").read_text() == "mine"
    assert verify_checkpoint(taken).sound


def test_another_runs_checkpoint_is_not_taken_for_ours(project: Project, memory_path: Path) -> None:
    checkpoints = project.finished_copy(memory_path / "run")
    loop.train(project.start(memory_path / "other", "seed=8", "max_num_steps=8"))
    shutil.copytree(memory_path / "other" / "checkpoints" / "step_8", checkpoints / "step_8")
    run = runs.resumed(memory_path / "run", "max_num_steps=8")
    assert run.clock.step == 6
    loop.train(run)
    assert (checkpoints / "step_8.bak_1" / "manifest.json").is_file()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[1, 2", None], ids=str)
@pytest.mark.parametrize("name", ["attempt.json", "latest_checkpoint_status.json", "step_4/notes.txt"])
def test_the_files_beside_the_checkpoints_decide_nothing_alone(
    project: Project, memory_path: Path, name: str, content: bytes | None
) -> None:
    checkpoints = project.finished_copy(memory_path / "run")
    if content is None:
        (checkpoints / name).unlink(missing_ok=True)
    else:
        (checkpoints / name).write_bytes(content)
    run = runs.resumed(memory_path / "run", "max_num_steps=8")
    assert run.clock.step == 6
    run.checkpoints.shutdown()


def test_the_metrics_file_was_lost_or_edited(
    project: Project, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project.finished_copy(memory_path / "run")
    (memory_path / "run" / "metrics.jsonl").write_text("{not json\n")
    loop.train(runs.resumed(memory_path / "run", "max_num_steps=7"))
    assert "metrics.jsonl is not as the checkpoint of step 6 left it" in caplog.text
    lines = (memory_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if line != "{not json"] == [7]
