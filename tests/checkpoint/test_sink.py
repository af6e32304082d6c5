from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from surefoot.checkpoint import LocalSink, storage
from surefoot.checkpoint.manifest import EXTENT_BYTES
from surefoot.errors import CheckpointError, NonFiniteError


def every_dtype() -> dict[str, torch.Tensor]:
    floats = {str(d): torch.tensor([1.5, -2.0, 0.0]).to(d) for d in (torch.float64, torch.float32, torch.float16,
              torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)}  # fmt: skip
    whole = {str(d): torch.tensor([1, 0, 3]).to(d) for d in (torch.int64, torch.int32, torch.int16, torch.int8,
             torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool)}  # fmt: skip
    odd = {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "leaf": torch.ones(2, requires_grad=True),
    }
    return {**floats, **whole, **odd}


def test_tensors_are_a_safetensors_file_that_the_library_reads(memory_path: Path) -> None:
    tensors = every_dtype()
    LocalSink(memory_path).tensors("model.safetensors", tensors, {"origin": "test"})
    loaded = load_file(memory_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert loaded[name].tolist() == tensor.tolist(), name
    with safe_open(memory_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "origin": "test"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused_by_name_and_index(memory_path: Path, dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(3, 4)
    tensor[1, 2] = bad
    sink = LocalSink(memory_path)
    with pytest.raises(NonFiniteError, match=r"'layer.w' holds -?(nan|inf) at index \[1, 2\]"):
        sink.tensors("model.safetensors", {"layer.w": tensor.to(dtype)})
    assert sink.entries == {}


def test_a_non_finite_value_far_into_a_tensor_or_in_a_complex_one(memory_path: Path) -> None:
    big = torch.zeros(700_000)
    big[600_123] = float("nan")
    with pytest.raises(NonFiniteError, match=r"\[600123\]"):
        LocalSink(memory_path).tensors("a", {"big": big})
    with pytest.raises(NonFiniteError, match=r"index \[1\]"):
        LocalSink(memory_path).tensors("b", {"c": torch.tensor([0j, complex(0, float("inf"))])})
    with pytest.raises(NonFiniteError, match=r"holds nan at index \[\]"):
        LocalSink(memory_path).tensors("c", {"s": torch.tensor(float("nan"))})


def test_largest_finite_values_and_negative_zero_pass(memory_path: Path) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        info = torch.finfo(dtype)
        tensor = torch.tensor([info.max, info.min, -0.0, info.tiny], dtype=torch.float64).to(dtype)
        LocalSink(memory_path).tensors(str(dtype), {"t": tensor})


def test_a_tensor_that_the_format_cannot_hold_is_named(memory_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'z'.*complex128"):
        LocalSink(memory_path).tensors("m", {"z": torch.zeros(1, dtype=torch.complex128)})


def test_extents_cover_the_file_and_hash_what_is_on_disk(memory_path: Path) -> None:
    sink = LocalSink(memory_path)
    data = os.urandom(1 << 20) * 33 + b"tail"
    with sink.stream("deep/er/file.bin") as file:
        for start in range(0, len(data), 777_777):
            file.write(data[start : start + 777_777])
    entry = sink.entries["deep/er/file.bin"]
    written = (memory_path / "deep/er/file.bin").read_bytes()
    assert hashlib.sha256(written).digest() == hashlib.sha256(data).digest()
    assert [extent.length for extent in entry.extents] == [EXTENT_BYTES, EXTENT_BYTES, len(data) - 2 * EXTENT_BYTES]
    for offset, length, digest in entry.extents:
        assert xxhash.xxh3_128_hexdigest(written[offset : offset + length]) == digest
    assert entry.size == len(data)


def test_adopting_gives_the_same_entry_as_writing(memory_path: Path) -> None:
    data = os.urandom(1 << 20) * 17
    sink = LocalSink(memory_path)
    sink.bytes("written", data)
    sink.local("sub/adopted").write_bytes(data)
    sink.adopt("sub/adopted")
    assert sink.entries["sub/adopted"].extents == sink.entries["written"].extents


def test_hashes_are_of_memory_not_of_the_disk(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stores other bytes than it was given is found out, because the file is not read back for its hash."""
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, bytes(b ^ 1 for b in data)))
    sink = LocalSink(memory_path)
    sink.bytes("f", b"abc")
    assert sink.entries["f"].extents[0].hash == xxhash.xxh3_128_hexdigest(b"abc")


def test_short_writes_are_finished_and_zero_is_an_error(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = storage.write
    monkeypatch.setattr(storage, "write", lambda fd, data, path: original(fd, data[:3], path))
    sink = LocalSink(memory_path)
    sink.bytes("f", b"0123456789")
    assert (memory_path / "f").read_bytes() == b"0123456789"
    monkeypatch.setattr(storage, "write", lambda fd, data, path: 0)
    with pytest.raises(OSError, match="took no bytes"):
        sink.bytes("g", b"0123456789")


@pytest.mark.parametrize("operation", ["write", "fsync", "close"])
def test_a_failing_operation_fails_the_file_and_leaves_nothing_open(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def fail(descriptor: int, *_: Any) -> None:
        if operation == "close":
            os.close(descriptor)
        raise OSError(5, "Input/output error")

    before = len(list(Path("/proc/self/fd").iterdir()))
    sink = LocalSink(memory_path)
    with monkeypatch.context() as patch:
        patch.setattr(storage, operation, fail)
        with pytest.raises(OSError, match="Input/output error"), sink.stream("f") as file:
            file.write(b"x" * 3_000_000)
    assert sink.entries == {}
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_writer_that_fails_half_way_leaves_no_entry(memory_path: Path) -> None:
    sink = LocalSink(memory_path)
    with pytest.raises(KeyError), sink.stream("f") as file:
        file.write(b"half")
        raise KeyError
    assert sink.entries == {}
    assert (memory_path / "f").read_bytes() == b""  # what was buffered is not written after the failure


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../up", "a/../b", "a//b", "./a", "a/", "a\0b"])
def test_paths_that_could_lead_out_are_refused(memory_path: Path, path: str) -> None:
    sink = LocalSink(memory_path / "root")
    for use in (
        lambda: sink.bytes(path, b""),
        lambda: sink.under(path),
        lambda: sink.local(path),
        lambda: sink.adopt(path),
    ):
        with pytest.raises(CheckpointError, match="relative path"):
            use()


def test_one_path_is_written_once_and_the_manifest_by_nobody(memory_path: Path) -> None:
    sink = LocalSink(memory_path)
    sink.under("part").json("a.json", {"x": 1})
    for path in ("part/a.json", "manifest.json"):
        with pytest.raises(CheckpointError, match="twice"):
            sink.bytes(path, b"")
    assert json.loads((memory_path / "part" / "a.json").read_text()) == {"x": 1}


def test_links_are_neither_written_through_nor_adopted(memory_path: Path) -> None:
    (memory_path / "secret").write_text("untouched")
    root = memory_path / "root"
    root.mkdir()
    (root / "link").symlink_to(memory_path / "secret")
    sink = LocalSink(root)
    with pytest.raises(FileExistsError):
        sink.bytes("link", b"overwritten")
    with pytest.raises(OSError, match="link"):
        sink.adopt("link")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        sink.adopt_rest()
    assert (memory_path / "secret").read_text() == "untouched"


def test_a_pipe_is_not_adopted(memory_path: Path) -> None:
    os.mkfifo(memory_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        LocalSink(memory_path).adopt("pipe")
