"""The background writer fails, dies, or has its directory taken away, in the middle of a real run."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import loop
from surefoot.checkpoint import wait_for_processes
from surefoot.errors import CheckpointError, SaveFailed
from tests.faults.project import (
    Project,
    assert_all_sound,
    before_offer,
    fails,
    joined,
    observing,
    plant_writer,
    train_lines,
)
from tests.helpers import runs
from tests.helpers.fork_server import ForkServer

Observer = Callable[[str, str], None]


def once(moment: Callable[[str, str], bool], act: Callable[[], Any]) -> Observer:
    """Act before the first storage operation that `moment` says yes to."""
    done: list[bool] = []

    def observer(name: str, path: str) -> None:
        if not done and moment(name, path):
            done.append(True)
            act()

    return observer


def fail(code: int) -> Callable[[], None]:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def test_the_directory_vanishes_under_the_writer(project: Project, memory_path: Path) -> None:
    run = project.start(memory_path / "run")
    tmp = memory_path / "run" / "checkpoints" / "tmp_step_4"
    with observing(once(lambda name, path: path.endswith("tmp_step_4/policy"), lambda: shutil.rmtree(tmp))):
        failure = fails(run, after=4, save=4)
    assert isinstance(failure.__cause__, FileNotFoundError)
    project.assert_goes_on(memory_path / "run", 2)


def test_the_directory_vanishes_just_before_the_commit(project: Project, memory_path: Path) -> None:
    run = project.start(memory_path / "run")
    tmp = memory_path / "run" / "checkpoints" / "tmp_step_4"
    moment = once(lambda name, path: name == "rename" and path.endswith("/step_4"), lambda: shutil.rmtree(tmp))
    with observing(moment):
        fails(run, after=4, save=4)
    project.assert_goes_on(memory_path / "run", 2)


def test_all_checkpoints_vanish(project: Project, memory_path: Path) -> None:
    """Somebody deletes the whole folder: the run says that nothing is safe, and a resume that they are gone. It
    does not begin again by itself: they may be on a disk that is not mounted."""
    run_dir = memory_path / "run"
    run = project.start(run_dir)
    vanish = once(lambda name, path: "tmp_step_4/" in path, lambda: shutil.rmtree(run_dir / "checkpoints"))
    with observing(vanish):
        failure = fails(run, after=4, save=4)
    assert "Newest safe checkpoint: none" in str(failure)
    with pytest.raises(CheckpointError, match="has no checkpoint of the run in"):
        runs.resumed(run_dir)


class NotAnException(BaseException):
    """As torch's own CheckpointException."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        NotAnException("shards missing"),
        KeyboardInterrupt(),
        SystemExit(0),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_writer_raises(project: Project, memory_path: Path, error: BaseException) -> None:
    def writer(sink: Any) -> None:
        raise error

    run = project.start(memory_path / "run")
    plant_writer(run, 4, writer)
    assert fails(run, after=4, save=4).__cause__ is error
    project.assert_goes_on(memory_path / "run", 2)


@pytest.mark.parametrize("how", ["killed", "ended badly"])
def test_a_writer_process_dies(project: Project, memory_path: Path, how: str) -> None:
    """A part that lets another process write its file; the process dies before it is done."""
    process: list[subprocess.Popen[bytes]] = []

    def writer(sink: Any) -> None:
        target = sink.local("by_a_process.bin")
        code = "import sys, time; sys.exit(3)" if how == "ended badly" else "import time; time.sleep(60)"
        process.append(subprocess.Popen([sys.executable, "-c", code]))
        if how == "killed":
            process[0].send_signal(signal.SIGKILL)
        wait_for_processes(process)
        sink.adopt(target.name)

    run = project.start(memory_path / "run")
    plant_writer(run, 4, writer)
    failure = fails(run, after=4, save=4)
    assert isinstance(failure.__cause__, CheckpointError)
    assert str(process[0].pid) in str(failure)
    assert ("signal 9" if how == "killed" else "exit code 3") in str(failure)
    project.assert_goes_on(memory_path / "run", 2)


def test_the_writer_hears_of_a_failed_fsync(project: Project, memory_path: Path) -> None:
    run = project.start(memory_path / "run")
    moment = once(lambda name, path: name == "fsync" and path.endswith("tmp_step_4/policy/optimizer"), fail(errno.EIO))
    with observing(moment):
        fails(run, after=4, save=4)
    assert not (memory_path / "run" / "checkpoints" / "step_4").exists()
    project.assert_goes_on(memory_path / "run", 2)


def test_the_parents_fsync_fails_after_the_rename(project: Project, memory_path: Path) -> None:
    """The save counts as failed, the step stays in place, and the next start proves what is there."""
    run_dir = memory_path / "run"
    checkpoints = run_dir / "checkpoints"

    def moment(name: str, path: str) -> bool:
        return name == "fsync" and Path(path) == checkpoints and (checkpoints / "step_4").exists()

    run = project.start(run_dir)
    with observing(once(moment, fail(errno.EIO))):
        failure = fails(run, after=4, save=4)
    assert failure.path == str(checkpoints / "step_4")
    assert f"Newest safe checkpoint: {checkpoints / 'step_2'}" in str(failure)
    assert '"step": 2' in (checkpoints / "latest_checkpoint_status.json").read_text()
    project.assert_goes_on(run_dir, 4)


