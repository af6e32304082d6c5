"""Preference losses through the engine: one gradient for every split, also where the loss must see the whole step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from surefoot.engine import models
from surefoot.engine.local import LocalEngine
from surefoot.errors import NonFiniteError
from surefoot.losses.pairs import LOSSES
from surefoot.losses.preference import LossEntry, PreferenceLoss
from surefoot.losses.reward import RewardLoss
from surefoot.losses.supervised import NLL
from surefoot.types import BatchRef, Head, Loss, Objective
from tests.engine import tiny
from tests.helpers.memory_store import CloningStager

LENGTHS = [5, 3, 4, 8, 7, 6, 2, 9]  # four pairs
MIX = (LossEntry("aot_unpaired", 0.7, label_smoothing=0.1), LossEntry("ipo"), LossEntry("sft", 0.5))
WHOLE_STEP = {"aot": PreferenceLoss((LossEntry("aot"),)), "mix": PreferenceLoss(MIX)}
EVERY = {
    **{n: PreferenceLoss((LossEntry(n, label_smoothing=0.1 if n == "exo_pair" else None),)) for n in LOSSES},
    "mix": PreferenceLoss(MIX),
    "ld": PreferenceLoss((LossEntry("sigmoid"), LossEntry("bco_pair", 0.2)), ld_alpha=0.4, shift=0.1),
    "wpo": PreferenceLoss((LossEntry("sigmoid"),), wpo=True, length_average=True),
}


def objective(loss: PreferenceLoss) -> Objective:
    return Objective("policy", Head(loss.outputs), loss)


def pairs(engine: LocalEngine, plane: tiny.MemoryPlane) -> BatchRef:
    """Rows with reference log-probs that are not the policy's, in the model's precision."""
    ref = tiny.rows(plane, LENGTHS, group_rows=2)
    dtype = next(engine.model.parameters()).dtype
    generator = torch.Generator().manual_seed(9)
    reference = [-3 - 2 * torch.rand(n, generator=generator, dtype=torch.float64).to(dtype) for n in LENGTHS]
    return plane.put(ref, {"reference_logprobs": reference})


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("double", [True, False])
def test_micro_batches_give_one_gradient(tmp_path: Path, double: bool) -> None:
    """Every loss with micro-batches of 8, 4, 2 and 1 (then a pair by itself), and metrics that say the same."""
    found: dict[str, list[tuple[torch.Tensor, dict[str, float]]]] = {name: [] for name in EVERY}
    for micro in (8, 4, 2, 1):
        engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=micro), double=double)
        ref = pairs(engine, plane)
        for name, loss in EVERY.items():
            metrics = {key: metric.value for key, metric in engine.evaluate(ref, objective(loss)).items()}
            found[name].append((tiny.gradients(engine, plane, ref, objective(loss)), metrics))
    for name, ((expected, metrics), *others) in found.items():
        for gradient, measured in others:
            assert error(gradient, expected) <= (1e-10 if double else 1e-5), name
            assert measured == pytest.approx(metrics, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", WHOLE_STEP)
def test_the_whole_step_is_not_its_parts(tmp_path: Path, name: str) -> None:
    """The test above can fail: sorted within micro-batches, the gradient is another one."""

    @dataclass(frozen=True)
    class InParts(PreferenceLoss):
        whole_step: ClassVar[bool] = False  # type: ignore[misc]

    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=2), double=True)
    ref = pairs(engine, plane)
    whole = tiny.gradients(engine, plane, ref, objective(WHOLE_STEP[name]))
    parts = tiny.gradients(engine, plane, ref, objective(InParts(WHOLE_STEP[name].entries)))
    assert error(parts, whole) > 1e-5


def test_both_passes_draw_the_same_dropout(tmp_path: Path) -> None:
    """A loss that is a sum over rows has the same gradient in two passes as in one, with dropout on."""

    @dataclass(frozen=True)
    class TwoPasses(NLL):
        whole_step: ClassVar[bool] = True

    engine, plane = tiny.engine(tiny.config(tmp_path, "gpt2", train_micro_batch_size=2), double=True)
    assert engine.model.config.resid_pdrop > 0
    ref = tiny.rows(plane, LENGTHS)
    once = tiny.gradients(engine, plane, ref)
    twice = tiny.gradients(engine, plane, ref, Objective("policy", Head(), TwoPasses()))
    assert error(twice, once) <= 1e-10


@pytest.mark.parametrize("name", WHOLE_STEP)
def test_a_whole_step_trains_and_skips(tmp_path: Path, name: str) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=2))
    ref, goal = pairs(engine, plane), objective(WHOLE_STEP[name])
    before = {key: metric.value for key, metric in engine.evaluate(ref, goal).items()}
    trained = {key: metric.value for key, metric in engine.train(ref, goal).items()}
    assert {key: trained[key] for key in before} == pytest.approx(before, rel=1e-4, abs=1e-6)
    for _ in range(20):
        engine.train(ref, goal)
    assert engine.evaluate(ref, goal)["loss"].value < before["loss"]

    plane.put(ref, {"loss_mask": [torch.zeros(n) for n in LENGTHS]})
    skipped = engine.train(ref, goal)
    assert skipped["skipped_optimizer_steps"].value == 1
    assert skipped["skipped_pairs"].value == 4


def test_a_whole_step_that_is_not_finite_names_all_rows(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=2))
    ref = pairs(engine, plane)
    with torch.no_grad():
        engine.model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="the loss is nan") as raised:
        engine.train(ref, objective(WHOLE_STEP["aot"]))
    assert all(row in str(raised.value) for row in ref.ids)
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
def test_a_reward_model_gives_one_gradient(tmp_path: Path, double: bool, tolerance: float) -> None:
    """And that of the scores row by row, without padding, at each row's last token. A row that ends in a token which is
    also pad counts to its end; Transformers' own classifier would read the score before it."""
    loss: Loss = RewardLoss(margins=True, centring=0.1)
    goal = Objective("policy", Head(("scalar",)), loss)
    found = []
    for micro in (8, 4, 2, 1):
        configuration = tiny.config(tmp_path, train_micro_batch_size=micro)
        tokenizer = models.load_tokenizer(configuration)
        loaded = models.load(configuration, tokenizer=tokenizer, seed=7, kind="scalar")
        plane = tiny.MemoryPlane()
        model = loaded.model.double() if double else loaded.model
        engine = LocalEngine(model, loaded.files, configuration, plane, CloningStager(), seed=7)
        ref = tiny.rows(plane, LENGTHS, group_rows=2)
        ids = plane.get(ref, ["input_ids"])["input_ids"]
        ids[3][-1] = tokenizer.pad_token_id
        margins = torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 0.2, 0.2])
        ref = plane.put(ref, {"margin": margins, "input_ids": ids})
        found.append(tiny.gradients(engine, plane, ref, goal))
    scores = torch.stack([model.score(model.model(row[None]).last_hidden_state[0, -1])[0] for row in ids])
    chosen, rejected = scores[0::2], scores[1::2]
    total = torch.nn.functional.softplus(rejected - chosen + margins[0::2]) + 0.1 * (chosen + rejected) ** 2
    total.mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for gradient in found:
        assert error(gradient, expected) <= tolerance
