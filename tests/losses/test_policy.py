"""Policy gradient: arithmetic by hand, ratios of 1, splits, rows without tokens, options that do not go together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.losses.policy import PolicyLoss
from surefoot.losses.ratios import LOSSES
from surefoot.types import Loss, Metrics, merge_metrics
from tests.losses.policy_forms import BOUNDS, EVERY, WEIGHTS

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]


def table(dtype: torch.dtype = torch.float64, lengths: list[int] = LENGTHS, prompt: int = 2) -> dict[str, Tensor]:
    """Log-probs that differ by about 0.4 from side to side, one advantage per row, and rows 3 and 6 truncated."""
    generator = torch.Generator().manual_seed(3)
    width = prompt + max(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    places = torch.arange(width)
    mask = torch.stack([(places >= prompt) & (places < prompt + n) for n in lengths])
    logprobs = -1 - normal(len(lengths), width).abs()
    moved = ("old_logprobs", "reference_logprobs", "generator_logprobs")
    columns = {name: (logprobs + 0.4 * normal(*logprobs.shape)) * mask for name in moved}
    columns |= {"logprobs": logprobs * mask, "entropy": normal(*logprobs.shape).abs() * mask}
    columns["advantages"] = normal(len(lengths))[:, None] * mask
    columns = {name: column.to(dtype) for name, column in columns.items()}
    truncated = torch.tensor([float(row in (3, 6)) for row in range(len(lengths))])
    return {**columns, "loss_mask": mask.float(), "truncated": truncated}


def run(loss: PolicyLoss, columns: dict[str, Tensor], size: int = 8) -> tuple[Tensor, Tensor, Metrics]:
    """The step's loss, its gradient in the log-probs, and the metrics, from micro-batches of `size` rows."""
    logprobs = columns["logprobs"].clone().requires_grad_()
    norm: dict[str, float] = {}
    cuts = [slice(start, start + size) for start in range(0, len(logprobs), size)]
    parts = [{name: column[cut] for name, column in columns.items()} for cut in cuts]
    for part in parts:
        for name, count in loss.counts(part).items():
            norm[name] = norm.get(name, 0.0) + count
    found = [
        loss({"logprobs": logprobs[cut], "entropy": part["entropy"]}, part, norm=norm)
        for cut, part in zip(cuts, parts, strict=True)
    ]
    total = torch.stack([value for value, _ in found]).sum()
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad, merge_metrics([metrics for _, metrics in found])


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def by_hand(loss: PolicyLoss, ratios: list[float], advantages: list[float]) -> tuple[list[float], list[float]]:
    """Loss per token, and its gradient in the log-prob, for tokens with these ratios; log-probs are −1."""
    logprobs = torch.full((1, len(ratios)), -1.0, dtype=torch.float64).requires_grad_()
    columns = {
        "loss_mask": torch.ones(1, len(ratios)),
        "old_logprobs": -1 - torch.tensor([ratios], dtype=torch.float64).log(),
        "generator_logprobs": -torch.ones(1, len(ratios)),
        "advantages": torch.tensor([advantages], dtype=torch.float64),
    }
    grads, found = [], []
    for token in range(len(ratios)):
        part = {name: column[:, token : token + 1] for name, column in columns.items()}
        value, _ = loss({"logprobs": logprobs[:, token : token + 1]}, part, norm={"tokens": 1, "sequences": 1})
        found.append(float(value.detach()))
        grads.append(float(torch.autograd.grad(value, logprobs)[0][0, token]))
    return found, grads


# -------------------------------------------------------------------------------------------------------------- by hand


def test_clip() -> None:
    """ε 0.2 / 0.3. A = 2: ratio 1.5 counts as 1.3 and has no gradient, 0.5 counts as it is. A = −2: 0.5 counts as 0.8
    without gradient, 1.5 as it is. Else the gradient is −A · ratio."""
    found, grads = by_hand(PolicyLoss(ratio_clip_max=0.3), [1.5, 0.5, 1.1, 0.5, 1.5, 0.9], [2, 2, 2, -2, -2, -2])
    assert found == pytest.approx([-2.6, -1.0, -2.2, 1.6, 3.0, 1.8])
    assert grads == pytest.approx([0.0, -1.0, -2.2, 0.0, 3.0, 1.8])


