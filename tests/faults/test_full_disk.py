"""The disk is full when a checkpoint is written in the background: `surefoot train` and `resume`, from end to end."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from surefoot import build, loop
from surefoot.checkpoint import verify_checkpoint
from surefoot.cli import main
from surefoot.errors import SaveFailed
from surefoot.run import Run
from tests.faults.project import (
    STEPS,
    Project,
    assert_all_sound,
    before_offer,
    in_every_case,
    joined,
    train_lines,
    trained_steps,
)
from tests.helpers import mounts, runs

pytestmark = [pytest.mark.needs_root, pytest.mark.usefixtures("can_mount")]

DISK = 8 * mounts.MIB
TOO_LITTLE = 32 << 10  # far less than a state; enough for the save to begin


class Ended(NamedTuple):
    status: Any
    said: str
    error: BaseException | None


class Disk(NamedTuple):
    """A small disk for the checkpoints, and the run_dir elsewhere."""

    folder: Path
    run_dir: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def fill(self) -> None:
        mounts.fill(self.folder, TOO_LITTLE)

    def make_room(self) -> None:
        (self.folder / "filler").unlink()

    def status(self) -> str:
        file = self.checkpoints / "latest_checkpoint_status.json"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def disk(memory_path: Path) -> Iterator[Disk]:
    with mounts.tmpfs(memory_path / "disk", DISK) as folder:
        yield Disk(folder, memory_path / "run")


@pytest.fixture
def surefoot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command line, in this process; each save is joined, and `spoil` may break what `build` has made."""

    def run(*words: Any, spoil: Callable[[Run], None] = lambda run: None) -> Ended:
        for name in ("start", "resume"):
            real = getattr(build, name)

            def made(*args: Any, real: Callable[..., Run] = real, **kwargs: Any) -> Run:
                built = joined(real(*args, **kwargs))
                spoil(built)
                return built

            monkeypatch.setattr(build, name, made)
        monkeypatch.setattr(sys, "argv", ["surefoot", *(str(word) for word in words)])
        with pytest.raises(SystemExit) as caught:
            main()
        monkeypatch.undo()
        out, err = capsys.readouterr()
        return Ended(caught.value.code, out + err, caught.value.__context__)

    return run


def train_words(project: Project, disk: Disk, *more: str) -> list[str]:
    return [
        "train",
        str(project.file),
        f"run_dir={disk.run_dir}",
        f"max_num_steps={STEPS}",
        f"checkpointing.checkpoint_dir={disk.checkpoints}",
        *more,
    ]


def test_the_first_save_meets_a_full_disk(every_project: Project, disk: Disk, surefoot: Callable[..., Ended]) -> None:
    calls: list[list[int]] = []

    def spoil(run: Run) -> None:
        calls.append(trained_steps(run))
        disk.fill()

    ended = surefoot(*train_words(every_project, disk), spoil=spoil)
    assert ended.status == 1
    assert sorted(set(calls[0])) == [1, 2], "no engine was trained after the failure"
    assert train_lines(disk.run_dir) == 2
    assert (disk.checkpoints / "tmp_step_2").is_dir()
    assert not list(disk.checkpoints.glob("step_*"))
    assert disk.status() == ""
    failure = ended.error
    assert isinstance(failure, SaveFailed)
    assert isinstance(failure.__cause__, OSError)
    assert failure.__cause__.errno == errno.ENOSPC
    for word in ("at step 2", str(disk.checkpoints / "tmp_step_2"), "No space left", "Newest safe checkpoint: none"):
        assert word in ended.said
    disk.make_room()
    ended = surefoot("resume", disk.run_dir)
    assert ended.status == 0, ended.said
    assert "starts again from step 0" in ended.said
    every_project.assert_equals_straight(disk.run_dir, disk.checkpoints)


def test_two_steps_are_exactly_two_trainings(project: Project, disk: Disk, surefoot: Callable[..., Ended]) -> None:
    calls: list[list[int]] = []

    def spoil(run: Run) -> None:
        calls.append(trained_steps(run))
        disk.fill()

    surefoot(*train_words(project, disk), spoil=spoil)
    assert calls == [[1, 2]]


