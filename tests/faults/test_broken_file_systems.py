"""Real file systems that fail in the middle of a run, each in its own way. The run stops at its next step, what was
saved is safe, and once the file system works again the run ends as if nothing had happened."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from surefoot import loop
from surefoot.errors import SaveFailed, StorageFailed, SurefootError
from surefoot.run import Run
from tests.faults.project import Project, assert_all_sound, before_offer, fails, joined, observing
from tests.helpers import mounts, runs
from tests.helpers.mounts import MIB

pytestmark = [pytest.mark.needs_root, pytest.mark.usefixtures("can_mount")]


def on(disk: Path) -> str:
    return f"checkpointing.checkpoint_dir={disk / 'checkpoints'}"


def code_of(failure: BaseException) -> int | None:
    return failure.__cause__.errno if isinstance(failure.__cause__, OSError) else None


def test_no_inode_is_left(project: Project, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    with mounts.tmpfs(memory_path / "disk", 8 * MIB, inodes=200) as disk:
        run = project.start(run_dir, on(disk))
        before_offer(run, 4, lambda: mounts.use_up_inodes(disk, leave=8))
        assert code_of(fails(run, after=4, save=4)) == errno.ENOSPC
        for path in (disk / "inodes").iterdir():
            path.unlink()
        project.assert_goes_on(run_dir, 2)


def test_a_disk_error_makes_the_file_system_read_only(project: Project, memory_path: Path) -> None:
    run_dir, image = memory_path / "run", memory_path / "image"
    with mounts.ext4(image, memory_path / "disk", options="errors=remount-ro") as disk:
        run = project.start(run_dir, on(disk))
        before_offer(run, 4, lambda: mounts.fail_disk(disk))
        failure = fails(run, after=4, save=4)
        assert code_of(failure) in (errno.EROFS, errno.EIO)
        assert f"Newest safe checkpoint: {disk / 'checkpoints' / 'step_2'}" in str(failure)
        mounts.unmount(disk)
        mounts.mount_image(image, disk)
        project.assert_goes_on(run_dir, 2)


def test_writes_succeed_and_fsync_fails(project: Project, memory_path: Path) -> None:
    """A file system that promised room which the disk below it does not have."""
    run_dir = memory_path / "run"
    with (
        mounts.tmpfs(memory_path / "backing", 12 * MIB) as backing,
        mounts.ext4(backing / "image", memory_path / "disk") as disk,
    ):
        run = project.start(run_dir, on(disk))
        before_offer(run, 4, lambda: mounts.fill_by_writing(backing))
        last: list[str] = []
        with observing(lambda name, path: last.append(name)):
            failure = fails(run, after=4, save=4)
        assert last[-1] == "fsync"
        assert code_of(failure) in (errno.ENOSPC, errno.EIO)
        assert not (disk / "checkpoints" / "step_4").exists()
        mounts.unmount(disk)
        (backing / "filler").unlink()
        mounts.mount_image(backing / "image", disk)
        project.assert_goes_on(run_dir, 2)


def test_the_disk_is_gone(project: Project, memory_path: Path) -> None:
    """Every call gives EIO from one moment on; what was saved is there when the disk comes back."""
    run_dir, image = memory_path / "run", memory_path / "image"
    with mounts.ext4(image, memory_path / "disk") as disk:
        run = project.start(run_dir, on(disk))
        before_offer(run, 4, lambda: mounts.cut_power(disk))
        fails(run, after=4, save=4)
        mounts.unmount(disk)
        mounts.mount_image(image, disk)
        assert_all_sound(disk / "checkpoints")
        project.assert_goes_on(run_dir, 2)


@pytest.mark.parametrize("moment", ["rename", "exchange"])
def test_the_rename_is_refused(project: Project, memory_path: Path, moment: str) -> None:
    """The folder is made immutable just before the commit, of a new step and of one that replaces another."""
    run_dir = memory_path / "run"
    with mounts.ext4(memory_path / "image", memory_path / "disk") as disk:
        checkpoints = disk / "checkpoints"
        run = project.start(run_dir, on(disk))
        if moment == "exchange":  # step 4 is there already, on a branch that will be left behind
            loop.train(run)
            run = joined(runs.resumed(run_dir, checkpoint=checkpoints / "step_2"))

        def refuse(name: str, path: str) -> None:
            if name == moment and path.endswith("step_4"):
                mounts.immutable(checkpoints, on=True)

        try:
            with observing(refuse):
                failure = fails(run, after=4, save=4) if moment == "rename" else _fails_after_two_more(run)
            assert code_of(failure) == errno.EPERM
            assert (checkpoints / "tmp_step_4").is_dir()
        finally:
            mounts.immutable(checkpoints, on=False)
        assert json.loads((checkpoints / "latest_checkpoint_status.json").read_text())["step"] != 4
        assert_all_sound(checkpoints)
        project.assert_goes_on(run_dir, 2)


def _fails_after_two_more(run: Run) -> SaveFailed:
    with pytest.raises(SaveFailed) as caught:
        loop.train(run)
    return caught.value


def test_a_disk_so_full_that_the_save_cannot_begin(project: Project, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    with mounts.tmpfs(memory_path / "disk", 8 * MIB) as disk:
        run = project.start(run_dir, on(disk))
        before_offer(run, 4, lambda: mounts.fill(disk))
        failure = fails(run, after=4, save=4)
        assert code_of(failure) == errno.ENOSPC
        (disk / "filler").unlink()
        project.assert_goes_on(run_dir, 2)


def test_everything_is_on_the_full_disk(project: Project, memory_path: Path) -> None:
    """Then it is the metrics that meet it first, at the end of the step."""
    with mounts.tmpfs(memory_path / "disk", 8 * MIB) as disk:
        run_dir = disk / "run"
        run = project.start(run_dir)
        before_offer(run, 2, lambda: mounts.fill(disk))
        with pytest.raises(SurefootError) as caught:
            loop.train(run)
        assert "No space left on device" in str(caught.value)
        assert run.clock.step == 2
        (disk / "filler").unlink()
        project.assert_goes_on(run_dir, 0)


def test_the_live_state_is_rescued_when_the_metrics_cannot_be_written(project: Project, memory_path: Path) -> None:
    with mounts.tmpfs(memory_path / "small", 8 * MIB) as small:
        rescue = f"checkpointing.rescue_dir={memory_path / 'rescue'}"
        run_dir = small / "run"
        run = joined(runs.started(project.file, f"run_dir={run_dir}", "max_num_steps=60", on(memory_path), rescue))
        before_offer(run, 3, lambda: mounts.fill(small))
        with pytest.raises(StorageFailed, match=r"cannot write .*metrics\.jsonl") as caught:
            loop.train(run)
        step = run.clock.step
        rescued = memory_path / "rescue" / f"step_{step}"
        assert f"Step {step} is saved at {rescued}; resume with --from {rescued}" in str(caught.value)
        (small / "filler").unlink()
        resumed = runs.resumed(run_dir, f"max_num_steps={step + 2}", checkpoint=rescued)
        assert (resumed.clock.step, loop.train(resumed).steps) == (step, 2)


def test_the_metrics_cannot_be_written(project: Project, memory_path: Path) -> None:
    """Only the run_dir's disk is full. No step goes unrecorded: the run stops, the checkpoints are safe."""
    run_dir = memory_path / "small" / "run"
    with mounts.tmpfs(memory_path / "small", 8 * MIB) as small:
        run = joined(runs.started(project.file, f"run_dir={run_dir}", "max_num_steps=60", on(memory_path)))
        before_offer(run, 3, lambda: mounts.fill(small))
        with pytest.raises(SurefootError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
            loop.train(run)  # the last page of the file has room for some more lines
        assert 3 < run.clock.step < 60
        whole = (run_dir / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
        recorded = max(json.loads(line)["step"] for line in whole if b'"train"' in line)
        assert run.clock.step - recorded in (0, 1)  # it may be the validation's line that did not fit
        assert_all_sound(memory_path / "checkpoints")
        with pytest.raises(SurefootError, match=r"run cannot be written to: No space left on device"):
            runs.resumed(run_dir)
        (small / "filler").unlink()
        assert loop.train(runs.resumed(run_dir, f"max_num_steps={run.clock.step + 2}")).steps > 0
        lines = [line["step"] for line in runs.metric_lines(run_dir) if line["kind"] == "train"]
        assert lines == list(range(1, len(lines) + 1)), "no step twice, none missing"


def test_the_directory_disappears_between_two_saves(project: Project, memory_path: Path) -> None:
    """Deleted, or its disk unmounted: the next save fails instead of going to another disk in its place."""
    run = joined(runs.started(project.file, f"run_dir={memory_path / 'run'}", "max_num_steps=9", on(memory_path)))
    before_offer(run, 3, lambda: shutil.rmtree(memory_path / "checkpoints"))
    with pytest.raises(SaveFailed, match="was deleted or unmounted since the run began"):
        loop.train(run)
    assert run.clock.step == 4
    assert not (memory_path / "checkpoints").exists()
