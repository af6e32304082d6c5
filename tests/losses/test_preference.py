"""The preference losses: arithmetic by hand, splits and paddings, empty pairs, and options that are refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.losses.pairs import LOSSES, Pairs, Side
from surefoot.losses.preference import LossEntry, PreferenceLoss, next_shift
from surefoot.types import Loss, Metric, Metrics, merge_metrics

NEEDED = {"exo_pair": {"label_smoothing": 0.1}}
# Every loss by itself, and mixes with each option of the whole loss.
WHOLE: dict[str, PreferenceLoss] = {
    **{name: PreferenceLoss((LossEntry(name, **NEEDED.get(name, {})),)) for name in LOSSES},
    "mpo": PreferenceLoss((LossEntry("sigmoid", 0.8), LossEntry("bco_pair", 0.2), LossEntry("sft")), shift=0.3),
    "ld": PreferenceLoss((LossEntry("sigmoid"), LossEntry("sft", 0.5)), ld_alpha=0.4),
    "averaged": PreferenceLoss((LossEntry("sigmoid"), LossEntry("ipo")), length_average=True),
    "wpo": PreferenceLoss((LossEntry("sigmoid"), LossEntry("sft")), wpo=True),
    "no reference": PreferenceLoss((LossEntry("sigmoid"),), reference=False),
}


def side(*ratios: float) -> Side:
    """A reference of 0; a row has two tokens."""
    values = torch.tensor(ratios)
    return Side(values, torch.zeros_like(values), values, values / 2)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# One pair with Δ chosen = 1 and Δ rejected = −0.5, so h = 1.5; β = 0.4: βh = 0.6, βΔ = 0.4 and −0.2, 1/2β = 1.25.
# Means over two tokens: 0.5 and −0.25, their difference 0.75.
BY_HAND: dict[str, tuple[Mapping[str, float], float]] = {
    "sigmoid": ({"label_smoothing": 0.1}, -0.9 * log_sigmoid(0.6) - 0.1 * log_sigmoid(-0.6)),
    "hinge": ({}, 1 - 0.6),
    "ipo": ({}, (0.75 - 1.25) ** 2),
    "exo_pair": (
        {"label_smoothing": 0.1},
        sig(0.6) * math.log(sig(0.6) / 0.9) + sig(-0.6) * math.log(sig(-0.6) / 0.1),
    ),
    "nca_pair": ({}, -log_sigmoid(0.4) - 0.5 * log_sigmoid(-0.4) - 0.5 * log_sigmoid(0.2)),
    "robust": ({"label_smoothing": 0.1}, (-0.9 * log_sigmoid(0.6) + 0.1 * log_sigmoid(-0.6)) / 0.8),
    "bco_pair": ({}, -log_sigmoid(0.4 - 0.25) - log_sigmoid(0.2 + 0.25)),  # δ = 0.25
    "sppo_hard": ({}, (1 - 1.25) ** 2 + (-0.5 + 1.25) ** 2),
    "aot": ({}, -log_sigmoid(0.6)),  # one pair: nothing to sort
    "aot_unpaired": ({}, -log_sigmoid(0.6)),
    "apo_zero": ({}, 1 - sig(0.4) + sig(-0.2)),
    "apo_down": ({}, sig(0.4) + 1 - sig(0.6)),
    "discopop": ({"discopop_tau": 0.5}, -log_sigmoid(0.6) * (1 - sig(1.2)) + math.exp(-0.6) * sig(1.2)),
    "sft": ({}, 7.0),
    "sigmoid_norm": ({}, -log_sigmoid(0.4 * 0.75)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_by_hand(name: str) -> None:
    options, expected = BY_HAND[name]
    pairs = Pairs(side(1.0), side(-0.5), chosen_nll=torch.tensor([7.0]), shift=0.25)
    entry = LossEntry(name, beta=None if name == "sft" else 0.4, **options)
    assert float(LOSSES[name](pairs, **entry.options)) == pytest.approx(expected, rel=1e-5)


def test_aot_compares_sorted_sides() -> None:
    """Margins 3 − 1 = 2 and 0 − 1 = −1, sorted −1, 2; the reference's 1 − 0 = 1 and 3 − 0 = 3. β 0.1: −0.2 and −0.1.
    Unpaired: chosen 3 − 1 = 2 and 0 − 3 = −3, sorted −3, 2; rejected 1 and 1: −0.4 and 0.1."""
    chosen, reference = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 3.0])
    one, none = torch.ones(2), torch.zeros(2)
    pairs = Pairs(Side(chosen, reference, chosen - reference, none), Side(one, none, one, none), none, 0.0)
    expected = torch.tensor([-log_sigmoid(-0.2), -log_sigmoid(-0.1)])
    torch.testing.assert_close(LOSSES["aot"](pairs, beta=0.1), expected)
    expected = torch.tensor([-log_sigmoid(-0.4), -log_sigmoid(0.1)])
    torch.testing.assert_close(LOSSES["aot_unpaired"](pairs, beta=0.1), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_makes_rejected_answers_likelier_without_a_reference(name: str) -> None:
    """Log-probs of whole answers far below 0, the gradient in them; but `sppo_hard` does, and is refused."""
    entry = LossEntry(name, label_smoothing=1e-3 if name == "exo_pair" else None)
    gradients = []
    for chosen, rejected in ((-30.0, -32.0), (-2.0, -40.0), (-300.0, -290.0)):
        sums = [torch.tensor([value], requires_grad=True) for value in (chosen, rejected)]
        sides = [Side(x, torch.zeros(1), x, x / 20) for x in sums]
        LOSSES[name](Pairs(sides[0], sides[1], -sums[0], 0.0), **entry.options).sum().backward()
        gradients.append([0.0 if x.grad is None else float(x.grad) for x in sums])
    if name == "sppo_hard":
        assert all(rejected < 0 for _, rejected in gradients)
        with pytest.raises(ConfigError, match="makes rejected answers likelier"):
            PreferenceLoss((LossEntry("sigmoid"), entry), reference=False)
        return
    assert all(rejected >= 0 for _, rejected in gradients)
    assert name == "apo_down" or all(chosen <= 0 for chosen, _ in gradients)  # that one lowers both on purpose


# --------------------------------------------------------------------------------------------------------- whole losses


def columns_of(pairs: int, dtype: torch.dtype = torch.float64, left: int = 0, right: int = 0) -> dict[str, Tensor]:
    """Rows of 2 to 9 tokens whose first ones carry no loss, padded as said besides what their lengths need."""
    generator = torch.Generator().manual_seed(3)
    width = 9
    lengths = torch.tensor([2 + (5 * row) % 8 for row in range(2 * pairs)])[:, None]
    places = torch.arange(width)[None]
    mask = ((places >= (lengths / 3).floor() + 1) & (places < lengths)).to(dtype)
    drawn = {
        name: torch.randn(2 * pairs, width, generator=generator, dtype=torch.float64).to(dtype)
        for name in ("logprobs", "reference_logprobs", "log_sum_sq_probs")
    }
    table = {"loss_mask": mask, **{name: -x.abs() * mask for name, x in drawn.items()}}
    return {name: torch.nn.functional.pad(x, (left, right)) for name, x in table.items()}


def run(loss: PreferenceLoss, table: dict[str, Tensor], sizes: list[int]) -> tuple[Tensor, Tensor, Metrics]:
    """Loss, gradient in the log-probs and metrics of one step, over micro-batches of so many rows."""
    logprobs = table["logprobs"].clone().requires_grad_()
    norm = loss.counts(table)
    parts, measured, start = [], [], 0
    for size in sizes:
        cut = slice(start, start + size)
        columns = {name: column[cut] for name, column in table.items()}
        value, metrics = loss({**columns, "logprobs": logprobs[cut]}, columns, norm=norm)
        parts.append(value)
        measured.append(metrics)
        start += size
    total = torch.stack(parts).sum()
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad, merge_metrics(measured)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", [name for name, loss in WHOLE.items() if not loss.whole_step])
def test_any_split_gives_one_gradient(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Four pairs, of which one has nothing to train on, as 8, 4 + 4 and 2 + 2 + 2 + 2 rows."""
    table = columns_of(4, dtype)
    table["loss_mask"][3] = 0
    value, gradient, metrics = run(WHOLE[name], table, [8])
    assert float(value) == pytest.approx(metrics["loss"].value, rel=1e-5)
    for sizes in ([4, 4], [2, 2, 2, 2], [2, 6]):
        other, other_gradient, merged = run(WHOLE[name], table, sizes)
        assert float(other) == pytest.approx(float(value), rel=tolerance)
        assert error(other_gradient, gradient) <= tolerance
        for key, metric in metrics.items():
            assert merged[key].value == pytest.approx(metric.value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"sppo_hard"}))