def test_the_status_file_cannot_be_written(project: Project, memory_path: Path) -> None:
    """The checkpoint is there and sound, but nobody was told: a failed save all the same, and a resume finds it."""
    run_dir = memory_path / "run"
    run = project.start(run_dir)

    def moment(name: str, path: str) -> bool:
        return name == "rename" and path.endswith("latest_checkpoint_status.json") and run.clock.step >= 4

    with observing(once(moment, fail(errno.EDQUOT))):
        fails(run, after=4, save=4)
    assert '"step": 2' in (run_dir / "checkpoints" / "latest_checkpoint_status.json").read_text()
    project.assert_goes_on(run_dir, 4)


def test_pruning_that_fails_never_stops_training(
    project: Project, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = memory_path / "run"
    run = project.start(run_dir, "checkpointing.keep_top_k=1")
    with observing(
        lambda name, path: fail(errno.EACCES)() if name in ("unlink", "rmdir") and ".trash" in path else None
    ):
        loop.train(run)
    project.assert_equals_straight(run_dir)
    assert "old checkpoints could not be removed" in caplog.text


def test_without_joining_the_failure_surfaces_by_the_next_save_or_the_end(project: Project, memory_path: Path) -> None:
    """However the writer and the steps interleave, a failed save never lets a later step be saved."""
    run_dir = memory_path / "run"
    run = runs.started(project.file, f"run_dir={run_dir}")

    def writer(sink: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    plant_writer(run, 2, writer)
    with pytest.raises(SaveFailed, match="at step 2"):
        loop.train(run)
    assert run.clock.step <= 4
    assert train_lines(run_dir) == run.clock.step
    assert not list((run_dir / "checkpoints").glob("step_*"))
    project.assert_goes_on(run_dir, 0)


def test_a_failure_while_another_error_ends_the_run_masks_nothing(
    project: Project, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = memory_path / "run"
    run = runs.started(project.file, f"run_dir={run_dir}")

    def writer(sink: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def crash() -> None:
        run.checkpoints.wait_for_finalization()
        raise ZeroDivisionError("a bug in the step")

    plant_writer(run, 2, writer)
    before_offer(run, 3, crash)
    with pytest.raises((ZeroDivisionError, SaveFailed)) as caught:
        loop.train(run)
    assert isinstance(caught.value, SaveFailed) or "its last save failed too" in caplog.text
    project.assert_goes_on(run_dir, 0)


def test_a_crash_in_a_step_leaves_the_last_save_whole(project: Project, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    run = runs.started(project.file, f"run_dir={run_dir}")
    engine: Any = run.kit.engines["policy"]
    train = engine.train

    def crash(*args: Any) -> Any:
        if run.clock.step == 2:
            raise torch.OutOfMemoryError("no memory")
        return train(*args)

    engine.train = crash
    with pytest.raises(torch.OutOfMemoryError):
        loop.train(run)
    assert_all_sound(run_dir / "checkpoints")
    project.assert_goes_on(run_dir, 2)


def test_a_failed_save_leaves_its_directory_until_the_step_is_saved_again(project: Project, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    run = project.start(run_dir)
    plant_writer(run, 4, lambda sink: fail(errno.EIO)())
    fails(run, after=4, save=4)
    left = run_dir / "checkpoints" / "tmp_step_4"
    assert (left / "training_info.json").is_file()
    run = joined(runs.resumed(run_dir, "max_num_steps=3"))
    loop.train(run)
    assert left.is_dir()
    project.assert_goes_on(run_dir, 3, "max_num_steps=6")
    assert not left.exists()


def test_a_file_grows_beyond_the_limit_on_its_size(
    project: Project, memory_path: Path, fork_server: ForkServer
) -> None:
    run_dir = memory_path / "run"
    assert fork_server.call(run_with_a_size_limit, project.file, run_dir, log=memory_path / "log") == 0, (
        memory_path / "log"
    ).read_text()
    assert train_lines(run_dir) == 4
    assert not (run_dir / "checkpoints" / "step_4").exists()
    assert_all_sound(run_dir / "checkpoints")
    project.assert_goes_on(run_dir, 2)


def run_with_a_size_limit(file: str, run_dir: str) -> int:
    """In a child: from step 4 on, no file may have more than 8 KiB."""
    run = Project(Path(file), Path()).start(Path(run_dir))
    before_offer(run, 4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, resource.RLIM_INFINITY)))
    try:
        loop.train(run)
    except SaveFailed as failure:
        cause = failure.__cause__
        return 0 if isinstance(cause, OSError) and cause.errno == errno.EFBIG else 3
    return 4
