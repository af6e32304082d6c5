from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.checkpoint import commit, storage
from surefoot.errors import CheckpointError


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "content").write_text(content)
    return path


def content(path: Path) -> str:
    return (path / "content").read_text()


@pytest.mark.parametrize("name", ["step_7", "step_07", "step_123456789012345678901234567890"])
def test_names_of_steps(name: str) -> None:
    assert commit.step_of(name) == int(name.removeprefix("step_"))


@pytest.mark.parametrize(
    "name", ["step_", "step_7x", "step_-1", "tmp_step_7", "step_7.bak_1", "step_7\n", "STEP_7", "step_1_2"]
)
def test_names_that_are_no_steps(name: str) -> None:
    assert commit.step_of(name) is None


def test_the_first_commit_renames_and_syncs_the_parent(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(storage, "observers", [lambda name, path: seen.append((name, Path(path).name))])
    commit.commit(folder(memory_path / "tmp_step_2", "new"), memory_path / "step_2", commit.to_trash)
    assert seen == [("rename", "step_2"), ("fsync", memory_path.name)]
    assert content(memory_path / "step_2") == "new"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_retires_the_old_one_only_after_the_new_name_is_durable(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(storage, "exchange", lambda a, b: False)
    folder(memory_path / "step_2", "old")
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(storage, "observers", [lambda name, path: seen.append((name, Path(path).name))])
    retired = []

    def retire(old: Path) -> None:
        assert seen[-1] == ("fsync", memory_path.name)
        assert content(memory_path / "step_2") == "new"
        retired.append(content(old))

    commit.commit(folder(memory_path / "tmp_step_2", "new"), memory_path / "step_2", retire)
    assert retired == ["old"]


def test_exchange_is_really_there_on_this_system(memory_path: Path) -> None:
    a, b = folder(memory_path / "a", "a"), folder(memory_path / "b", "b")
    assert storage.exchange(a, b)
    assert (content(a), content(b)) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        storage.exchange(a, memory_path / "missing")


def test_rename_never_replaces(memory_path: Path) -> None:
    a = folder(memory_path / "a", "a")
    (memory_path / "empty").mkdir()
    with pytest.raises(FileExistsError):
        storage.rename(a, memory_path / "empty")


def test_a_swap_cut_in_two_is_mended(memory_path: Path) -> None:
    folder(memory_path / ".swap_step_2", "old")
    folder(memory_path / "tmp_step_2", "new")
    folder(memory_path / ".swap_step_4", "old")
    folder(memory_path / "step_4", "new")
    assert commit.recover_swaps(memory_path) == [memory_path / "step_2"]
    assert content(memory_path / "step_2") == "old"
    assert content(memory_path / "step_4") == "new"
    commit.empty_trash(memory_path)
    assert sorted(path.name for path in memory_path.iterdir()) == [".trash", "step_2", "step_4", "tmp_step_2"]


def test_the_trash_is_emptied_without_following_links_and_of_ours_alone(memory_path: Path) -> None:
    outside = folder(memory_path / "outside", "precious")
    victim = folder(memory_path / "step_2", "x")
    (victim / "link").symlink_to(outside)
    (victim / "sub").mkdir()
    commit.to_trash(victim)
    (memory_path / "step_3").symlink_to(outside)
    commit.to_trash(memory_path / "step_3")
    folder(memory_path / ".trash" / "theirs", "kept")
    commit.empty_trash(memory_path)
    assert content(outside) == "precious"
    assert [path.name for path in (memory_path / ".trash").iterdir()] == ["theirs"]


def test_the_manifest_is_the_first_to_go(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = folder(memory_path / "step_2", "x")
    (victim / "manifest.json").touch()
    (victim / "a").mkdir()
    seen: list[str] = []
    monkeypatch.setattr(storage, "observers", [lambda name, path: seen.append(f"{name} {Path(path).name}")])
    storage.remove_tree(victim)
    assert seen == ["unlink manifest.json", "rmdir a", "unlink content", "rmdir step_2"]


def test_a_trash_that_is_not_a_folder_is_refused(memory_path: Path) -> None:
    (memory_path / ".trash").symlink_to(memory_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        commit.to_trash(folder(memory_path / "step_2", "x"))
    commit.empty_trash(memory_path)
    assert content(memory_path / "step_2") == "x"


def test_small_files_are_replaced_whole(memory_path: Path) -> None:
    path = memory_path / "status.json"
    storage.write_small_file(path, b"one")
    (memory_path / ".status.json.tmp").write_text("left by a crash")
    storage.write_small_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in memory_path.iterdir()] == ["status.json"]