def test_without_a_reference_its_log_probs_are_0(name: str) -> None:
    table = columns_of(3)
    with_zeros = {**table, "reference_logprobs": torch.zeros_like(table["reference_logprobs"])}
    free = dataclasses.replace(WHOLE[name], reference=False)
    del table["reference_logprobs"]
    for found, expected in zip(run(free, table, [6]), run(WHOLE[name], with_zeros, [6]), strict=True):
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", WHOLE.values())
def test_what_it_measures_is_known_beforehand(loss: PreferenceLoss) -> None:
    assert loss.measures == list(run(loss, columns_of(2), [4])[2])


@pytest.mark.parametrize("name", WHOLE)
def test_padding_changes_nothing(name: str) -> None:
    value, gradient, _ = run(WHOLE[name], columns_of(4), [8])
    for left, right in ((0, 3), (3, 0), (2, 2)):
        padded, padded_gradient, _ = run(WHOLE[name], columns_of(4, left=left, right=right), [8])
        assert float(padded) == pytest.approx(float(value), rel=1e-12)
        assert error(padded_gradient[:, left : left + 9], gradient) <= 1e-10
        assert float(padded_gradient.abs().sum()) == pytest.approx(float(gradient.abs().sum()))


@pytest.mark.parametrize("empty_side", [0, 1])
@pytest.mark.parametrize("name", WHOLE)
def test_an_empty_side_drops_its_pair(name: str, empty_side: int) -> None:
    """E3, E4: the loss of four pairs of which the last is empty is that of the first three, not pulled to ln 2."""
    table = columns_of(4)
    table["loss_mask"][6 + empty_side] = 0
    table["logprobs"][6:] = -1e30  # what is there counts nothing, whatever it is
    value, gradient, metrics = run(WHOLE[name], table, [8])
    three, three_gradient, _ = run(WHOLE[name], {key: column[:6] for key, column in table.items()}, [6])
    assert float(value) == pytest.approx(float(three), rel=1e-12)
    assert error(gradient[:6], three_gradient) <= 1e-10
    assert not gradient[6:].any()
    assert metrics["skipped_pairs"].value == 1


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_to_train_on(name: str) -> None:
    table = columns_of(2)
    table["loss_mask"].zero_()
    value, gradient, metrics = run(WHOLE[name], table, [4])
    assert float(value) == 0
    assert not gradient.any()
    assert metrics["skipped_pairs"].value == 2
    assert all(metric.value == 0 for key, metric in metrics.items() if key != "skipped_pairs")
    assert not any(WHOLE[name].counts(table).values())  # so the engine skips the step


