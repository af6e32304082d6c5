"""Policy gradient and value loss through the engine: one gradient for any split, ratios of 1, skips, learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.advantages import gae, padded, per_token, unpadded
from surefoot.engine import models
from surefoot.engine.local import LocalEngine
from surefoot.losses.policy import PolicyLoss
from surefoot.losses.value import ValueLoss, state_values
from surefoot.types import BatchRef, Head, Objective
from tests.engine import tiny
from tests.helpers.memory_store import CloningStager
from tests.losses.policy_forms import EVERY

LENGTHS = [5, 3, 4, 8, 7, 6, 2, 9]
ADVANTAGES = torch.tensor([1.0, -0.5, -0.5, 0.0, 1.5, -1.0, 0.25, -0.75])


def objective(loss: PolicyLoss, temperature: float = 1.0, **options: Any) -> Objective:
    return Objective("policy", Head(loss.outputs, temperature), loss, **options)


def rollout(engine: LocalEngine, plane: tiny.MemoryPlane, temperature: float = 1.0, noise: float = 0.0) -> BatchRef:
    """Rows as a rollout leaves them: log-probs of the policy itself at the sampling temperature, moved by `noise`."""
    ref = tiny.rows(plane, LENGTHS)
    generator = torch.Generator().manual_seed(9)
    names = ("old_logprobs", "generator_logprobs", "reference_logprobs")
    for name in names:
        ref = engine.infer(ref, Head(("logprobs",), temperature), {"logprobs": name})
    columns = plane.get(ref, [*names, "loss_mask"])
    for name in names:
        found = columns[name]
        columns[name] = [x + noise * torch.randn(len(x), generator=generator, dtype=torch.float64).to(x) for x in found]
    columns["advantages"] = per_token(ADVANTAGES, columns["loss_mask"])  # type: ignore[arg-type]
    columns["truncated"] = torch.tensor([float(row in (3, 6)) for row in range(8)])
    return plane.put(ref, columns)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("double", [True, False])
def test_micro_batches_give_one_gradient(tmp_path: Path, double: bool) -> None:
    """F10: every form with micro-batches of 8, 4, 2 and 1, so also padded and, with 1, unpadded."""
    found: dict[str, list[Tensor]] = {name: [] for name in EVERY}
    engine, plane = tiny.engine(tiny.config(tmp_path), double=double)
    ref = rollout(engine, plane, noise=0.4)
    for micro in (8, 4, 2, 1):
        engine._config = engine._config.model_copy(update={"train_micro_batch_size": micro})
        assert len(engine._batches(ref, objective(EVERY["clip"]))) == 8 // micro
        for name, loss in EVERY.items():
            found[name].append(tiny.gradients(engine, plane, ref, objective(loss)))
    for name, (expected, *others) in found.items():
        assert float(expected.norm()) > 0
        for gradient in others:
            assert error(gradient, expected) <= (1e-10 if double else 1e-5), name


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("sequence", [False, True])
def test_before_the_first_update_the_ratio_is_one(tmp_path: Path, temperature: float, sequence: bool) -> None:
    """F11: at the temperature of the rollout. With another one on one side it is far from 1."""
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=2))
    ref = rollout(engine, plane, temperature)
    loss = PolicyLoss(sequence_level_importance_ratios=sequence)
    metrics = engine.train(ref, objective(loss, temperature))
    for name in ("min", "mean", "max"):
        assert metrics[f"ratio/{name}"].value == pytest.approx(1, abs=1e-5)
        assert metrics[f"importance_weight/{name}"].value == pytest.approx(1, abs=1e-5)
    assert metrics["generator_mismatch/max"].value < 1e-5
    wrong = engine.evaluate(ref, objective(loss, temperature + 0.7))
    assert wrong["ratio/max"].value > 1.1


def test_several_optimizer_steps_move_away_from_the_old_policy(tmp_path: Path) -> None:
    """Two epochs of two minibatches: the ratio is 1 in the first step alone, and each step counts its own rows. With
    `force_on_policy_ratio` it stays 1, which is why that is for one step."""
    engine, plane = tiny.engine(tiny.config(tmp_path))
    ref = rollout(engine, plane)
    metrics = engine.train(ref, objective(PolicyLoss(), epochs=2, minibatch_rows=4))
    assert metrics["optimizer_steps"].value == 4
    assert metrics["ratio/min"].value < 0.95 and metrics["ratio/max"].value > 1.05
    assert metrics["num_tokens"].value == 2 * sum(n // 2 for n in LENGTHS)
    forced = engine.train(ref, objective(PolicyLoss(force_on_policy_ratio=True), epochs=2, minibatch_rows=4))
    assert forced["ratio/min"].value == forced["ratio/max"].value == 1
    assert forced["generator_mismatch/max"].value > 0.05  # o is the policy's own by now, and shows it


@pytest.mark.parametrize("name", EVERY)
def test_a_step_with_nothing_to_train_on_is_skipped(tmp_path: Path, name: str) -> None:
    """F9: no weight moves, nothing is NaN, and the step is counted as skipped."""
    engine, plane = tiny.engine(tiny.config(tmp_path))
    ref = rollout(engine, plane)
    before = {key: weight.clone() for key, weight in engine.weights().items()}
    loss = EVERY[name]
    if loss.overlong_filtering:
        plane.put(ref, {"truncated": torch.ones(8)})
    else:
        plane.put(ref, {"loss_mask": [torch.zeros(n) for n in LENGTHS]})
    metrics = engine.train(ref, objective(loss))
    assert metrics["skipped_optimizer_steps"].value == 1
    assert metrics["skipped_rows"].value == 8
    assert (metrics["loss"].value, metrics["grad_norm"].value) == (0, 0)
    assert all(torch.equal(weight, before[key]) for key, weight in engine.weights().items())


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo", "sapo", "reinforce", "all"])
def test_it_learns(tmp_path: Path, name: str) -> None:
    """Rows with a positive advantage become likelier, those with a negative one less likely."""
    engine, plane = tiny.engine(tiny.config(tmp_path))
    ref = rollout(engine, plane)
    loss = replace(EVERY[name], overlong_filtering=False)
    head = Head(("logprobs",))

    def likelihoods() -> Tensor:
        columns = plane.get(engine.infer(ref, head, {"logprobs": "now"}), ["now", "loss_mask"])
        return torch.stack([(now * m).sum() for now, m in zip(columns["now"], columns["loss_mask"], strict=True)])

    before = likelihoods()
    for _ in range(10):
        engine.infer(ref, head, {"logprobs": "old_logprobs"})
        engine.infer(ref, head, {"logprobs": "generator_logprobs"})
        engine.train(ref, objective(loss))
    change = likelihoods() - before
    assert (change[ADVANTAGES > 0.5] > 0).all() and (change[ADVANTAGES < -0.5] < 0).all(), change


def value_engine(tmp_path: Path, micro: int, double: bool) -> tuple[LocalEngine, tiny.MemoryPlane, BatchRef]:
    """A value model with rows, its own values, and returns from GAE."""
    configuration = tiny.config(tmp_path, train_micro_batch_size=micro)
    tokenizer = models.load_tokenizer(configuration)
    loaded = models.load(configuration, tokenizer=tokenizer, seed=7, kind="scalar")
    plane = tiny.MemoryPlane()
    model = loaded.model.double() if double else loaded.model
    engine = LocalEngine(model, loaded.files, configuration, plane, CloningStager(), seed=7)
    ref = engine.infer(tiny.rows(plane, LENGTHS), Head(("scalar",)), {"scalar": "scalars"})
    columns = plane.get(ref, ["scalars", "loss_mask"])
    values: list[Tensor] = [state_values(row) for row in columns["scalars"]]  # type: ignore[arg-type]
    mask = padded(columns["loss_mask"])  # type: ignore[arg-type]
    _, returns = gae(ADVANTAGES.double(), padded(values), mask)
    return engine, plane, plane.put(ref, {"old_values": values, "returns": unpadded(returns, LENGTHS)})


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
def test_a_value_model_gives_one_gradient(tmp_path: Path, double: bool, tolerance: float) -> None:
    """And that of the values row by row, without padding: before each own token, never after it."""
    goal, found = Objective("value", Head(("scalar",)), ValueLoss(cliprange=0.2)), []
    for micro in (8, 4, 2, 1):
        engine, plane, ref = value_engine(tmp_path, micro, double)
        found.append((tiny.gradients(engine, plane, ref, goal), engine.evaluate(ref, goal)))
    model, columns = engine.model, plane.get(ref, ["input_ids", "loss_mask", "returns"])
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for ids, mask, returns in zip(*(columns[name] for name in ("input_ids", "loss_mask", "returns")), strict=True):
        scores = model.score(model.model(ids[None]).last_hidden_state[0])[:, 0]
        own = mask[1:] != 0
        total = total + ((scores[:-1] - returns[1:])[own] ** 2).sum() / 2
    tokens = sum(float(mask.sum()) for mask in columns["loss_mask"])  # type: ignore[union-attr]
    model.zero_grad()
    (total / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for gradient, metrics in found:
        assert error(gradient, expected) <= tolerance
        assert metrics["loss"].value == pytest.approx(float(total.detach()) / tokens, rel=1e-5)
        assert metrics["explained_variance"].value == pytest.approx(found[0][1]["explained_variance"].value, rel=1e-5)


def test_a_value_model_learns(tmp_path: Path) -> None:
    engine, plane, ref = value_engine(tmp_path, 4, double=False)
    goal = Objective("value", Head(("scalar",)), ValueLoss(cliprange=0.5))
    first = engine.train(ref, goal)["loss"].value
    for _ in range(30):
        engine.infer(ref, Head(("scalar",)), {"scalar": "scalars"})
        scalars = plane.get(ref.with_fields(["scalars"]), ["scalars"])["scalars"]
        plane.put(ref, {"old_values": [state_values(row) for row in scalars]})  # type: ignore[arg-type]
        last = engine.train(ref, goal)
    assert last["loss"].value < first / 10
    assert last["explained_variance"].value > 0.8


def test_values_are_float32_under_bfloat16(tmp_path: Path) -> None:
    """Returns and the clip's bounds differ from the values by less than bfloat16 can tell."""
    configuration = tiny.config(tmp_path, precision="bfloat16")
    loaded = models.load(configuration, tokenizer=models.load_tokenizer(configuration), seed=7, kind="scalar")
    plane = tiny.MemoryPlane()
    engine = LocalEngine(loaded.model, loaded.files, configuration, plane, CloningStager(), seed=7)
    ref = engine.infer(tiny.rows(plane, LENGTHS), Head(("scalar",)), {"scalar": "scalars"})
    assert {row.dtype for row in plane.get(ref, ["scalars"])["scalars"]} == {torch.float32}  # type: ignore[union-attr]
