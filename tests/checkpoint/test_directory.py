from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.checkpoint import directory
from surefoot.checkpoint.directory import DirectoryLock
from surefoot.errors import CheckpointError
from tests.checkpoint import runs

_HOLD = (
    "import sys, pathlib; from surefoot.checkpoint.directory import DirectoryLock; "
    "lock = DirectoryLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_a_second_run_in_another_process_is_refused_and_a_dead_one_holds_nothing(memory_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(memory_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"in use by another run \(pid {other.pid}\)"):
            runs.manager(memory_path).open(resume=True)
        other.kill()
    manager = runs.manager(memory_path)
    manager.open(resume=True)
    manager.shutdown()


def test_the_lock_is_let_go_at_shutdown_and_after_a_refusal(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    manager.open(resume=False)
    with pytest.raises(CheckpointError, match=f"pid {os.getpid()}"):
        DirectoryLock(memory_path)
    manager.shutdown()
    (memory_path / "foreign").touch()
    with pytest.raises(CheckpointError):
        manager.open(resume=False)
    DirectoryLock(memory_path).release()


def test_a_forked_child_does_not_keep_the_lock(memory_path: Path) -> None:
    lock = DirectoryLock(memory_path)
    (alive, said), (told, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(said, b"x")
        os.read(told, 1)
        os._exit(0)
    os.read(alive, 1)
    os.close(lock._descriptor)  # as the parent's death would
    lock._descriptor = -1
    try:
        DirectoryLock(memory_path).release()  # free, although the child is alive
    finally:
        for descriptor in (end, told, alive, said):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("name", "words"), [("notes.txt", "something else"), ("step_4", "another run"), ("tmp_step_4", "another run")]
)
def test_a_new_run_refuses_a_used_directory_and_a_resume_does_not_mind(
    memory_path: Path, name: str, words: str
) -> None:
    (memory_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{words}.*{name}.*--overwrite"):
        runs.manager(memory_path).open(resume=False)
    manager = runs.manager(memory_path)
    manager.open(resume=True)
    manager.shutdown()
    assert (memory_path / name).is_dir()


def test_a_file_in_place_of_the_directory(memory_path: Path) -> None:
    (memory_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file.*checkpoint_dir"):
        runs.manager(memory_path / "file").open(resume=False)


def test_a_directory_that_cannot_be_written(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("surefoot.checkpoint.storage.sync_directory", refuse)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        directory.prove_usable(memory_path)


def test_opening_makes_the_directory_and_leaves_only_the_lock(memory_path: Path) -> None:
    manager = runs.manager(memory_path / "deep" / "er")
    manager.open(resume=False)
    manager.shutdown()
    assert [path.name for path in (memory_path / "deep" / "er").iterdir()] == [".lock"]
    manager.open(resume=False)  # and that counts as unused
    manager.shutdown()


def test_too_little_space_is_told_before_the_run(memory_path: Path) -> None:
    manager = runs.manager(memory_path, keep_top_k=2)
    free = directory.shutil.disk_usage(memory_path).free
    with pytest.raises(CheckpointError, match=r"GiB free.*needed for 3 checkpoints to keep and one being written"):
        manager.open(resume=False, state_bytes=free // 3)
    manager.open(resume=False, state_bytes=free // 100)
    manager.shutdown()


def test_without_a_limit_every_save_of_the_run_must_fit(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    free = directory.shutil.disk_usage(memory_path).free
    with pytest.raises(CheckpointError, match="needed for 200 checkpoints"):
        manager.open(resume=False, state_bytes=free // 100, num_saves=200)


def test_opening_cleans_up_after_a_crash_and_says_what_it_leaves(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = runs.manager(memory_path)
    runs.save(manager, 2)
    (memory_path / "tmp_step_4").mkdir()
    (memory_path / "tmp_step_x").mkdir()
    (memory_path / ".trash").mkdir()
    (memory_path / ".trash" / "step_1.123").mkdir()
    caplog.clear()
    manager.open(resume=True)
    manager.shutdown()
    assert list((memory_path / ".trash").iterdir()) == []
    assert (memory_path / "tmp_step_4").is_dir()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"{memory_path / 'tmp_step_4'} is from a save that did not finish")


def test_what_a_save_left_that_a_later_one_has_overtaken_is_deleted_if_it_is_ours(memory_path: Path) -> None:
    manager = runs.manager(memory_path / "run")
    for step in (3, 5, 7):  # power cuts
        (manager.init_tmp_checkpoint(step, {"step": step}) / "half").write_bytes(b"x" * 100)
    runs.save(manager, 6)
    theirs = memory_path / "theirs"
    theirs.mkdir()
    (theirs / "training_info.json").write_text("{}")
    (memory_path / "run" / "tmp_step_1").symlink_to(theirs)
    (memory_path / "run" / "tmp_step_2").mkdir()
    (memory_path / "run" / "tmp_step_2" / "notes.txt").write_text("mine")
    (memory_path / "run" / "tmp_step_4").write_text("mine")
    manager.open(resume=True)
    manager.shutdown()
    left = {path.name for path in (memory_path / "run").glob("tmp_*")}
    assert left == {"tmp_step_1", "tmp_step_2", "tmp_step_4", "tmp_step_7"}, "step 7 may still be looked into"
    assert (theirs / "training_info.json").exists()
    assert list((memory_path / "run" / ".trash").iterdir()) == []


def test_a_new_run_does_not_touch_a_trash_it_did_not_make(memory_path: Path) -> None:
    (memory_path / ".trash").mkdir()
    (memory_path / ".trash" / "step_1.123").write_text("theirs")
    with pytest.raises(CheckpointError, match=r"\.trash"):
        runs.manager(memory_path).open(resume=False)
    assert (memory_path / ".trash" / "step_1.123").read_text() == "theirs"