@pytest.mark.parametrize("name", WHOLE)
def test_far_apart_policies_stay_finite(name: str) -> None:
    """Log-ratios of ±2000 per token in float32. exp(−βh) alone is infinite there."""
    table = columns_of(2, torch.float32)
    table["reference_logprobs"] = 2000 * table["loss_mask"] * torch.tensor([1.0, -1.0]).repeat(2)[:, None]
    for sign in (1.0, -1.0):
        table["reference_logprobs"] *= sign
        value, gradient, _ = run(WHOLE[name], table, [4])
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


def hand_made() -> dict[str, Tensor]:
    """One pair: chosen tokens −1, −2, −3 after one prompt token, rejected −4 after two; reference −0.5 everywhere."""
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, 0.0, -4.0, 0.0]])
    return {"loss_mask": mask, "logprobs": logprobs, "reference_logprobs": torch.full((2, 4), -0.5)}


def measured(loss: PreferenceLoss, table: dict[str, Tensor]) -> dict[str, float]:
    return {name: metric.value for name, metric in run(loss, table, [2])[2].items()}


def test_metrics() -> None:
    """Δ chosen = −6 + 1.5 = −4.5, Δ rejected = −4 + 0.5 = −3.5; β 0.2: rewards −0.9 and −0.7, margin −0.2."""
    loss: Loss = PreferenceLoss((LossEntry("sigmoid", 2.0, beta=0.2), LossEntry("sft", 0.5)))
    assert loss.counts(hand_made()) == {"pairs": 1.0, "chosen_tokens": 3.0}
    found = measured(loss, hand_made())  # type: ignore[arg-type]
    assert found == pytest.approx(
        {
            "loss": -2 * log_sigmoid(-0.2) + 0.5 * 2,
            "loss/sigmoid": -log_sigmoid(-0.2),
            "loss/sft": 2.0,
            "rewards/chosen": -0.9,
            "rewards/rejected": -0.7,
            "rewards/accuracies": 0.0,
            "rewards/margins": -0.2,
            "logps/chosen": -6.0,
            "logps/rejected": -4.0,
            "num_tokens": 4.0,
            "skipped_pairs": 0.0,
        },
        rel=1e-5,
    )


