from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surefoot.checkpoint import describe, diff, export_weights
from surefoot.errors import CheckpointError, CorruptCheckpoint, NonFiniteError
from surefoot.types import Sink
from tests.checkpoint import runs

CONFIG = {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16", "sub": {"dtype": "bfloat16"}, "n": 2}
GENERATION = b'{"eos_token_id": [2, 5],\n   "do_sample": false, "temperature": 0.9}'


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(4, 4).bfloat16(),
        "f": torch.randn(3),
        "ids": torch.arange(4),
        "mask": torch.tensor([True]),
    }


def saved(folder: Path, config: bytes | None = None, **changes: torch.Tensor) -> Path:
    def policy(sink: Sink) -> None:
        sink.tensors("weights/model.safetensors", {**tensors(), **changes})
        sink.bytes("weights/config.json", config or json.dumps(CONFIG).encode())
        sink.bytes("weights/generation_config.json", GENERATION)
        sink.bytes("weights/tokenizer/tokenizer.json", b"{}")
        sink.json("optimizer/optimizer.json", {})

    manager = runs.manager(folder)
    manager.save(2, {"step": 2}, {"policy": policy})
    manager.shutdown()
    return folder / "step_2"


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_without_a_dtype_everything_is_copied_as_it_is(memory_path: Path) -> None:
    checkpoint = saved(memory_path / "run")
    target = export_weights(checkpoint, memory_path / "new" / "export")
    assert content(target) == content(checkpoint / "policy" / "weights")
    assert [path.name for path in target.parent.iterdir()] == ["export"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_goes_for_every_float_and_the_config_says_so(memory_path: Path, dtype: str) -> None:
    checkpoint = saved(memory_path / "run")
    before = content(checkpoint)
    target = export_weights(checkpoint, memory_path / "export", dtype)
    wanted = getattr(torch, dtype)
    for name, tensor in load_file(target / "model.safetensors").items():
        original = tensors()[name]
        expected = original.to(wanted) if original.is_floating_point() else original
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    assert json.loads((target / "config.json").read_text()) == {
        "model_type": "llama", "dtype": dtype, "torch_dtype": dtype, "sub": {"dtype": dtype}, "n": 2,
    }  # fmt: skip
    assert (target / "generation_config.json").read_bytes() == GENERATION
    assert content(checkpoint) == before


def test_a_sharded_folder_keeps_its_index_true(memory_path: Path) -> None:
    def policy(sink: Sink) -> None:
        sink.tensors("weights/model-1.safetensors", {"a": torch.zeros(8)})
        sink.tensors("weights/model-2.safetensors", {"b": torch.zeros(2), "i": torch.arange(3)})
        index = {"metadata": {"total_size": 64}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        sink.json("weights/model.safetensors.index.json", index)

    manager = runs.manager(memory_path / "run")
    manager.save(2, {}, {"policy": policy})
    manager.shutdown()
    target = export_weights(memory_path / "run" / "step_2", memory_path / "export", "float16")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 16 + 4 + 24
    assert load_file(target / "model-2.safetensors")["b"].dtype == torch.float16


def test_the_target_must_be_new_or_empty(memory_path: Path) -> None:
    checkpoint = saved(memory_path / "run")
    (memory_path / "empty").mkdir()
    assert export_weights(checkpoint, memory_path / "empty") == memory_path / "empty"
    before = content(memory_path / "empty")
    (memory_path / "file").touch()
    (memory_path / "link").symlink_to(memory_path / "nowhere")
    for name in ("empty", "file", "link"):
        with pytest.raises(CheckpointError, match=name):
            export_weights(checkpoint, memory_path / name)
    assert content(memory_path / "empty") == before


def test_what_cannot_be_exported_leaves_nothing(memory_path: Path) -> None:
    def refused(error: type[Exception], words: str, checkpoint: Path, **kwargs: Any) -> None:
        with pytest.raises(error, match=words):
            export_weights(checkpoint, memory_path / "export", **kwargs)
        assert not (memory_path / "export").exists()
        assert not list(memory_path.glob(".export*"))

    good = saved(memory_path / "good")
    refused(CheckpointError, "int8", good, dtype="int8")
    refused(CheckpointError, "value/weights", good, component="value")
    refused(CheckpointError, "config.json is not JSON", saved(memory_path / "bad", config=b"{cut"))
    refused(CheckpointError, "not a JSON object", saved(memory_path / "list", config=b"[]"))
    huge = saved(memory_path / "huge", f=torch.tensor([1e30]))
    refused(NonFiniteError, r"too large for float16: as float16, tensor 'f'.*Take float32", huge, dtype="float16")
    weights = good / "policy" / "weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    refused(CorruptCheckpoint, "damaged", good)


def test_describe_and_diff(memory_path: Path) -> None:
    changed = tensors()["f"] + torch.tensor([0.0, 0.5, 0.0])
    a, b = saved(memory_path / "a"), saved(memory_path / "b", config=b'{"n": 3}', f=changed)
    description = describe(a)
    assert description.training_info == {"step": 2}
    assert description.parts["policy"][0] == 5
    assert diff(a, a) == []
    found = {difference.what: difference for difference in diff(a, b)}
    assert set(found) == {"policy/weights/config.json", "policy/weights/model.safetensors"}
    assert found["policy/weights/model.safetensors"].detail == "1 of 4 tensors differ; most f, by 0.5"
    assert "n: 2 and 3" in found["policy/weights/config.json"].detail
    assert "model_type: llama only in the first" in found["policy/weights/config.json"].detail
