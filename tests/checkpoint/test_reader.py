from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint import LocalReader, open_verified, verify_checkpoint
from surefoot.checkpoint.safetensors_format import decode_header, encode_header
from surefoot.errors import CheckpointError, CorruptCheckpoint
from surefoot.types import Sink
from tests.checkpoint import runs


def saved(memory_path: Path, **files: Any) -> LocalReader:
    def part(sink: Sink) -> None:
        sink.tensors("t.safetensors", {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)})
        sink.json("deep/a.json", {"x": [1, 2.5, None]})
        sink.bytes("raw", b"\0\1\2")

    manager = runs.manager(memory_path)
    manager.save(2, {}, {"part": part, "other": lambda sink: sink.bytes("f", b"1")})
    manager.shutdown()
    return LocalReader.open(memory_path / "step_2")


def test_reads_back_what_was_written(memory_path: Path) -> None:
    reader = saved(memory_path).under("part")
    assert reader.files() == ("deep/a.json", "raw", "t.safetensors")
    assert reader.json("deep/a.json") == reader.under("deep").json("a.json") == {"x": [1, 2.5, None]}
    assert reader.bytes("raw") == b"\0\1\2"
    tensors = reader.tensors("t.safetensors")
    assert tensors["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (tensors["n"].item(), tensors["n"].dim()) == (3, 0)
    tensors["w"] += 1  # it is the reader's own memory, to do with as one likes
    assert reader.local("raw").read_bytes() == b"\0\1\2"
    assert reader.local() == memory_path / "step_2" / "part"


@pytest.mark.parametrize("call", ["json", "bytes", "tensors", "local"])
def test_what_is_not_there_is_named_with_what_is(memory_path: Path, call: str) -> None:
    with pytest.raises(CheckpointError, match=r"missing.*it has other, part, training_info\.json"):
        getattr(saved(memory_path), call)("missing")
    with pytest.raises(CheckpointError, match="relative path"):
        getattr(saved(memory_path), call)("../step_2/part/raw")


@pytest.mark.parametrize("call", ["bytes", "tensors", "local"])
def test_a_changed_byte_is_seen_by_whatever_reads_it(memory_path: Path, call: str) -> None:
    reader = saved(memory_path).under("part")
    path = memory_path / "step_2" / "part" / "t.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"t\.safetensors is damaged between bytes 0 and"):
        getattr(reader, call)("t.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"t\.safetensors"):
        reader.local()
    assert reader.bytes("raw") == b"\0\1\2"


def test_open_refuses_what_does_not_agree(memory_path: Path) -> None:
    reader = saved(memory_path)
    (reader.root / "part" / "raw").write_bytes(b"\0\1")
    with pytest.raises(CorruptCheckpoint, match="part/raw: 2 bytes, the manifest says 3"):
        LocalReader.open(reader.root)
    (reader.root / "part" / "raw").write_bytes(b"\0\1\3")
    assert LocalReader.open(reader.root).bytes("other/f") == b"1"  # sizes agree: found out only by reading
    with pytest.raises(CorruptCheckpoint, match="part/raw"):
        open_verified(reader.root)


def test_a_folder_with_something_else_in_it_is_not_handed_out(memory_path: Path) -> None:
    reader = saved(memory_path)
    (reader.root / "part" / "pytorch_model.bin").write_bytes(b"not saved by us")
    with pytest.raises(CorruptCheckpoint, match=r"pytorch_model\.bin is not in the manifest"):
        reader.local("part")
    assert reader.local("other") == reader.root / "other"
    result = verify_checkpoint(reader.root)
    assert result.sound
    assert result.notes == ("part/pytorch_model.bin: not part of the checkpoint",)


def test_verify_lists_every_problem(memory_path: Path) -> None:
    reader = saved(memory_path)
    assert verify_checkpoint(reader.root).num_files == 5
    (reader.root / "part" / "raw").write_bytes(b"\0\1\3")
    (reader.root / "other" / "f").unlink()
    problems = verify_checkpoint(reader.root).problems
    assert len(problems) == 2
    assert any("other/f" in problem for problem in problems)
    assert any("part/raw" in problem for problem in problems)


BYTE = {"dtype": "U8", "shape": [1]}


def header(value: Any, data_bytes: int = 0) -> tuple[memoryview, int]:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return memoryview(len(text).to_bytes(8, "little") + text), 8 + len(text) + data_bytes


def test_header_round_trip() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bool)}
    data = encode_header(tensors, {})
    spans, start = decode_header(memoryview(data), len(data) + 29)
    assert start == len(data)
    assert start % 8 == 0
    assert spans["a"] == (torch.float32, (2, 3), 0, 24)
    assert spans["b"] == (torch.bool, (5,), 24, 29)


@pytest.mark.parametrize(
    ("value", "data_bytes"),
    [
        (b"", -4),  # shorter than its length field
        (b"not json", 0),
        ([], 0),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 9),  # more data than described
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 7),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8),  # shape does not fit
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, 8),
        ({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, 8),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, 8),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, 8),
        ({"a": {**BYTE, "data_offsets": [0, 1]}, "b": {**BYTE, "data_offsets": [2, 3]}}, 3),  # a gap
        ({"a": {**BYTE, "data_offsets": [0, 1]}, "b": {**BYTE, "data_offsets": [0, 1]}}, 1),  # an overlap
        ({"a": 5}, 0),
    ],
)  # fmt: skip
def test_malformed_headers_are_refused(value: Any, data_bytes: int) -> None:
    data, size = header(value, data_bytes)
    with pytest.raises(ValueError):
        decode_header(data, size)


def test_a_malformed_file_that_was_adopted_is_damage_when_read(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    manager.save(2, {}, {"part": lambda sink: sink.bytes("t.safetensors", b"\xff" * 20)})
    manager.shutdown()
    with pytest.raises(CorruptCheckpoint, match="header"):
        LocalReader.open(memory_path / "step_2").tensors("part/t.safetensors")