def test_options_of_the_whole() -> None:
    """Averaged: Δ = −4.5 / 3 = −1.5 and −3.5. α = 0.5: chosen tokens 2 and 3 are beyond the rejected side's one, so
    Δ chosen = −0.5 − 0.5 · (1.5 + 2.5) = −2.5. Without a reference: −6 and −4."""
    entries = (LossEntry("sigmoid", beta=1.0),)
    for options, chosen, rejected in (
        ({"length_average": True}, -1.5, -3.5),
        ({"ld_alpha": 0.5}, -2.5, -3.5),
        ({"reference": False}, -6.0, -4.0),
    ):
        found = measured(PreferenceLoss(entries, **options), hand_made())  # type: ignore[arg-type]
        assert (found["rewards/chosen"], found["rewards/rejected"]) == pytest.approx((chosen, rejected))
    # No loss divides by the length twice.
    whole = [PreferenceLoss((LossEntry("sigmoid"), LossEntry("ipo")), length_average=on) for on in (False, True)]
    assert measured(whole[0], hand_made())["loss/ipo"] == measured(whole[1], hand_made())["loss/ipo"]


def test_wpo_weights_the_pair_without_gradient() -> None:
    """log Σ p² = −3 everywhere: means over tokens are (2 + 1 + 0) / 3 = 1 and −1, so the weight is e¹ · e⁻¹ = 1; with
    −2.5 on the rejected side's token it is e^(1 − 1.5). TRL cannot weight sft (its code raises); here the chosen side's
    NLL is weighted like every other loss of its pair."""
    table = {**hand_made(), "log_sum_sq_probs": torch.full((2, 4), -3.0)}
    plain = PreferenceLoss((LossEntry("sigmoid"), LossEntry("sft")))
    weighted = PreferenceLoss(plain.entries, wpo=True)
    value, gradient, _ = run(plain, table, [2])
    found = run(weighted, table, [2])
    torch.testing.assert_close((found[0], found[1]), (value, gradient))
    table["log_sum_sq_probs"][1, 2] = -2.5
    found = run(weighted, table, [2])
    torch.testing.assert_close((found[0], found[1]), (value * math.exp(-0.5), gradient * math.exp(-0.5)))
    assert (plain.outputs, weighted.outputs) == (("logprobs",), ("logprobs", "log_sum_sq_probs"))


def test_bco_shift() -> None:
    """β 0.2: rewards −0.9 and −0.7, their mean −0.8; δ = 0.5 goes to 0.99 · 0.5 − 0.01 · 0.8 = 0.487. The loss uses the
    δ from before: −logσ(−0.9 − 0.5) − logσ(0.7 + 0.5)."""
    loss = PreferenceLoss((LossEntry("bco_pair", beta=0.2),), shift=0.5)
    value, _, metrics = run(loss, hand_made(), [2])
    assert float(value) == pytest.approx(-log_sigmoid(-1.4) - log_sigmoid(1.2), rel=1e-5)
    assert next_shift(0.5, metrics) == pytest.approx(0.487)
    assert next_shift(0.5, {"bco/mean_reward": Metric(0.0, weight=0.0)}) == 0.5


