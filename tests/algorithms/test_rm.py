"""Reward models, in real runs: margins, adapters, what their folders score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot import loop
from surefoot.errors import ConfigError, ModelError
from tests.helpers import runs


def project(folder: Path) -> Path:
    return runs.write_project(folder, case="rm")


def with_margins(folder: Path) -> None:
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        text = "".join(json.dumps({**row, "margin": 1.0 + i}) + "\n" for i, row in enumerate(rows))
        (folder / name).write_text(text)


def test_it_learns_to_score_right_above_wrong(tmp_path: Path) -> None:
    settings = ("max_num_steps=100", "val_period=0", "val_at_end=true", "checkpointing.enabled=false")
    runs.trained(project(tmp_path), *settings, f"data.validation.train.path={tmp_path / 'train.jsonl'}")
    val = runs.metric_lines(tmp_path / "run")[-1]
    assert val["train/accuracy"] == 1.0
    assert val["train/margin"] == pytest.approx(val["train/scores/chosen"] - val["train/scores/rejected"], abs=1e-5)


def test_margins_are_used_where_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = project(tmp_path)
    with pytest.raises(ConfigError, match=r"rm\.margins: true, but .*train\.jsonl has no margin"):
        runs.started(file, "rm.margins=true")
    with_margins(tmp_path)
    losses = []
    for margins in ("true", "false"):
        settings = (f"run_dir={tmp_path / margins}", f"rm.margins={margins}", "max_num_steps=1")
        runs.trained(file, *settings, "checkpointing.enabled=false", "val_at_end=true")
        losses.append([line["loss"] for line in runs.metric_lines(tmp_path / margins)])
        assert ("margins, which are not used" in caplog.text) == (margins == "false")
    assert all(with_them > without for with_them, without in zip(*losses, strict=True))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rm.val_batch_size=5", r"rm\.val_batch_size: input should be a multiple of 2, found 5"),
        ("checkpointing.metric_name=val:scores/choosen", "no 'scores/choosen'; did you mean scores/chosen"),
    ],
)
def test_what_cannot_be_run_is_refused_at_load(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.config_of(project(tmp_path), override)


def test_an_adapter_and_its_score_head_resume_exactly(tmp_path: Path) -> None:
    file = project(tmp_path)
    common = ("policy.lora={dim: 4, dropout: 0.1}", "checkpointing.save_period=1", "policy.scheduler.decay_steps=6")
    runs.trained(file, *common)
    runs.trained(file, *common, f"run_dir={tmp_path / 'again'}", "max_num_steps=3")
    loop.train(runs.resumed(tmp_path / "again", "max_num_steps=6"))
    whole, again = (runs.state_bytes(tmp_path / name / "checkpoints" / "step_6") for name in ("run", "again"))
    assert "policy/weights/adapter_model.safetensors" in whole
    assert whole == again


def test_a_model_without_a_score_head_is_refused_before_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "granite"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "granite", "architectures": ["GraniteForCausalLM"]}))
    (folder / "model.safetensors").touch()
    named = (f"policy.model_name={folder}", "policy.model_init=null", "data.train.path=nowhere.jsonl")
    with pytest.raises(ModelError, match="no model of type granite with a score head"):
        runs.started(project(tmp_path), *named)