def test_dual_clip() -> None:
    """A = −2: the loss is at most 2 · 3, and flat from there. A > 0 is as before."""
    found, grads = by_hand(PolicyLoss(ratio_clip_c=3.0), [2.0, 4.0, 4.0], [-2, -2, 2])
    assert found == pytest.approx([4.0, 6.0, -2.4])
    assert grads == pytest.approx([4.0, 0.0, 0.0])


def test_cispo() -> None:
    """−A · min(ratio, 5) · l with l = −1: the ratio weighs the gradient, however far out, and has none itself."""
    found, grads = by_hand(PolicyLoss("cispo"), [0.5, 2.0, 9.0, 9.0], [1, 1, 1, -1])
    assert found == pytest.approx([0.5, 2.0, 5.0, -5.0])
    assert grads == pytest.approx([-0.5, -2.0, -5.0, 5.0])


def test_sapo() -> None:
    """At ratio 1 the gate is 2/τ and its slope 1, so the gradient is −A, for either sign."""
    found, grads = by_hand(PolicyLoss("sapo"), [1.0, 1.0, 3.0], [2, -2, 2])
    gate = 4 / (1 + math.exp(-2.0))
    assert found == pytest.approx([-2 * 2.0, 2 * 2 / 1.05, -2 * gate])
    slope = gate * (1 - gate / 4)
    assert grads == pytest.approx([-2.0, 2.0, -2 * slope * 3.0])


def test_reinforce() -> None:
    found, grads = by_hand(PolicyLoss("reinforce"), [0.5, 9.0], [2, -1])
    assert (found, grads) == (pytest.approx([2.0, -1.0]), pytest.approx([-2.0, 1.0]))


def test_the_ratio_of_a_sequence() -> None:
    """exp of the mean log-ratio: (4 · 1 · ¼ · 2)^(1/4) = 2^(1/4) on every token, and a gradient on each, A · ρ / 4."""
    ratios = torch.tensor([[4.0, 1.0, 0.25, 2.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    logprobs = torch.full_like(ratios, -1.0).requires_grad_()
    columns = {"loss_mask": mask, "advantages": -mask, "generator_logprobs": -mask, "old_logprobs": -1 - ratios.log()}
    loss = PolicyLoss(sequence_level_importance_ratios=True, reduction="sequence")
    value, metrics = loss({"logprobs": logprobs}, columns, norm=loss.counts(columns))
    value.backward()
    expected = 2**0.25
    assert float(value.detach()) == pytest.approx(expected)
    torch.testing.assert_close(logprobs.grad, mask.double() * expected / 4)
    assert [metrics[f"ratio/{name}"].value for name in ("min", "mean", "max")] == pytest.approx([expected] * 3)


def test_reductions() -> None:
    """REINFORCE with A = −1 gives l. Rows with log-probs −1, −2, −3 and −6: Σ / 4, (−2 − 6) / 2, Σ / (2 · 10)."""
    columns = {
        "logprobs": torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -6.0, 0.0, 0.0]]),
        "loss_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]]),
    }
    columns |= dict.fromkeys(("old_logprobs", "generator_logprobs"), columns["logprobs"])
    columns |= {"advantages": -columns["loss_mask"], "entropy": columns["loss_mask"]}
    for reduction, expected in {"token": -3.0, "sequence": -4.0, "constant": -0.6}.items():
        longest = 10 if reduction == "constant" else None
        loss = PolicyLoss("reinforce", reduction=reduction, max_response_length=longest)
        for size in (2, 1):
            value, _, metrics = run(loss, columns, size)
            assert float(value) == pytest.approx(expected)
            assert metrics["loss"].value == pytest.approx(expected)


def test_weights_multiply_the_policy_term_alone() -> None:
    """w = exp(o − g) = 2. REINFORCE with A = −1 and l = −1: 2 · −1. β · k1 = 0.5 · (−1 + 3) and c · entropy as they
    are."""
    columns = {
        "loss_mask": torch.ones(1, 1),
        "advantages": -torch.ones(1, 1),
        "old_logprobs": -torch.ones(1, 1),
        "generator_logprobs": -1 - torch.tensor([[2.0]]).log(),
        "reference_logprobs": torch.tensor([[-3.0]]),
    }
    loss = PolicyLoss(
        **{"loss_type": "reinforce", "importance_sampling_correction": "token", "reference_policy_kl_penalty": 0.5},
        **{"reference_policy_kl_type": "k1", "entropy_coef": 0.1},
    )
    out = {"logprobs": -torch.ones(1, 1), "entropy": torch.tensor([[3.0]])}
    value, metrics = loss(out, columns, norm={"tokens": 1, "sequences": 1})
    assert float(value) == pytest.approx(-2 + 0.5 * 2 - 0.1 * 3)
    assert values(metrics) == pytest.approx(
        {
            **{"loss": -1.3, "kl": 2.0, "entropy": 3.0, "num_tokens": 1, "skipped_rows": 0},
            **{f"ratio/{name}": 1.0 for name in ("min", "mean", "max")},
            **{f"importance_weight/{name}": 2.0 for name in ("min", "mean", "max")},
            **{"importance_weight/outside": 0.0, "importance_weight/non_finite": 0},
            **{f"generator_mismatch/{name}": math.log(2) for name in ("mean", "max")},
        }
    )


