"""Loss and gradient of policy gradient against TRL 1.16, GAE and whitening against torchtune 0.6, to 1e-5 in float32.

They compute here where they are installed; else the committed values of `make_reference.py` stand in. Where we differ
on purpose a test of its own says how and why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.advantages import gae, whiten
from surefoot.losses.policy import PolicyLoss
from surefoot.losses.ratios import LOSSES
from tests.parity import torchtune_reference, trl_reference
from tests.parity.cases import (
    GAE_CASES,
    LONGEST,
    POLICY_CASES,
    POLICY_LENGTHS,
    PolicyCase,
    policy_rows,
    value_rows,
)
from tests.parity.make_reference import read, torchtune

POLICY, TORCHTUNE = read("trl_policy"), read("torchtune")
DIFFER = {"empty row", "empty row, constant", "entropy, by sequence"}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TRL_NAMES = {f"clip_ratio/{which}": f"clip_ratio/{which}_mean" for which in ("low", "high", "region")}


def theirs(name: str) -> Any:
    return trl_reference.policy(POLICY_CASES[name]) if trl_reference.installed() else POLICY[name]


def ours(case: PolicyCase) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss, its gradients in log-probs and entropies [2, rows, tokens], and the metrics."""
    data, loss = policy_rows(case.empty_row), PolicyLoss(**case.ours)
    columns = {name: getattr(data, name) for name in loss.fields}
    inputs = {name: getattr(data, name).clone().requires_grad_() for name in ("logprobs", "entropy")}
    value, metrics = loss(inputs, columns, norm=loss.counts(columns))
    grads = torch.autograd.grad(value, [*inputs.values()], allow_unused=True, materialize_grads=True)
    return value.detach(), torch.stack(grads), {name: metric.value for name, metric in metrics.items()}


def test_every_type_has_a_case() -> None:
    names = {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"}
    assert {f"{name}, {level}" for name in names for level in ("token", "sequence")} <= POLICY_CASES.keys()
    assert {case.ours.get("loss_type", "clip") for case in POLICY_CASES.values()} == LOSSES.keys() - {"reinforce"}


@pytest.mark.parametrize("name", sorted(POLICY_CASES.keys() - DIFFER))
def test_policy(name: str) -> None:
    expected = theirs(name)
    value, gradient, metrics = ours(POLICY_CASES[name])
    torch.testing.assert_close(value, torch.tensor(expected["loss"]), **CLOSE)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"]), **CLOSE)
    by_sequence = POLICY_CASES[name].ours.get("sequence_level_importance_ratios", False)
    for key in ("kl", "entropy", *TRL_NAMES):
        measured = expected["metrics"].get(TRL_NAMES.get(key, key))
        if measured is not None and not (by_sequence and key in TRL_NAMES):  # where TRL's mean is over sequences
            assert metrics[key] == pytest.approx(measured, rel=1e-5, abs=1e-5), key
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)


def test_the_cases_reach_what_they_are_about() -> None:
    """Ratios on both sides of every clip, weights on both sides of their bound."""
    for name in ("grpo, token", "gspo", "clip-higher"):
        metrics = ours(POLICY_CASES[name])[2]
        assert metrics["clip_ratio/low"] > 0 and metrics["clip_ratio/high"] > 0, name
    assert 0 < ours(POLICY_CASES["cispo, token"])[2]["clip_ratio/high"] < 1
    assert 0 < ours(POLICY_CASES["truncated weights"])[2]["importance_weight/outside"] < 1
    plain, dual = (ours(POLICY_CASES[name])[0] for name in ("grpo, token", "dual clip"))
    assert abs(float(plain - dual)) > 1e-3


# ------------------------------------------------------------------------------------------- where we differ on purpose


