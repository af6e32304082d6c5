"""A whole run with LoRA through the command line: trained, resumed, its adapter merged into its base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from surefoot import loop
from surefoot.checkpoint import export_merged
from surefoot.cli.ckpt import app
from surefoot.engine.local import LocalEngine
from surefoot.errors import CheckpointError, ResumeRefused
from tests.helpers import runs

LORA = "policy.lora={dim: 4, alpha: 64, dropout: 0.1, target_modules: [all-linear, embed_tokens]}"


def test_a_run_with_an_adapter_resumes_and_merges(memory_path: Path) -> None:
    straight = runs.started(runs.write_project(memory_path), LORA)
    loop.train(straight)
    engine = straight.kit.engines["policy"]
    assert isinstance(engine, LocalEngine)
    engine.model.eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        live = engine.model(ids).logits
    step = memory_path / "run/checkpoints/step_6"
    expected = runs.state_bytes(step)
    assert "policy/weights/adapter_model.safetensors" in expected
    again = runs.resumed(memory_path / "run", checkpoint=memory_path / "run/checkpoints/step_2")
    loop.train(again)
    newest = max((memory_path / "run/checkpoints").glob("step_6*"), key=lambda path: path.stat().st_mtime)
    assert runs.state_bytes(newest) == expected

    done = CliRunner().invoke(app, ["export", str(newest), str(memory_path / "merged"), "--merge"])
    assert done.exit_code == 0, done.output
    fresh = AutoModelForCausalLM.from_pretrained(memory_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(fresh(ids).logits, live, rtol=0, atol=1e-5)
    plain = CliRunner().invoke(app, ["export", str(newest), str(memory_path / "adapter")])
    assert plain.exit_code == 0
    assert (memory_path / "adapter/adapter_config.json").is_file()

    half = ["export", str(newest), str(memory_path / "half"), "--merge", "--dtype", "bfloat16"]
    assert CliRunner().invoke(app, half).exit_code == 0
    assert {t.dtype for t in load_file(memory_path / "half/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((memory_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ResumeRefused, match=r"policy\.lora\.dim"):
        runs.resumed(memory_path / "run", "policy.lora.dim=8")


def test_without_an_adapter_there_is_nothing_to_merge(memory_path: Path) -> None:
    runs.trained(runs.write_project(memory_path), "max_num_steps=2")
    checkpoint = memory_path / "run/checkpoints/step_2"
    done = CliRunner().invoke(app, ["export", str(checkpoint), str(memory_path / "merged"), "--merge"])
    assert isinstance(done.exception, CheckpointError)
    assert "no adapter in policy/weights" in str(done.exception)
    assert not (memory_path / "merged").exists()


def test_a_merge_that_fails_leaves_nothing(memory_path: Path) -> None:
    runs.trained(runs.write_project(memory_path), "max_num_steps=2")
    checkpoint = memory_path / "run/checkpoints/step_2"
    made = {"config.json": b"{"}, {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match="Expecting"):
        export_merged(checkpoint, memory_path / "out", lambda reader: made, "float16")
    assert not (memory_path / "out").exists()
    assert not list(memory_path.glob(".out*"))
