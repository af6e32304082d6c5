"""Tensors kept between runs: what comes back is what was written, or nothing, and a warning that names the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch

from surefoot.checkpoint import TensorCache, cache_home, storage
from surefoot.errors import NonFiniteError, StorageFailed

KEY = {"weights": "a", "data": "b"}
TENSORS = {"logprobs": torch.arange(12, dtype=torch.float32).reshape(3, 4), "count": torch.tensor([3])}


def written(parent: Path) -> tuple[TensorCache, Path]:
    cache = TensorCache(parent, KEY)
    with cache.held():
        cache.write("rows_0_3", TENSORS)
    return cache, cache.folder / "rows_0_3.safetensors"


def assert_whole(cache: TensorCache) -> None:
    found = cache.read("rows_0_3")
    assert found is not None
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_what_is_written_is_read_by_whoever_has_the_same_key(tmp_path: Path) -> None:
    _, file = written(tmp_path)
    assert_whole(TensorCache(tmp_path, dict(reversed(KEY.items()))))
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata().items() >= KEY.items()
    for other in ({**KEY, "data": "c"}, {"weights": "a"}, {"weights": "b", "data": "a"}):
        assert TensorCache(tmp_path, other).read("rows_0_3") is None


def test_every_damaged_byte_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, file = written(tmp_path)
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert cache.read("rows_0_3") is None, place
    assert len(caplog.records) == len(whole)
    assert all(str(file) in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "damage",
    {
        "empty": lambda file: file.write_bytes(b""),
        "short": lambda file: os.truncate(file, file.stat().st_size - 1),
        "half": lambda file: os.truncate(file, file.stat().st_size // 2),
        "long": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        "no safetensors": lambda file: file.write_text("hello"),
        "a folder": lambda file: (file.unlink(), file.mkdir()),
    }.values(),
)
def test_what_is_no_whole_file_is_named_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    cache, file = written(tmp_path)
    damage(file)
    assert cache.read("rows_0_3") is None
    assert f"{file} cannot be used and is computed anew" in caplog.text
    if file.is_dir():
        with pytest.raises(StorageFailed, match="cannot be written to: Is a directory"):
            cache.write("rows_0_3", TENSORS)
    else:
        cache.write("rows_0_3", TENSORS)
        assert_whole(cache)


def test_a_file_of_another_key_or_part_is_foreign(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, file = written(tmp_path)
    other = TensorCache(tmp_path, {**KEY, "data": "other"})
    other.folder.mkdir()
    for name, cache in (("rows_0_3", other), ("rows_3_6", TensorCache(tmp_path, KEY))):
        copy = cache.folder / f"{name}.safetensors"
        copy.write_bytes(file.read_bytes())
        assert cache.read(name) is None
        assert str(copy) in caplog.text


def test_a_crash_before_any_operation_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """The process ends before the n-th operation of a write, and the next one goes on from what is there."""

    class Crash(BaseException):
        pass

    cache = TensorCache(tmp_path, KEY)
    seen: list[str] = []

    def crash(operation: str, path: str) -> None:
        seen.append(operation)
        if len(seen) > survived:
            raise Crash

    survived = 0
    while True:
        seen.clear()
        with cache.held():
            storage.observers.append(crash)
            try:
                cache.write("rows_0_3", TENSORS)
                break
            except Crash:
                pass
            finally:
                storage.observers.remove(crash)
        renamed = "rename" in seen[:survived]
        assert (cache.read("rows_0_3") is not None) == renamed
        survived += 1
    assert {"open", "write", "fsync", "rename"} <= set(seen)
    assert_whole(cache)
    assert sorted(path.name for path in cache.folder.iterdir()) == [".lock", "rows_0_3.safetensors"]


def test_what_is_not_finite_is_never_kept(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, KEY)
    with cache.held(), pytest.raises(NonFiniteError, match=r"tensor 'logprobs' holds nan at index \[1\]"):
        cache.write("rows_0_3", {"logprobs": torch.tensor([0.0, float("nan")])})
    assert cache.read("rows_0_3") is None


def test_a_place_that_is_no_folder_is_said_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match="name another folder"), TensorCache(tmp_path / "file", KEY).held():
        raise AssertionError("never reached")


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/to/be/ignored")
    assert cache_home() == Path.home() / ".cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == Path.home() / ".cache"
