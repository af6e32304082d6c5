"""A whole run with LoRA through the command line: trained, resumed, its adapter merged into its base."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from surefoot import loop
from surefoot.checkpoint import export_merged
from surefoot.cli import app as whole_app
from surefoot.cli.ckpt import app
from surefoot.config import LoraConfig
from surefoot.engine.local import LocalEngine
from surefoot.errors import CheckpointError, ModelError, ResumeRefused
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


def test_a_base_that_moved_can_be_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To a resume, to a merge and to what scores; each says how, and none takes a name that it would not use."""
    caplog.set_level(logging.INFO)
    runs.trained(runs.write_project(tmp_path, case="sft"), f"run_dir={tmp_path / 'first'}", "max_num_steps=2")
    file, first = runs.write_project(tmp_path, case="rm"), tmp_path / "first/checkpoints/step_2"
    base = Path(shutil.copytree(first / "policy/weights", tmp_path / "base"))
    there = (f"policy.model_name={base}", "policy.model_init=null", "policy.tokenizer.name=null")
    runs.trained(file, *there, LORA, "max_num_steps=2")
    step, rows = tmp_path / "run/checkpoints/step_2", str(tmp_path / "heldout.jsonl")
    assert "no score head: a new one is drawn" in caplog.text
    caplog.clear()

    def called(*arguments: str) -> Result:
        return CliRunner().invoke(whole_app, arguments)

    merge, score = ("ckpt", "export", str(step), "--merge"), ("score", str(step), rows, "--json")
    expected = json.loads(called(*score).stdout) | {"model": ""}
    assert called(*merge, str(tmp_path / "before")).exit_code == 0
    assert "score head" not in caplog.text, "it is the checkpoint's"
    base.rename(tmp_path / "moved")
    moved = ("--base", str(tmp_path / "moved"))
    for refused in (called(*merge, str(tmp_path / "after")), called(*score)):
        assert isinstance(refused.exception, ModelError)
        assert f"no folder {base}" in str(refused.exception)
        assert "--base FOLDER" in str(refused.exception)
    with pytest.raises(ModelError, match=r"--allow policy\.model_name"):
        runs.resumed(tmp_path / "run", "max_num_steps=3", "data.train.path=not_read_yet.jsonl")
    assert called(*merge, str(tmp_path / "after"), *moved).exit_code == 0
    weights = [tmp_path / name / "model.safetensors" for name in ("before", "after")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads(called(*score, *moved).stdout) | {"model": ""} == expected

    for model in (tmp_path / "after", first):
        refused = called("score", str(model), rows, *moved)
        assert isinstance(refused.exception, ModelError)
        assert "needs no base" in str(refused.exception)
    assert called("ckpt", "export", str(step), str(tmp_path / "adapter"), *moved).exit_code == 2
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(("before", "after", "message"), [(LORA, None, "--merge"), (None, LORA, "policy/weights")])
def test_an_adapter_neither_comes_nor_goes_on_a_resume(
    tmp_path: Path, before: str | None, after: str | None, message: str
) -> None:
    """Not even where each key may change."""
    runs.trained(runs.write_project(tmp_path), *filter(None, [before]), "max_num_steps=2")
    keys = {f"policy.lora.{key}" for key in LoraConfig.model_fields}
    with pytest.raises(ResumeRefused, match=message):
        runs.resumed(tmp_path / "run", after or "policy.lora=null", allow=frozenset(keys))


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
