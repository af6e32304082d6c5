"""Direct preference optimisation, in real runs: the reference, BCO's shift, LoRA, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surefoot import loop
from surefoot.engine.frozen import BaseView
from surefoot.engine.models import load, load_tokenizer
from surefoot.errors import ConfigError, DataError, ResumeRefused
from surefoot.losses.pairs import LOSSES
from tests.helpers import runs

LORA = "policy.lora={dim: 4, dropout: 0.1}"
SIGMOID = ("dpo.preset=null", "dpo.beta=0.5")


def project(folder: Path) -> Path:
    return runs.write_project(folder, case="dpo-mpo")


def lines(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in runs.metric_lines(run_dir) if line["kind"] == kind]


@pytest.mark.parametrize("lora", [(), (LORA,)], ids=["second model", "adapter off"])
def test_the_reference_is_the_policy_as_it_was(tmp_path: Path, lora: tuple[str, ...]) -> None:
    file = project(tmp_path)
    run = runs.started(file, *lora)
    reference = run.kit.engines["reference"]
    assert isinstance(reference, BaseView) == bool(lora)
    loop.train(run)
    config = runs.config_of(file).policy
    before = load(config, tokenizer=load_tokenizer(config), seed=7).model.state_dict()
    kept = reference.weights()
    assert kept and all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
    first, *later = lines(tmp_path / "run")
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0
    assert all(line["rewards/chosen"] != 0.0 for line in later)


@pytest.mark.parametrize("stop_at", [2, 5])
def test_an_adapter_resumes_exactly(tmp_path: Path, stop_at: int) -> None:
    file = project(tmp_path)
    common = (LORA, "checkpointing.save_period=1", "policy.scheduler.decay_steps=8")
    runs.trained(file, *common)
    runs.trained(file, *common, f"run_dir={tmp_path / 'again'}", f"max_num_steps={stop_at}")
    loop.train(runs.resumed(tmp_path / "again", "max_num_steps=6"))
    whole, again = (runs.state_bytes(tmp_path / name / "checkpoints" / "step_6") for name in ("run", "again"))
    assert "policy/weights/adapter_model.safetensors" in whole
    assert whole == again
    assert runs.metric_lines(tmp_path / "run") == runs.metric_lines(tmp_path / "again")


def test_another_reference_is_refused(tmp_path: Path) -> None:
    """The folder that the policy began with is changed while the run stands still."""
    file = project(tmp_path)
    runs.trained(file, "max_num_steps=1", "checkpointing.save_period=1", f"run_dir={tmp_path / 'first'}")
    base = tmp_path / "base"
    (tmp_path / "first/checkpoints/step_1/policy/weights").rename(base)
    named = (f"policy.model_name={base}", "policy.model_init=null")
    runs.trained(file, *named, "max_num_steps=2")
    run = runs.resumed(tmp_path / "run", "max_num_steps=3")
    weights = {name: tensor.clone() for name, tensor in run.kit.engines["reference"].weights().items()}
    loop.train(run)
    next(iter(weights.values())).view(-1)[0] += 1.0
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ResumeRefused, match="frozen model's weights have the fingerprint"):
        runs.resumed(tmp_path / "run", "max_num_steps=4")


def test_the_shift_is_one_value_per_run(tmp_path: Path) -> None:
    """0.99 of the shift before and 0.01 of the step's mean reward, in the checkpoint; validation leaves it alone."""
    runs.trained(project(tmp_path))
    shift = 0.0
    for line in lines(tmp_path / "run"):
        shift = 0.99 * shift + (1 - 0.99) * line["bco/mean_reward"]
        saved = tmp_path / "run/checkpoints" / f"step_{line['step']}" / "algorithm/dpo.json"
        if saved.exists():
            assert json.loads(saved.read_text()) == {"shift": shift, "steps": line["step"]}
    assert shift != 0.0
    assert runs.resumed(tmp_path / "run", "max_num_steps=7").algorithm._loss.shift == shift  # type: ignore[attr-defined]


def test_without_a_reference_there_is_no_second_model(tmp_path: Path) -> None:
    run = runs.started(project(tmp_path), *SIGMOID, "dpo.reference=none")
    loop.train(run)
    assert list(run.kit.engines) == ["policy"]
    assert not (tmp_path / "run/checkpoints/step_6/reference").exists()
    assert lines(tmp_path / "run")[0]["rewards/chosen"] < 0, "the log-prob itself"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_trains(tmp_path: Path, name: str) -> None:
    smoothed = ", label_smoothing: 0.1" if name == "exo_pair" else ""
    settings = ("dpo.preset=null", "dpo.beta=null", f"dpo.losses=[{{name: {name}{smoothed}}}]", "val_period=3")
    runs.trained(project(tmp_path), *settings, "max_num_steps=3", "checkpointing.enabled=false")
    train, (val,) = lines(tmp_path / "run"), lines(tmp_path / "run", "val")
    assert all(line["grad_norm"] > 0 for line in train)
    assert val["heldout/loss"] == val["loss"] == pytest.approx(val[f"loss/{name}"])


