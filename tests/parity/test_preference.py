"""Loss and gradient of every preference loss, and of reward models, against TRL 1.16, to 1e-5 in float32.

TRL computes them here where it is installed; else the committed values of `make_reference.py` stand in. Where we differ
on purpose a test of its own says how and why.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from surefoot.losses.pairs import LOSSES
from surefoot.losses.preference import LossEntry, PreferenceLoss
from surefoot.losses.reward import RewardLoss
from tests.parity import trl_reference
from tests.parity.cases import CASES, MARGINS, REWARD_CASES, SCORES, Case, rows
from tests.parity.make_reference import read

PREFERENCE, REWARD = read("trl_preference"), read("trl_reward")
DIFFER = {"sigmoid, smoothing ignored", "empty pair"}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def theirs(name: str) -> Any:
    return trl_reference.preference(CASES[name]) if trl_reference.installed() else PREFERENCE[name]


def ours(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    data = rows(case.pairs, case.empty_pair)
    entries = tuple(LossEntry(name, weight, **options) for name, weight, options in case.entries)
    loss = PreferenceLoss(entries, **case.options)
    logprobs = data.logprobs.clone().requires_grad_()
    columns = {"loss_mask": data.loss_mask, "reference_logprobs": data.reference_logprobs}
    out = {"logprobs": logprobs, "log_sum_sq_probs": data.log_sum_sq_probs}
    value, metrics = loss(out, columns, norm=loss.counts(columns))
    value.backward()
    assert logprobs.grad is not None
    return value.detach(), logprobs.grad, {name: metric.value for name, metric in metrics.items()}


def test_every_loss_has_a_case() -> None:
    assert {name for case in CASES.values() for name, _, _ in case.entries} == set(LOSSES)
    assert len(LOSSES) == 15


@pytest.mark.parametrize("name", sorted(CASES.keys() - DIFFER))
def test_preference(name: str) -> None:
    expected = theirs(name)
    value, gradient, metrics = ours(CASES[name])
    torch.testing.assert_close(value, torch.tensor(expected["loss"]), **CLOSE)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"]), **CLOSE)
    if name == "length average":  # TRL logs sums there
        return
    assert len(expected["metrics"]) == 6
    for key, measured in expected["metrics"].items():
        if CASES[name].entries[0][0] != "sft" or not key.startswith("rewards"):
            assert metrics[key] == pytest.approx(measured, rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("name", REWARD_CASES)
def test_reward(name: str) -> None:
    margins, centring = REWARD_CASES[name]
    expected = trl_reference.reward(margins, centring) if trl_reference.installed() else REWARD[name]
    scores = torch.tensor(SCORES).view(-1, 1).requires_grad_()
    ones = torch.ones_like(scores).detach()
    columns = {"loss_mask": ones, "attention_mask": ones, "margin": torch.tensor(MARGINS).repeat_interleave(2)}
    loss = RewardLoss(margins=margins, centring=centring)
    value, metrics = loss({"scalar": scores}, columns, norm=loss.counts(columns))
    value.backward()
    torch.testing.assert_close(value.detach(), torch.tensor(expected["loss"]), **CLOSE)
    torch.testing.assert_close(scores.grad, torch.tensor(expected["gradient"]).view(-1, 1), **CLOSE)
    assert metrics["accuracy"].value == pytest.approx(expected["metrics"]["accuracy"])
    assert metrics["margin"].value == pytest.approx(expected["metrics"]["margin"])
    mean = (metrics["scores/chosen"].value + metrics["scores/rejected"].value) / 2
    assert mean == pytest.approx(expected["metrics"]["mean_reward"])


# ------------------------------------------------------------------------------------------- where we differ on purpose


def test_label_smoothing_is_read_by_sigmoid() -> None:
    """TRL's sigmoid accepts label smoothing and computes without it, so a user believes in noise robustness that is not
    there (E7). Ours is conservative DPO (its case "sigmoid, smoothed" agrees with TRL's aot on one pair)."""
    ignored = theirs("sigmoid, smoothing ignored")
    assert ignored["loss"] == pytest.approx(theirs("sigmoid")["loss"], abs=1e-6)
    smoothed = Case([("sigmoid", 1.0, {"beta": 0.3, "label_smoothing": 0.1})])
    assert abs(float(ours(smoothed)[0]) - ignored["loss"]) > 1e-3


def test_an_empty_pair_is_in_no_mean() -> None:
    """TRL counts a pair without completion tokens as h = 0, which adds ln 2 and shrinks the others' gradient (E4).
    Ours leaves it out of loss and count: over 4 pairs of which 1 is empty, theirs = (3 · ours + ln 2) / 4."""
    expected = theirs("empty pair")
    value, gradient, metrics = ours(CASES["empty pair"])
    assert expected["loss"] == pytest.approx((3 * float(value) + math.log(2)) / 4, abs=1e-5)
    torch.testing.assert_close(gradient * 3 / 4, torch.tensor(expected["gradient"]), **CLOSE)
    assert metrics["skipped_pairs"] == 1


@pytest.mark.skipif(not trl_reference.installed(), reason="needs trl 1.16: the committed values stand in for it")
def test_committed_values_are_what_trl_computes() -> None:
    for name, case in CASES.items():
        assert_same(trl_reference.preference(case), PREFERENCE[name])
    for name, setting in REWARD_CASES.items():
        assert_same(trl_reference.reward(*setting), REWARD[name])
    assert PREFERENCE.keys() == CASES.keys()


def assert_same(found: Any, committed: Any) -> None:
    assert found["loss"] == pytest.approx(committed["loss"], abs=1e-6)
    torch.testing.assert_close(torch.tensor(found["gradient"]), torch.tensor(committed["gradient"]), **CLOSE)
    assert found["metrics"] == pytest.approx(committed["metrics"], abs=1e-5)
