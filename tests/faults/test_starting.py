"""What keeps a run from starting shows before anything heavy begins, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot import build, loop
from surefoot.checkpoint import CheckpointManager
from surefoot.errors import CheckpointError, ModelError, SurefootError
from surefoot.run import Run
from tests.faults.project import Project, assert_all_sound
from tests.helpers import mounts, runs
from tests.helpers.fork_server import ForkServer


def overwriting(project: Project, *words: str) -> Run:
    return build.start(runs.config_of(project.file, *words), overwrite=True, console=runs.quiet())


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.needs_root
@pytest.mark.usefixtures("can_mount")
@pytest.mark.parametrize("leave", [0, 64 << 10], ids=["not one page", "less than the checkpoints need"])
def test_the_disk_is_full_at_the_start(project: Project, memory_path: Path, leave: int) -> None:
    with mounts.tmpfs(memory_path / "disk", mounts.MIB) as disk:
        mounts.fill(disk, leave)
        with pytest.raises(CheckpointError, match=r"No space left on device|GiB free") as caught:
            project.start(memory_path / "run", f"checkpointing.checkpoint_dir={disk / 'checkpoints'}")
        assert str(disk / "checkpoints") in str(caught.value)
        assert names(memory_path) == {"disk", "disk/filler"}
        (disk / "filler").unlink()
        run = project.start(memory_path / "run", f"checkpointing.checkpoint_dir={disk / 'checkpoints'}")
        loop.train(run)
        project.assert_equals_straight(memory_path / "run", disk / "checkpoints")


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_folder_that_this_user_may_not_write_to(project: Project, memory_path: Path, fork_server: ForkServer) -> None:
    for folder in (memory_path, project.file.parent.parent, project.file.parent):
        folder.chmod(0o755)
    log = memory_path / "log"
    locked = memory_path / "locked"
    locked.mkdir(0o755)
    for words in ((f"run_dir={locked / 'run'}",), (f"checkpointing.checkpoint_dir={locked / 'checkpoints'}",)):
        status = fork_server.call(start_as_nobody, project.file, memory_path / "run", *words, log=log)
        assert status == 0, log.read_text()
        assert str(locked) in log.read_text()
        assert "Permission denied" in log.read_text()
        assert names(locked) == set()


def start_as_nobody(file: str, run_dir: str, *words: str) -> int:
    """In a child."""
    os.setegid(65534)
    os.seteuid(65534)
    try:
        runs.started(Path(file), f"run_dir={run_dir}", *words)
    except SurefootError as error:
        print(error)  # noqa: T201 - into the child's log
        return 0
    return 3


@pytest.mark.parametrize("which", ["run_dir", "checkpointing.checkpoint_dir"])
def test_a_path_is_a_file(project: Project, memory_path: Path, which: str) -> None:
    file = memory_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(SurefootError, match=str(file)):
            project.start(memory_path / "run", f"{which}={path}")
    assert file.read_text() == "mine"
    assert names(memory_path) == {"file"}


def test_a_folder_is_used_twice(project: Project, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    loop.train(project.start(run_dir, "max_num_steps=2"))
    before = names(run_dir)
    with pytest.raises(CheckpointError, match=r"surefoot resume .*--overwrite"):
        project.start(run_dir)
    assert names(run_dir) == before
    loop.train(overwriting(project, f"run_dir={run_dir}"))
    project.assert_equals_straight(run_dir)
    assert names(memory_path / "run.bak_1") == before
    assert_all_sound(memory_path / "run.bak_1" / "checkpoints")


def test_overwriting_a_run_whose_checkpoints_lie_elsewhere(project: Project, memory_path: Path) -> None:
    words = (f"run_dir={memory_path / 'run'}", f"checkpointing.checkpoint_dir={memory_path / 'elsewhere'}")
    loop.train(runs.started(project.file, *words))
    loop.train(overwriting(project, *words))
    for folder in ("elsewhere", "elsewhere.bak_1"):
        assert {path.name for path in (memory_path / folder).glob("step_*")} == {"step_2", "step_4", "step_6"}
        assert_all_sound(memory_path / folder)


@pytest.mark.parametrize(  # what shows early, later and last
    "word", ["data.train.path=FOLDER/none.jsonl", "policy.model_init.model_type=none", "logger.wandb=true"]
)
def test_a_run_that_is_refused_leaves_the_old_one_where_it_was(
    project: Project, memory_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = (f"run_dir={memory_path / 'run'}", f"checkpointing.checkpoint_dir={memory_path / 'elsewhere'}")
    loop.train(runs.started(project.file, *words, "max_num_steps=2"))
    before = names(memory_path)
    with pytest.raises(SurefootError, match=r"none|wandb"):
        overwriting(project, *words, word.replace("FOLDER", str(memory_path)))
    assert names(memory_path) == before
    loop.train(runs.resumed(memory_path / "run", "max_num_steps=6"))
    assert (memory_path / "elsewhere" / "step_6").is_dir()


@pytest.mark.parametrize("section", ["policy", "value"])
def test_an_adapter_that_does_not_fit_shows_before_the_data_is_read(memory_path: Path, section: str) -> None:
    file = runs.write_project(memory_path / "project", case="ppo")
    with pytest.raises(ModelError, match=r"lora\.dim: found 17, but .* is 16 x 16"):
        runs.started(
            file, f"{section}.lora={{dim: 17}}", "data.train.path=none.jsonl", f"run_dir={memory_path / 'run'}"
        )
    assert not (memory_path / "run").exists()


def test_a_run_whose_checkpoints_cannot_be_moved_stays_as_it_was(project: Project, memory_path: Path) -> None:
    loop.train(runs.started(project.file, f"run_dir={memory_path / 'run'}", "max_num_steps=2"))
    (memory_path / "elsewhere").mkdir()
    (memory_path / "elsewhere" / "notes.txt").write_text("mine")
    before = names(memory_path)
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        overwriting(
            project, f"run_dir={memory_path / 'run'}", f"checkpointing.checkpoint_dir={memory_path / 'elsewhere'}"
        )
    assert names(memory_path) == before


def test_an_old_run_that_cannot_go_back_is_said_to_stay_aside(
    project: Project, memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop.train(project.start(memory_path / "run", "max_num_steps=2"))

    def failing(*args: Any) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(CheckpointManager, "start_attempt", failing)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        overwriting(project, f"run_dir={memory_path / 'run'}")
    assert f"the old run stays at {memory_path / 'run'}.bak_1" in caplog.text
    assert_all_sound(memory_path / "run.bak_1" / "checkpoints")


@pytest.mark.parametrize("where", ["run", "run/checkpoints"])
def test_somebody_elses_files(project: Project, memory_path: Path, where: str) -> None:
    notes = memory_path / where / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    before = names(memory_path)
    for begin in (runs.started, lambda file, *words: overwriting(project, *words)):
        with pytest.raises(CheckpointError, match=r"notes\.txt|checkpoints"):
            begin(project.file, f"run_dir={memory_path / 'run'}")
    assert names(memory_path) == before


def test_two_runs_want_one_checkpoint_directory(project: Project, memory_path: Path) -> None:
    shared = f"checkpointing.checkpoint_dir={memory_path / 'shared'}"
    first = project.start(memory_path / "first", shared)
    with pytest.raises(CheckpointError):
        project.start(memory_path / "second", shared)
    assert not (memory_path / "second").exists()
    loop.train(first)
    project.assert_equals_straight(memory_path / "first", memory_path / "shared")


def test_a_start_that_is_refused_leaves_the_other_one_its_folder(project: Project, memory_path: Path) -> None:
    run_dir, elsewhere = memory_path / "run", f"checkpointing.checkpoint_dir={memory_path / 'elsewhere'}"
    first = project.start(run_dir)
    (run_dir / "config.yaml").unlink()  # as before the data is prepared: nothing but locks and empty folders
    (run_dir / "checkpoints" / "attempt.json").unlink()
    for words in ((), (elsewhere,)):
        for begin in (runs.started, lambda file, *words: overwriting(project, *words)):
            with pytest.raises(CheckpointError, match=r"in use by another run"):
                begin(project.file, f"run_dir={run_dir}", *words)
    assert names(memory_path) == {"run", "run/.lock", "run/checkpoints", "run/checkpoints/.lock"}
    loop.train(first)
    assert (run_dir / "checkpoints" / "step_6").is_dir()


def test_a_run_that_is_going_on_is_not_moved_aside(project: Project, memory_path: Path) -> None:
    first = project.start(memory_path / "run", f"checkpointing.checkpoint_dir={memory_path / 'elsewhere'}")
    with pytest.raises(CheckpointError, match=r"in use by another run"):
        overwriting(project, f"run_dir={memory_path / 'run'}")
    assert {path.name for path in memory_path.iterdir()} == {"run", "elsewhere"}
    loop.train(first)
    project.assert_equals_straight(memory_path / "run", memory_path / "elsewhere")


@pytest.mark.parametrize("name", ['it\'s "so" a\\b #1: x', "日本語 🙂"])
def test_a_folder_with_an_odd_name(project: Project, memory_path: Path, name: str) -> None:
    run = build.start(
        runs.config_of(project.file, "max_num_steps=6").model_copy(update={"run_dir": str(memory_path / name)})
    )
    loop.train(run)
    project.assert_equals_straight(memory_path / name)
    resumed = runs.resumed(memory_path / name, "max_num_steps=7")
    loop.train(resumed)
    assert (memory_path / name / "checkpoints" / "step_7").is_dir()
    assert {path.name for path in memory_path.iterdir()} == {name}


@pytest.mark.parametrize(
    "key",
    [
        "run_dir",
        "checkpointing.checkpoint_dir",
        "data.train.path",
        "policy.tokenizer.name",
        "policy.tokenizer.chat_template",
    ],
)
@pytest.mark.parametrize("path", ["x" * 300, "~no_such_user/x/y"])
def test_a_path_that_cannot_be(
    project: Project, memory_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str
) -> None:
    monkeypatch.chdir(memory_path)
    if path.startswith("~") and ("_dir" in key):
        pytest.skip("as in a shell, a ~ that means nothing stays as it is")
    with pytest.raises(SurefootError, match=path[:10]):
        project.start(memory_path / "run", f"{key}={path}")
    assert names(memory_path) == set()


def test_the_home_directory(project: Project, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(memory_path))
    monkeypatch.chdir(memory_path)
    loop.train(runs.started(project.file, "run_dir=~/run", "max_num_steps=1"))
    assert {path.name for path in memory_path.iterdir()} == {"run"}


def test_a_project_with_a_config_is_no_run_and_not_moved_aside(project: Project, memory_path: Path) -> None:
    (memory_path / "config.yaml").write_text("algorithm: sft\n")
    (memory_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="holds files that are not a run's"):
        overwriting(project, f"run_dir={memory_path}")
    assert sorted(path.name for path in memory_path.iterdir()) == ["config.yaml", "train.jsonl"]


@pytest.mark.parametrize("where", ["run", "run/checkpoints", "file/rescue"])
def test_a_rescue_dir_that_could_rescue_nothing(project: Project, memory_path: Path, where: str) -> None:
    (memory_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"checkpointing\.rescue_dir is "):
        project.start(memory_path / "run", f"checkpointing.rescue_dir={memory_path / where}")
    assert not (memory_path / "run").exists()