@in_every_case("step", 4, 6)
def test_a_later_save_meets_a_full_disk(
    every_project: Project, disk: Disk, surefoot: Callable[..., Ended], step: int
) -> None:
    """At step 6 there is no next step: the failure shows as the run ends."""
    ended = surefoot(*train_words(every_project, disk), spoil=lambda run: before_offer(run, step, disk.fill))
    safe = disk.checkpoints / f"step_{step - 2}"
    assert ended.status == 1
    assert train_lines(disk.run_dir) == step
    assert f"Newest safe checkpoint: {safe}" in ended.said
    assert not (disk.checkpoints / f"step_{step}").exists()
    assert json.loads(disk.status())["step"] == step - 2
    assert_all_sound(disk.checkpoints)
    disk.make_room()
    ended = surefoot("resume", disk.run_dir)
    assert ended.status == 0, ended.said
    every_project.assert_equals_straight(disk.run_dir, disk.checkpoints)


def test_a_run_goes_on_from_the_rescued_step(
    every_project: Project, disk: Disk, memory_path: Path, surefoot: Callable[..., Ended]
) -> None:
    rescue = memory_path / "rescue"
    words = train_words(every_project, disk, f"checkpointing.rescue_dir={rescue}")
    ended = surefoot(*words, spoil=lambda run: disk.fill())
    rescued = rescue / "step_2"
    assert ended.status == 1
    assert f"Step 2 is saved at {rescued}; resume with --from {rescued}" in ended.said
    assert verify_checkpoint(rescued).sound
    disk.make_room()
    ended = surefoot("resume", disk.run_dir, "--from", rescued)
    assert ended.status == 0, ended.said
    assert "4 steps done" in ended.said
    every_project.assert_equals_straight(disk.run_dir, disk.checkpoints)
    assert verify_checkpoint(rescued).sound, "the rescued step stays as it was"


def test_a_rescued_step_is_newer_than_the_last_safe_one(
    project: Project, disk: Disk, memory_path: Path, surefoot: Callable[..., Ended]
) -> None:
    words = train_words(project, disk, f"checkpointing.rescue_dir={memory_path / 'rescue'}")
    ended = surefoot(*words, spoil=lambda run: before_offer(run, 4, disk.fill))
    assert f"Newest safe checkpoint: {disk.checkpoints / 'step_2'}" in ended.said
    disk.make_room()
    assert surefoot("resume", disk.run_dir, "--from", memory_path / "rescue" / "step_4").status == 0
    project.assert_equals_straight(disk.run_dir, disk.checkpoints)


def test_a_resume_after_a_rescue_needs_no_from(
    project: Project, disk: Disk, memory_path: Path, surefoot: Callable[..., Ended]
) -> None:
    """Once `--from` was said, the run descends from the rescued step, even if it died before its next save."""
    words = train_words(project, disk, f"checkpointing.rescue_dir={memory_path / 'rescue'}")
    surefoot(*words, spoil=lambda run: before_offer(run, 4, disk.fill))
    disk.make_room()
    runs.resumed(disk.run_dir, checkpoint=memory_path / "rescue" / "step_4").checkpoints.shutdown()
    run = joined(runs.resumed(disk.run_dir))
    assert run.clock.step == 4
    loop.train(run)
    project.assert_equals_straight(disk.run_dir, disk.checkpoints)


def test_without_from_the_newest_in_the_run_is_taken_and_the_rescued_one_stays(
    project: Project, disk: Disk, memory_path: Path, surefoot: Callable[..., Ended]
) -> None:
    words = train_words(project, disk, f"checkpointing.rescue_dir={memory_path / 'rescue'}")
    surefoot(*words, spoil=lambda run: before_offer(run, 4, disk.fill))
    disk.make_room()
    ended = surefoot("resume", disk.run_dir)
    assert f"a newer state was rescued at {memory_path / 'rescue' / 'step_4'}" in ended.said
    assert "going on from step 2" in ended.said
    project.assert_equals_straight(disk.run_dir, disk.checkpoints)
    assert verify_checkpoint(memory_path / "rescue" / "step_4").sound


def test_the_rescue_fails_too(project: Project, disk: Disk, memory_path: Path, surefoot: Callable[..., Ended]) -> None:
    words = train_words(project, disk, f"checkpointing.rescue_dir={disk.folder / 'rescue'}")
    ended = surefoot(*words, spoil=lambda run: before_offer(run, 4, disk.fill))
    assert ended.status == 1
    assert "The rescue of step 4 failed too" in ended.said
    assert f"Newest safe checkpoint: {disk.checkpoints / 'step_2'}" in ended.said
    disk.make_room()
    project.assert_goes_on(disk.run_dir, 2)