def test_rewards_use_the_first_beta() -> None:
    assert PreferenceLoss((LossEntry("sft"), LossEntry("ipo", beta=0.7), LossEntry("sigmoid"))).reward_beta == 0.7
    assert PreferenceLoss((LossEntry("sft"),)).reward_beta == 0.1


def test_rows_without_a_partner() -> None:
    with pytest.raises(ValueError, match="pairs, the chosen one first; found 3 rows"):
        WHOLE["sigmoid"].counts({"loss_mask": torch.ones(3, 2)})


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", LOSSES)
def test_label_smoothing_is_read_or_refused(name: str) -> None:
    """E7: it changes the loss, or the error names entry and option. What lies outside [0, 0.5) is refused."""
    reads = {"sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"}
    if name in reads:
        values = {
            smoothing: float(run(PreferenceLoss((LossEntry(name, label_smoothing=smoothing),)), columns_of(2), [4])[0])
            for smoothing in (0.1, 0.2)
        }
        assert values[0.1] != values[0.2]
    else:
        with pytest.raises(ConfigError, match=rf"losses\[0\] \({name}\): this loss ignores label_smoothing"):
            PreferenceLoss((LossEntry(name, label_smoothing=0.1),))
    for outside in (0.5, 0.7, -0.1, math.nan):
        with pytest.raises(ConfigError, match=rf"{name}.*label_smoothing"):
            PreferenceLoss((LossEntry(name, label_smoothing=outside),))


OTHER: dict[str, Any] = {
    "none": ((), {}, "at least one loss"),
    "unknown": (
        (LossEntry("sigmoids"),),
        {},
        r"losses\[0\]: there is no loss 'sigmoids'; expected one of sigmoid, hinge",
    ),
    "beta 0": (
        (LossEntry("sft"), LossEntry("ipo", beta=0.0)),
        {},
        r"losses\[1\] \(ipo\): beta must be above 0, found 0",
    ),
    "beta negative": ((LossEntry("sigmoid", beta=-0.1),), {}, "beta must be above 0, found -0.1"),
    "beta infinite": ((LossEntry("sigmoid", beta=math.inf),), {}, "beta must be above 0, found inf"),
    "beta of sft": ((LossEntry("sft", beta=0.1),), {}, "this loss ignores beta, it reads no option"),
    "tau": ((LossEntry("hinge", discopop_tau=0.1),), {}, "ignores discopop_tau, it reads beta"),
    "tau 0": ((LossEntry("discopop", discopop_tau=0.0),), {}, "discopop_tau must be above 0"),
    "weight": ((LossEntry("hinge", weight=0.0),), {}, "weight must be above 0"),
    "exo without": ((LossEntry("exo_pair"),), {}, "label_smoothing must be above 0"),
    "exo with 0": ((LossEntry("exo_pair", label_smoothing=0.0),), {}, "label_smoothing must be above 0"),
    "twice": ((LossEntry("ipo"), LossEntry("ipo", beta=0.3)), {}, r"losses\[1\]: ipo is there twice"),
    "alpha": ((LossEntry("ipo"),), {"ld_alpha": 1.5}, r"ld_alpha must lie in \[0, 1\], found 1.5"),
    "alpha unread": ((LossEntry("sft"),), {"ld_alpha": 0.5}, "ld_alpha: sft ignores it"),
    "average unread": ((LossEntry("ipo"), LossEntry("sft")), {"length_average": True}, "per token by themselves"),
    "shift unread": ((LossEntry("ipo"),), {"shift": 0.5}, "shift: only bco_pair reads it"),
    "wpo sorted": ((LossEntry("aot"),), {"wpo": True}, "wpo weights pairs, but aot"),
}


@pytest.mark.parametrize("case", OTHER)
def test_refused(case: str) -> None:
    entries, options, message = OTHER[case]
    with pytest.raises(ConfigError, match=message):
        PreferenceLoss(entries, **options)