def test_the_kl_term_has_each_tokens_own_ratio() -> None:
    """Also with the ratio of a sequence, which is a bound on a policy-gradient step and no importance weight."""
    columns = {**table(), "advantages": torch.zeros(8, 10)}
    kl: dict[str, Any] = {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k3"}
    by_token, by_sequence = (
        run(PolicyLoss(sequence_level_importance_ratios=sequence, **kl), columns) for sequence in (False, True)
    )
    assert torch.equal(by_token[0], by_sequence[0]) and torch.equal(by_token[1], by_sequence[1])
    own = columns["loss_mask"] != 0
    ratio = (columns["logprobs"] - columns["old_logprobs"])[own].exp()
    x = (columns["logprobs"] - columns["reference_logprobs"])[own]
    torch.testing.assert_close(by_token[0], 0.3 * (ratio * ((-x).exp() - 1 + x)).mean())
    torch.testing.assert_close(by_token[1][own], 0.3 * ratio * x / len(x))


def test_clipped_fractions() -> None:
    """Of 4 tokens one is held at the lower bound, where A < 0, and one at the upper, where A > 0; the other two lie
    outside too, on the side where the clip takes no gradient."""
    columns = {
        "logprobs": torch.zeros(1, 4),
        "old_logprobs": -torch.tensor([[0.5, 2.0, 0.5, 2.0]]).log(),
        "generator_logprobs": torch.zeros(1, 4),
        "advantages": torch.tensor([[-1.0, 1.0, 1.0, -1.0]]),
        **{name: torch.ones(1, 4) for name in ("loss_mask", "entropy")},
    }
    found = values(run(PolicyLoss(), columns)[2])
    assert [found[f"clip_ratio/{name}"] for name in ("low", "high", "region")] == [0.25, 0.25, 0.5]
    assert [found[f"ratio/{name}"] for name in ("min", "mean", "max")] == pytest.approx([0.5, 1.25, 2.0])
    assert values(run(PolicyLoss("cispo", ratio_clip_max=1.5), columns)[2])["clip_ratio/high"] == 0.5
    assert not any("clip_ratio" in name for name in run(PolicyLoss("sapo"), columns)[2])


# --------------------------------------------------------------------------------------------------------- any split


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", EVERY)
def test_any_split_gives_one_gradient(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """F10: answers of 1 to 8 tokens in micro-batches of 8, 4, 2 and 1; also in another order, and padded further."""
    columns = table(dtype)
    value, gradient, metrics = run(EVERY[name], columns)
    assert float(gradient.norm()) > 0
    for size in (4, 2, 1):
        other, other_gradient, merged = run(EVERY[name], columns, size)
        assert float(other) == pytest.approx(float(value), rel=tolerance, abs=tolerance)
        assert float((other_gradient - gradient).norm() / gradient.norm()) <= tolerance
        assert values(merged) == pytest.approx(values(metrics), rel=10 * tolerance, abs=tolerance)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    turned = run(EVERY[name], {key: column[order] for key, column in columns.items()}, 4)
    assert float((turned[1] - gradient[order]).norm() / gradient.norm()) <= tolerance
    wider = {k: torch.nn.functional.pad(c, (0, 5)) if c.ndim == 2 else c for k, c in columns.items()}
    longer = run(EVERY[name], wider)[1]
    assert float((longer[:, :-5] - gradient).norm() / gradient.norm()) <= tolerance
    assert not longer[:, -5:].any()


@pytest.mark.parametrize("name", EVERY)
def test_what_lies_outside_the_mask_counts_for_nothing(name: str) -> None:
    columns = table()
    dirty = {
        key: torch.where(columns["loss_mask"] == 0, float("nan") if "generator" in key else -7.0, column)
        if column.ndim == 2 and key != "loss_mask"
        else column
        for key, column in columns.items()
    }
    (value, gradient, metrics), (other, other_gradient, found) = run(EVERY[name], columns), run(EVERY[name], dirty)
    assert torch.equal(value, other) and torch.equal(gradient, other_gradient)
    assert values(found) == values(metrics)


# ------------------------------------------------------------------------------------------------- nothing to train on


@pytest.mark.parametrize("name", EVERY)
def test_all_rows_masked(name: str) -> None:
    """F9: answers that are all empty, or all cut off and filtered: loss 0, gradient 0, counted, nothing NaN."""
    empty = {**table(), "loss_mask": torch.zeros(8, 10)}
    cases = [empty, {**table(), "truncated": torch.ones(8)}] if EVERY[name].overlong_filtering else [empty]
    for columns in cases:
        assert not any(EVERY[name].counts(columns).values())  # so that the engine skips the optimizer step
        value, gradient, metrics = run(EVERY[name], columns, 2)
        assert float(value) == 0 and not gradient.any()
        found = values(metrics)
        assert found["skipped_rows"] == 8 and found["num_tokens"] == 0
        assert all(math.isfinite(number) for number in found.values())


def test_filtered_rows_are_as_if_not_there() -> None:
    """Two of eight rows are truncated. The others' loss and gradient are those of a step without the two."""
    columns = table()
    kept = columns["truncated"] == 0
    for reduction in ("token", "sequence", "constant"):
        longest = 10 if reduction == "constant" else None
        loss = PolicyLoss(overlong_filtering=True, reduction=reduction, max_response_length=longest)
        value, gradient, metrics = run(loss, columns)
        alone, alone_gradient, _ = run(loss, {name: column[kept] for name, column in columns.items()})
        torch.testing.assert_close(value, alone, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient[kept], alone_gradient, rtol=1e-12, atol=1e-15)
        assert not gradient[~kept].any()
        assert metrics["skipped_rows"].value == 2
        assert loss.counts(columns)["sequences"] == 6


# --------------------------------------------------------------------------------------------------- ratios and far out


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("loss_type", ["clip", "cispo", "sapo"])
def test_on_policy_the_ratio_is_one_to_the_bit(loss_type: str, sequence: bool) -> None:
    """And the gradient is that of REINFORCE, −A, whatever the form; `old_logprobs` is not read."""
    loss = PolicyLoss(loss_type, force_on_policy_ratio=True, sequence_level_importance_ratios=sequence)
    assert "old_logprobs" not in loss.fields
    columns = table(torch.float32)
    del columns["old_logprobs"]
    _, gradient, metrics = run(loss, columns)
    assert [metrics[f"ratio/{name}"].value for name in ("min", "mean", "max")] == [1.0, 1.0, 1.0]
    torch.testing.assert_close(gradient, run(PolicyLoss("reinforce", force_on_policy_ratio=True), columns)[1])
    # The same as with the column, where that holds the same numbers.
    twin = PolicyLoss(loss_type, sequence_level_importance_ratios=sequence)
    torch.testing.assert_close(gradient, run(twin, {**columns, "old_logprobs": columns["logprobs"]})[1])


@pytest.mark.parametrize("gap", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("name", EVERY)
def test_log_probs_far_apart(name: str, gap: float) -> None:
    """F12 for the whole loss: policy and old, reference or generator far apart on one token."""
    for column in ("old_logprobs", "reference_logprobs", "generator_logprobs"):
        columns = table(torch.float32)
        columns[column][2, 3] = columns["logprobs"][2, 3] + gap
        value, gradient, metrics = run(EVERY[name], columns)
        assert value.isfinite() and gradient.isfinite().all(), column
        assert all(math.isfinite(number) for number in values(metrics).values())


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_generator_log_prob_that_is_no_number(bad: float) -> None:
    """Its weight is 0, where weights are used, and it is counted; minima, means and maxima are of the others."""
    columns = table()
    columns["generator_logprobs"][5, 4] = bad
    for name, loss in EVERY.items():
        value, gradient, metrics = run(loss, columns)
        assert value.isfinite() and gradient.isfinite().all(), name
        found = values(metrics)
        assert all(math.isfinite(number) for number in found.values()), name
        whole_row = loss.importance_sampling_correction == "sequence"
        assert found["importance_weight/non_finite"] == (0 if bad == math.inf else 6 if whole_row else 1), name
    assert run(EVERY["tis"], columns)[1][5, 4] == 0 or bad == math.inf


# -------------------------------------------------------------------------------------------------------------- options


def test_fields_are_what_is_read() -> None:
    for name, loss in EVERY.items():
        checked: Loss = loss
        columns = {field: table()[field] for field in checked.fields}
        out = {output: table()[output] for output in loss.outputs}
        loss(out, columns, norm=loss.counts(columns))
        for field in checked.fields:
            with pytest.raises(KeyError):
                rest = {key: column for key, column in columns.items() if key != field}
                loss(out, rest, norm=loss.counts(columns))
        assert ("reference_logprobs" in checked.fields) == (loss.reference_policy_kl_penalty > 0), name
    assert {loss.loss_type for loss in EVERY.values()} == set(LOSSES)


_TIS: dict[str, Any] = {
    **WEIGHTS,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 2.0,
}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": "ppo"}, ["loss_type", "'ppo'", "cispo"]),
        ({"loss_type": "cispo", "ratio_clip_min": 0.1}, ["ratio_clip_min", "cispo", "ratio_clip_max"]),
        ({"loss_type": "sapo", "ratio_clip_c": 3.0}, ["ratio_clip_c", "sapo"]),
        ({"sapo_temperature_pos": 1.0}, ["sapo_temperature_pos", "clip"]),
        ({"loss_type": "reinforce", "ratio_clip_max": 0.2}, ["ratio_clip_max", "reinforce", "no option"]),
        (
            {"loss_type": "reinforce", "sequence_level_importance_ratios": True},
            ["sequence_level_importance_ratios", "reinforce"],
        ),
        ({"ratio_clip_min": 1.5}, ["ratio_clip_min", "1.5"]),
        ({"ratio_clip_max": -0.2}, ["ratio_clip_max", "-0.2"]),
        ({"ratio_clip_max": math.nan}, ["ratio_clip_max", "nan"]),
        ({"ratio_clip_c": 1.0}, ["ratio_clip_c must be above 1"]),
        ({"reduction": "mean"}, ["reduction", "'mean'", "sequence"]),
        ({"reduction": "constant"}, ["reduction", "constant", "max_response_length"]),
        ({"max_response_length": 8}, ["max_response_length", "reduction token"]),
        ({"reference_policy_kl_type": "k2"}, ["reference_policy_kl_type", "reference_policy_kl_penalty"]),
        ({"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k4"}, ["reference_policy_kl_type", "'k4'"]),
        ({"reference_policy_kl_penalty": -0.1}, ["reference_policy_kl_penalty", "-0.1"]),
        ({"entropy_coef": math.inf}, ["entropy_coef", "inf"]),
        ({"importance_sampling_correction": "row"}, ["importance_sampling_correction", "'row'"]),
        (
            {"truncated_importance_sampling_ratio": 2.0},
            ["truncated_importance_sampling_ratio", "truncated_importance_sampling_type"],
        ),
        (
            {**WEIGHTS, "truncated_importance_sampling_ratio_min": 0.5},
            ["truncated_importance_sampling_ratio_min", "truncated_importance_sampling_type"],
        ),
        (
            {**_TIS, "importance_sampling_correction": None},
            ["truncated_importance_sampling_type tis", "importance_sampling_correction"],
        ),
        ({**_TIS, "truncated_importance_sampling_type": "clamp"}, ["truncated_importance_sampling_type", "'clamp'"]),
        (
            {**_TIS, "truncated_importance_sampling_ratio": None},
            ["truncated_importance_sampling_type tis", "truncated_importance_sampling_ratio"],
        ),
        (
            {**_TIS, "truncated_importance_sampling_type": "icepop"},
            ["icepop", "truncated_importance_sampling_ratio_min"],
        ),
        (
            {**_TIS, "truncated_importance_sampling_ratio_min": 3.0},
            ["truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio", "3.0"],
        ),
        (
            {
                **{"importance_sampling_correction": "sequence", "truncated_importance_sampling_type": "seq-mask-tis"},
                **BOUNDS,
            },
            ["seq-mask-tis", "importance_sampling_correction"],
        ),
    ],
)
def test_refused(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        PolicyLoss(**options)
    assert all(name in str(raised.value) for name in named), str(raised.value)