def test_it_learns_to_tell_right_from_wrong(tmp_path: Path) -> None:
    settings = (*SIGMOID, "max_num_steps=40", "val_period=0", "val_at_end=true", "checkpointing.enabled=false")
    trained_on = f"data.validation.train.path={tmp_path / 'train.jsonl'}"
    runs.trained(project(tmp_path), *settings, trained_on, "dpo.wpo=true", "dpo.ld_alpha=0.5")
    (val,) = lines(tmp_path / "run", "val")
    assert val["train/rewards/accuracies"] == 1.0
    pairs = {"train": 10, "heldout": 3}
    share = sum(val[f"{name}/rewards/accuracies"] * count for name, count in pairs.items()) / sum(pairs.values())
    assert val["rewards/accuracies"] == pytest.approx(share), "over all sets: the mean over pairs"


def test_how_validation_rows_are_cut_changes_nothing(tmp_path: Path) -> None:
    """Pairs of unlike lengths, and a loss that counts tokens beside those that count pairs."""
    file = project(tmp_path)
    found = []
    for size in (2, 4, 20):
        sizes = (f"run_dir={tmp_path / str(size)}", f"dpo.val_batch_size={size}")
        held = f"data.validation={{train: {{path: {tmp_path / 'train.jsonl'}}}}}"
        runs.trained(file, *sizes, held, "max_num_steps=2", "checkpointing.enabled=false")
        found.append(lines(tmp_path / str(size), "val")[-1])
    for other in found[1:]:
        assert {**other, "kind": 0} == pytest.approx({**found[0], "kind": 0}, rel=1e-5, abs=1e-6)


def test_checkpoints_are_ranked_by_a_metric_with_a_slash_in_its_name(tmp_path: Path) -> None:
    ranked = ("checkpointing.metric_name=val:rewards/margins", "checkpointing.higher_is_better=true")
    run = runs.started(project(tmp_path), *ranked, "checkpointing.keep_top_k=1")
    loop.train(run)
    best = max(lines(tmp_path / "run", "val"), key=lambda line: line["rewards/margins"])["step"]
    assert run.checkpoints.get_best_checkpoint_path() == tmp_path / "run/checkpoints" / f"step_{best}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    {
        "both": (("dpo.losses=[{name: ipo}]",), "dpo: expected losses or preset, found both"),
        "name": (("dpo.preset=null", "dpo.losses=[{name: ippo}]"), r"dpo: losses\[0\]: there is no loss 'ippo'"),
        "ignored": (
            ("dpo.preset=null", "dpo.losses=[{name: hinge, label_smoothing: 0.1}]"),
            r"dpo: losses\[0\] \(hinge\): this loss ignores label_smoothing",
        ),
        "beta": (
            ("dpo.preset=null", "dpo.losses=[{name: ipo, beta: 1}, {name: sft}]"),
            "dpo.beta: every loss sets its own or reads none",
        ),
        "key": (("dpo.preset=null", "dpo.losses=[{name: ipo, bata: 1}]"), "did you mean dpo.losses.0.beta"),
        "alpha": (("dpo.ld_alpha=1.5",), "dpo.ld_alpha"),
        "odd": (
            ("policy.train_global_batch_size=3", "policy.train_micro_batch_size=3"),
            "found 3 rows; expected an even number",
        ),
        "odd validation": (("dpo.val_batch_size=3",), "dpo.val_batch_size: input should be a multiple of 2, found 3"),
        "metric": (
            ("checkpointing.metric_name=val:rewards/margin",),
            r"measures no 'rewards/margin'; did you mean rewards/margins\?; expected one of loss, loss/sigmoid",
        ),
        "metric of a set": (
            ("checkpointing.metric_name=val:heldout/loss/ipo",),
            "validation measures no 'heldout/loss/ipo'; did you mean heldout/loss",
        ),
    }.values(),
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.trained(project(tmp_path), *overrides)


def test_rows_that_are_no_preferences_are_refused(tmp_path: Path) -> None:
    file = project(tmp_path)
    other = tmp_path / "chats.jsonl"
    other.write_text('{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n')
    with pytest.raises(DataError, match="chosen"):
        runs.started(file, f"data.train.path={other}")
