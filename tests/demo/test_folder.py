"""The demo's folder: what is somebody else's is refused, what is an earlier demo's moves aside, nothing is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.checkpoint.directory import LOCK
from surefoot.config_file import config_as_yaml, load_config, parse_config, read_yaml
from surefoot.demo import task
from surefoot.demo.folder import MARKER, claimed
from surefoot.demo.stages import SFT
from surefoot.errors import SurefootError


def test_a_new_folder_and_an_empty_one_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "deep" / "new", tmp_path / "empty"):
        with claimed(root) as folder:
            assert folder.moved_to is None
            assert sorted(path.name for path in root.iterdir()) == [LOCK, MARKER]


def test_an_earlier_demo_moves_aside_whole(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    for number in (1, 2):
        with claimed(root) as folder:
            (root / "result").write_text(f"of run {number}")
    with claimed(root) as folder:
        assert folder.moved_to == tmp_path / "demo.bak_2"
        assert not (root / "result").exists()
    assert (tmp_path / "demo.bak_1" / "result").read_text() == "of run 1"
    assert (tmp_path / "demo.bak_2" / "result").read_text() == "of run 2"


def test_an_earlier_demo_in_the_present_folder_moves_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    for earlier in (None, tmp_path / "demo.bak_1"):
        with claimed(Path()) as folder:
            assert (folder.root, folder.moved_to) == (tmp_path / "demo", earlier)


def test_files_of_others_are_refused_and_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SurefootError, match=r"not a demo's \(thesis\.tex\).*--dir"), claimed(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_a_link_and_a_place_below_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link", "file/below"):
        with pytest.raises(SurefootError, match="--dir"), claimed(tmp_path / name):
            pass
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_demo_that_is_running_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    with claimed(root):
        with pytest.raises(SurefootError, match="in use by another run"), claimed(root):
            pass
        assert root.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_the_configuration_is_valid_and_says_what_the_task_says(tmp_path: Path) -> None:
    root = tmp_path / 'a "quoted": #name 🦶'
    with claimed(root) as folder:
        heldout = folder.fill(seed=7)
        config = load_config(SFT.recipe.config(root))
    assert config.policy.model_init == task.model_init()
    assert config.seed == 7
    assert config.data.train.path == str(folder.data / "demonstrations.jsonl")
    assert config.data.validation["heldout"].path == str(folder.data / "heldout.jsonl")
    assert config.policy.tokenizer.name == str(folder.tokenizer)
    assert heldout.rows == folder.rows("heldout") and len(heldout.rows) == 500
    # Every validation comes with a save, so that the best can be told.
    assert config.val_period == config.checkpointing.save_period
    again = parse_config(read_yaml(SFT.recipe.config(root)), ["run_dir=elsewhere"])
    assert "run_dir: elsewhere" in config_as_yaml(again)