@pytest.mark.parametrize("name", ["empty row", "empty row, constant"])
def test_a_row_without_tokens_is_in_no_mean(name: str) -> None:
    """TRL divides by all rows, so an empty or filtered completion takes from what the others teach (F9). Ours divides
    by the sequences that have a trained token: theirs = ours · 5 / 6."""
    expected = theirs(name)
    value, gradient, metrics = ours(POLICY_CASES[name])
    part = (len(POLICY_LENGTHS) - 1) / len(POLICY_LENGTHS)
    assert expected["loss"] == pytest.approx(float(value) * part, rel=1e-5)
    torch.testing.assert_close(gradient * part, torch.tensor(expected["gradient"]), **CLOSE)
    assert metrics["skipped_rows"] == 1


def test_the_entropy_bonus_is_reduced_as_the_rest() -> None:
    """TRL's bonus is a mean over the micro-batch's tokens whatever the loss's reduction, so that accumulation changes
    it. Ours has the loss's own: with "sequence" each row's mean counts the same."""
    expected, (_, gradient, _) = theirs("entropy, by sequence"), ours(POLICY_CASES["entropy, by sequence"])
    lengths = torch.tensor([completion for _, completion in POLICY_LENGTHS])
    torch.testing.assert_close(gradient[0], torch.tensor(expected["gradient"])[0], **CLOSE)
    torch.testing.assert_close(
        gradient[1] * lengths[:, None] * len(lengths) / lengths.sum(), torch.tensor(expected["gradient"])[1], **CLOSE
    )


def test_constant_length_is_the_longest_response() -> None:
    assert max(completion for _, completion in POLICY_LENGTHS) < LONGEST


# ------------------------------------------------------------------------------------------------------------ torchtune


def their_values(name: str) -> Any:
    return torchtune()[name] if torchtune_reference.installed() else TORCHTUNE[name]


@pytest.mark.parametrize("name", GAE_CASES)
def test_gae(name: str) -> None:
    """torchtune whitens with `shift_mean=True`, which adds the mean back (in TRL, where the function came from, False
    does that): its advantages are not centred. Ours are: theirs − ours is one number, that mean."""
    rewards, values, penalties, mask = value_rows()
    gamma, lmbda = GAE_CASES[name]
    settings: dict[str, Any] = {"gae_gamma": gamma, "gae_lambda": lmbda, "penalties": penalties}
    advantages, returns = gae(rewards, values, mask, **settings)
    raw, _ = gae(rewards, values, mask, **settings, normalize_advantages=False)
    expected = their_values(name)
    torch.testing.assert_close(returns, torch.tensor(expected["returns"]), **CLOSE)
    shifted = (advantages + raw.sum() / mask.sum()) * mask
    torch.testing.assert_close(shifted, torch.tensor(expected["advantages"]), **CLOSE)


def test_whitening() -> None:
    """Centred, which is torchtune's `shift_mean=False`."""
    _, values, _, mask = value_rows()
    torch.testing.assert_close(whiten(values, mask), torch.tensor(their_values("whiten, False")["values"]), **CLOSE)


# ------------------------------------------------------------------------------------------------- the committed values


@pytest.mark.skipif(not trl_reference.installed(), reason="needs trl 1.16: the committed values stand in for it")
def test_committed_values_are_what_trl_computes() -> None:
    assert POLICY.keys() == POLICY_CASES.keys()
    for name in POLICY_CASES:
        assert_same(theirs(name), POLICY[name])


@pytest.mark.skipif(not torchtune_reference.installed(), reason="needs torchtune 0.6: the committed values stand in")
def test_committed_values_are_what_torchtune_computes() -> None:
    computed = torchtune()
    assert TORCHTUNE.keys() == computed.keys()
    for name, found in computed.items():
        assert_same(found, TORCHTUNE[name])


def assert_same(found: Any, committed: Any) -> None:
    assert found.keys() == committed.keys()
    for key, value in found.items():
        if key == "metrics":
            assert value == pytest.approx(committed[key], abs=1e-5)
        else:
            torch.testing.assert_close(torch.tensor(value), torch.tensor(committed[key]), **CLOSE)
