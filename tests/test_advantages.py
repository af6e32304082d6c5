"""Advantages: the traps of groups and of missing rewards, GAE against a slow loop, edits of rewards."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.advantages import (
    Counts,
    Scale,
    clip_advantages,
    deviation,
    gae,
    gdpo,
    group_advantages,
    overlong_penalty,
    padded,
    per_token,
    raw_advantages,
    reinforce_plus_plus,
    scale_rewards,
    stop_penalty,
    unpadded,
    whiten,
)
from surefoot.errors import ConfigError

NAN = math.nan
SCALES: list[Scale] = ["group", "batch", "none"]


def of(*rewards: float, groups: str = "", **options: Any) -> tuple[list[float], Counts]:
    """Advantages of one group, or of groups named by the letters of `groups`."""
    found, counts = group_advantages(
        torch.tensor(rewards, dtype=torch.float32), list(groups or "a" * len(rewards)), **options
    )
    return found.tolist(), counts


# --------------------------------------------------------------------------------------------------------------- groups


def test_a_group_by_hand() -> None:
    """[1, 0, 0, 0]: mean ¼, σ = √((9/16 + 3/16) / 3) = ½."""
    assert of(1, 0, 0, 0)[0] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert of(1, 0, 0, 0, scale="none")[0] == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_with_a_lone_success() -> None:
    """F1: without the success the others' σ is 0, and dividing by ε made a million of it. σ is the group's: (1 − 0) / ½
    and (0 − ⅓) / ½, and the group is not one without variance."""
    found, counts = of(1, 0, 0, 0, leave_one_out=True)
    assert found == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3], abs=1e-5)
    assert counts == Counts(1, 0, 0, 0)
    assert of(1, 0, 0, 0, leave_one_out=True, scale="none")[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_almost_equal_rewards(leave_one_out: bool) -> None:
    """Seven of 0.35 and one of 0.95: σ = √(0.045)."""
    found, counts = of(*[0.35] * 7, 0.95, leave_one_out=leave_one_out)
    part = 8 / 7 if leave_one_out else 1
    assert found == pytest.approx([-0.075 / math.sqrt(0.045) * part] * 7 + [0.525 / math.sqrt(0.045) * part], abs=2e-5)
    assert counts.zero_variance_groups == 0


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.35, -1e-8, 1e6, 1 / 3])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards(reward: float, scale: Scale, leave_one_out: bool) -> None:
    found, counts = of(*[reward] * 7, scale=scale, leave_one_out=leave_one_out)
    assert found == [0.0] * 7
    assert counts == Counts(1, 1, 0, 0)
    assert counts.metrics["zero_variance_groups"].value == 1


@pytest.mark.parametrize("size", [1.0, 1e3, 1e-3])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_rewards_equal_but_for_rounding(size: float, leave_one_out: bool) -> None:
    """The same sum of weighted parts in several orders is not the same float32. Nothing is made of the last bits."""
    random = Random(1)
    parts = [random.uniform(0, size) for _ in range(12)]
    sums = []
    for _ in range(8):
        random.shuffle(parts)
        total = torch.tensor(0.0)
        for part in parts:
            total = total + part
        sums.append(float(total))
    assert len(set(sums)) > 1
    found, counts = of(*sums, leave_one_out=leave_one_out)
    assert max(map(abs, found)) < 1e-5 * size
    assert counts.zero_variance_groups == 1
    assert deviation(torch.tensor(sums)) == 0


def test_one_that_abstained() -> None:
    """F4: [1, None, 0, 1] is [1, 0, 1] and a row that learns nothing: mean ⅔, σ = √⅓."""
    found, counts = of(1, NAN, 0, 1)
    sigma = math.sqrt(1 / 3)
    assert found == pytest.approx([1 / 3 / sigma, 0, -2 / 3 / sigma, 1 / 3 / sigma], abs=1e-5)
    assert counts == Counts(1, 0, 1, 0)
    assert of(1, NAN, 0, 1, leave_one_out=True)[0] == pytest.approx([0.5 / sigma, 0, -1 / sigma, 0.5 / sigma], abs=1e-5)
    assert of(NAN, 1, 1, 0)[0] == pytest.approx([0, 1 / 3 / sigma, 1 / 3 / sigma, -2 / 3 / sigma], abs=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_nothing_to_compare_with(scale: Scale, leave_one_out: bool) -> None:
    """F3 and F4: all abstained, or one row is left, or the group had only one: 0, counted, never NaN."""
    options: dict[str, Any] = {"scale": scale, "leave_one_out": leave_one_out}
    assert of(NAN, NAN, NAN, NAN, **options) == ([0.0] * 4, Counts(1, 0, 4, 0))
    assert of(NAN, 5, NAN, NAN, **options) == ([0.0] * 4, Counts(1, 0, 3, 1))
    assert of(5, **options) == ([0.0], Counts(1, 0, 0, 1))
    assert of(5, 3, 4, groups="abc", **options) == ([0.0] * 3, Counts(3, 0, 0, 3))


def test_an_infinite_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"row 2 \(group b\) is -inf"):
        of(1, 0, -math.inf, groups="aab")
    with pytest.raises(ValueError, match=r"3 rows, found shape \(2,\)"):
        group_advantages(torch.ones(2), ["a", "a", "a"])
    with pytest.raises(ValueError, match=r"real number for each of 2 rows, found .* torch\.int64"):
        group_advantages(torch.tensor([1, 0]), ["a", "a"])


def test_groups_are_told_by_their_ids() -> None:
    """Two rows of the data set with the same text are two groups; they need not lie next to each other."""
    found, counts = of(1, 5, 0, 3, groups="abab", scale="none")
    assert found == [0.5, 1.0, -0.5, -1.0]
    assert counts == Counts(2, 0, 0, 0)


def test_scaling_by_the_batch() -> None:
    """σ of all rewards, [1, 0, 5, 3]: mean 9/4, √((25 + 81 + 121 + 9) / 48). A flat group has 0 as ever."""
    sigma = math.sqrt(236 / 48)
    found, _ = of(1, 0, 5, 3, groups="aabb", scale="batch")
    assert found == pytest.approx([0.5 / sigma, -0.5 / sigma, 1 / sigma, -1 / sigma], abs=1e-5)
    assert of(1, 1, 5, 3, NAN, groups="aabbb", scale="batch")[0][:2] == [0, 0]


def test_counts_and_their_metrics() -> None:
    _, counts = of(1, 1, 0, 1, NAN, NAN, 2, NAN, groups="aabbccdd")
    assert counts == Counts(groups=4, zero_variance_groups=1, abstained_rows=3, lone_rows=1)
    metrics = counts.metrics
    assert (metrics["zero_variance_groups"].value, metrics["zero_variance_groups"].weight) == (0.25, 4)
    assert (metrics["abstained_rows"].value, metrics["lone_rows"].value) == (3, 1)


def test_no_rows() -> None:
    found, counts = group_advantages(torch.zeros(0), [])
    assert (len(found), counts) == (0, Counts(0, 0, 0, 0))
    assert counts.metrics["zero_variance_groups"].weight == 0


# ----------------------------------------------------------------------------------------------------------------- gdpo


def test_gdpo_by_hand() -> None:
    """Right answers [1, 0, 0, 1] and, on another scale, lengths [0, 100, 0, 100]: each group advantage is ± √3/2. With
    weights 1 and ½ the sums are [½, −½, −3/2, 3/2] · √3/2, their mean is 0 and σ = √(5/3) · √3/2."""
    rewards = {"right": torch.tensor([1.0, 0, 0, 1]), "length": torch.tensor([0.0, 100, 0, 100])}
    found, counts = gdpo(rewards, ["a"] * 4, {"right": 1.0, "length": 0.5})
    unit = 1 / math.sqrt(5 / 3)
    assert found.tolist() == pytest.approx([0.5 * unit, -0.5 * unit, -1.5 * unit, 1.5 * unit], abs=1e-5)
    assert counts == Counts(1, 0, 0, 0)
    # The sum of the two, as one reward, hears the larger only: rows 1 and 2 are as good as rows 4 and 3.
    summed = group_advantages(rewards["right"] + 0.5 * rewards["length"], ["a"] * 4)[0]
    assert float(summed[0] - summed[2]) < 0.1


def test_gdpo_where_some_abstain() -> None:
    """Row 1 has no length, row 4 nothing; in group b nothing varies, and c's row is alone."""
    rewards = {
        "right": torch.tensor([1.0, 0, 0, NAN, 1, 1, 2]),
        "length": torch.tensor([NAN, 3, 1, NAN, 5, NAN, 7]),
    }
    found, counts = gdpo(rewards, list("aaaabbc"), {"right": 1.0, "length": 1.0})
    assert counts == Counts(groups=3, zero_variance_groups=1, abstained_rows=1, lone_rows=1)
    assert found[3:].tolist() == [0.0] * 4
    given = found[[0, 1, 2, 4, 5, 6]]
    assert float(given.mean()) == pytest.approx(0, abs=1e-6)
    assert float(given.std()) == pytest.approx(1, abs=1e-5)
    everywhere = {name: torch.full((4,), NAN) for name in rewards}
    assert gdpo(everywhere, ["a"] * 4, dict.fromkeys(rewards, 1.0)) == (pytest.approx([0.0] * 4), Counts(1, 0, 4, 0))


def test_gdpo_wants_a_weight_for_each() -> None:
    with pytest.raises(ValueError, match=r"rewards \['a'\] and weights \['b'\]"):
        gdpo({"a": torch.ones(2)}, ["g", "g"], {"b": 1.0})


# ------------------------------------------------------------------------------------------------------------ per token


def test_rows_to_tokens_and_back() -> None:
    masks = [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])]
    column = per_token(torch.tensor([2.0, 3.0, -1.0]), masks)
    assert [row.tolist() for row in column] == [[0, 2, 2], [0, 0], [-1, 0, -1, 0]]
    whole = padded(column)
    assert whole.tolist() == [[0, 2, 2, 0], [0, 0, 0, 0], [-1, 0, -1, 0]]
    assert [row.tolist() for row in unpadded(whole, [3, 2, 4])] == [row.tolist() for row in column]
    assert raw_advantages(torch.tensor([1.5, NAN, -2.0])).tolist() == [1.5, 0, -2]


def test_whitening() -> None:
    """[1, 3, 5] in the mask: mean 3, σ 2."""
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert whiten(torch.tensor([[1.0, 3.0, 99.0], [99.0, 5.0, NAN]]), mask).tolist() == [[-1, 0, 0], [0, 1, 0]]
    for equal in (torch.full((2, 3), 0.1), torch.full((2, 3), 1e6)):
        assert not whiten(equal, mask).any()
    assert not whiten(torch.ones(2, 3), torch.zeros(2, 3)).any()
    assert whiten(torch.tensor([[7.0]]), torch.ones(1, 1)).tolist() == [[0.0]]


def test_whitening_what_differs_by_rounding() -> None:
    values = torch.tensor([[1.0, 1.0 + 2**-23, 1.0, 1.0]])
    assert float(whiten(values, torch.ones(1, 4)).abs().max()) < 1e-6


def test_reinforce_plus_plus_by_hand() -> None:
    """Rewards 2 and 0 less their mean, ± 1, at the last own token; penalties 0.5 and 0.25 in the first row. To the end:
    [1 − 0.75, 1 − 0.25] and [−1]."""
    mask = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    penalties = torch.tensor([[9.0, 0.5, 9.0, 0.25], [9.0, 0.0, 9.0, 9.0]])
    found, counts = reinforce_plus_plus(torch.tensor([2.0, 0.0]), ["a", "a"], mask, penalties=penalties)
    cumulated = torch.tensor([0.25, 0.75, -1.0])
    expected = (cumulated - cumulated.mean()) / cumulated.std()
    torch.testing.assert_close(found[mask != 0], expected)
    assert not found[mask == 0].any()
    assert counts == Counts(1, 0, 0, 0)
    plain, _ = reinforce_plus_plus(torch.tensor([2.0, 0.0]), ["a", "a"], mask, minus_baseline=False)
    cumulated = torch.tensor([2.0, 2.0, 0.0])
    torch.testing.assert_close(plain[mask != 0], (cumulated - cumulated.mean()) / cumulated.std())


def test_reinforce_plus_plus_without_some_rewards() -> None:
    """An abstained row, and with the baseline a lone one, are in no mean and have 0 on every token."""
    mask = torch.ones(5, 3)
    rewards = torch.tensor([1.0, NAN, 0.0, 7.0, NAN])
    found, counts = reinforce_plus_plus(rewards, list("aaabb"), mask)
    assert counts == Counts(2, 0, 2, 1)
    assert not found[[1, 3, 4]].any()
    torch.testing.assert_close(found[[0, 2]], reinforce_plus_plus(rewards[[0, 2]], ["a", "a"], mask[:2])[0])
    without = reinforce_plus_plus(rewards, list("aaabb"), mask, minus_baseline=False)[0]
    assert without[3].all() and not without[[1, 4]].any()
    assert not reinforce_plus_plus(torch.full((5,), NAN), list("aaabb"), mask)[0].any()


# ------------------------------------------------------------------------------------------------------------------ gae


def slow(
    reward: float, values: list[float], own: list[bool], gamma: float, decay: float, penalties: list[float], last: float
) -> list[float]:
    """Σ over later own tokens of (γλ)^k · δ, as the definition has it, for one row."""
    tokens = [t for t, is_own in enumerate(own) if is_own]
    deltas = []
    for place, t in enumerate(tokens):
        end = place + 1 == len(tokens)
        following = last if end else values[tokens[place + 1]]
        deltas.append((reward if end else 0.0) - penalties[t] + gamma * following - values[t])
    found = [0.0] * len(own)
    for place, t in enumerate(tokens):
        found[t] = sum((gamma * decay) ** k * delta for k, delta in enumerate(deltas[place:]))
    return found


def episodes() -> dict[str, Tensor]:
    """Seven rows of up to nine tokens: prompts, tool answers between own tokens and after them, a row without any."""
    generator = torch.Generator().manual_seed(2)
    mask = (torch.rand(7, 9, generator=generator) > 0.4).float()
    mask[:, 0], mask[4] = 0, 0
    made = {name: torch.randn(7, 9, generator=generator, dtype=torch.float64) for name in ("values", "penalties")}
    rewards, last = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return {**made, "mask": mask, "rewards": rewards, "final_values": last}


@pytest.mark.parametrize(("gamma", "decay"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.8, 0.0)])
def test_gae_is_the_sum_of_its_definition(gamma: float, decay: float) -> None:
    data = episodes()
    rewards, values, mask = data["rewards"], data["values"], data["mask"]
    options: dict[str, Any] = {"gae_gamma": gamma, "gae_lambda": decay, "normalize_advantages": False}
    edits = {"penalties": data["penalties"], "final_values": data["final_values"]}
    for given in ({}, edits):
        advantages, returns = gae(rewards, values, mask, **options, **given)
        none = torch.zeros_like(values)
        rows = zip(
            *(rewards.tolist(), values.tolist(), (mask != 0).tolist(), given.get("penalties", none).tolist()),
            given.get("final_values", none[:, 0]).tolist(),
            strict=True,
        )
        expected = torch.tensor([slow(r, v, own, gamma, decay, p, last) for r, v, own, p, last in rows])
        torch.testing.assert_close(advantages, expected.double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(returns, (expected + values) * mask, rtol=1e-6, atol=1e-6)


def test_what_a_tool_said_is_no_step() -> None:
    """Cut out of the rows, the tokens between change nothing."""
    data = episodes()
    advantages, returns = gae(data["rewards"], data["values"], data["mask"], gae_gamma=0.9, gae_lambda=0.8)
    for noise in (50.0, -3.0):
        values = torch.where(data["mask"] != 0, data["values"], noise)
        other = gae(data["rewards"], values, data["mask"], gae_gamma=0.9, gae_lambda=0.8)
        assert torch.equal(other[0], advantages) and torch.equal(other[1], returns)
    row = data["mask"][0] != 0
    alone = {"gae_gamma": 0.9, "gae_lambda": 0.8, "normalize_advantages": False}
    whole = gae(data["rewards"][:1], data["values"][:1], data["mask"][:1], **alone)[1]
    cut = gae(data["rewards"][:1], data["values"][:1, row], torch.ones(1, int(row.sum())), **alone)[1]
    torch.testing.assert_close(whole[:, row], cut)


def test_the_two_lambdas() -> None:
    """Returns from λ_value, advantages from λ_policy; neither touches the other."""
    data = episodes()
    given = (data["rewards"], data["values"], data["mask"])

    def both(**options: float) -> tuple[Tensor, Tensor]:
        return gae(*given, **options)  # type: ignore[arg-type]

    apart = both(gae_lambda=0.5, gae_lambda_value=1.0, gae_lambda_policy=0.9)
    assert torch.equal(apart[0], both(gae_lambda=0.9)[0]) and torch.equal(apart[1], both(gae_lambda=1.0)[1])
    assert torch.equal(both(gae_lambda=0.5, gae_lambda_value=1.0)[0], both(gae_lambda=0.5)[0])
    assert torch.equal(both(gae_lambda=0.5, gae_lambda_policy=1.0)[1], both(gae_lambda=0.5)[1])


def test_lambda_by_length() -> None:
    """α = 0.4: λ = 1 − 1 / (0.4 · own tokens): below 0, so 0, for one and two tokens, 0.375 for four."""
    data = episodes()
    rewards, values = data["rewards"][:3], data["values"][:3, :4]
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    options = {"gae_lambda": 0.3, "normalize_advantages": False}
    found, returns = gae(rewards, values, mask, **options, length_adaptive_alpha=0.4)
    for row, decay in enumerate((0.0, 0.0, 0.375)):
        part = slice(row, row + 1)
        single = gae(rewards[part], values[part], mask[part], **{**options, "gae_lambda": decay})[0]
        torch.testing.assert_close(found[part], single)
    torch.testing.assert_close(returns, gae(rewards, values, mask, **options)[1])
    with pytest.raises(ConfigError, match="length_adaptive_alpha and gae_lambda_policy"):
        gae(rewards, values, mask, length_adaptive_alpha=0.5, gae_lambda_policy=0.9)


def test_gae_without_some_rewards() -> None:
    """A row that abstained pulls neither model, and the others' whitening does not know of it."""
    data = episodes()
    rewards = data["rewards"].clone()
    rewards[[1, 5]] = NAN
    kept = ~rewards.isnan()
    advantages, returns = gae(rewards, data["values"], data["mask"], penalties=data["penalties"])
    assert not advantages[~kept].any()
    torch.testing.assert_close(returns[~kept], (data["values"] * data["mask"])[~kept])
    others = gae(rewards[kept], data["values"][kept], data["mask"][kept], penalties=data["penalties"][kept])
    torch.testing.assert_close(advantages[kept], others[0])
    torch.testing.assert_close(returns[kept], others[1])
    nothing = gae(rewards, data["values"], torch.zeros(7, 9))
    assert not nothing[0].any() and not nothing[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_and_order_change_nothing(dtype: torch.dtype) -> None:
    data = {name: column.to(dtype) for name, column in episodes().items()}
    groups, order = list("aabbbcc"), torch.tensor([6, 2, 0, 3, 5, 1, 4])
    wide = {name: torch.nn.functional.pad(c, (0, 4)) if c.ndim == 2 else c for name, c in data.items()}

    def everything(of: dict[str, Tensor], names: list[str]) -> list[Tensor]:
        both = gae(of["rewards"], of["values"], of["mask"], penalties=of["penalties"], final_values=of["final_values"])
        plus = reinforce_plus_plus(of["rewards"], names, of["mask"], penalties=of["penalties"])[0]
        return [*both, plus, group_advantages(of["rewards"], names)[0][:, None]]

    plain = everything(data, groups)
    for found, expected in zip(everything(wide, groups), plain, strict=True):
        torch.testing.assert_close(found[:, : expected.shape[1]], expected)
        assert found.dtype == dtype
    turned = everything({name: c[order] for name, c in data.items()}, [groups[row] for row in order])
    for found, expected in zip(turned, plain, strict=True):
        torch.testing.assert_close(found, expected[order])


# ---------------------------------------------------------------------------------------------------------------- edits


def test_scaling_with_clamp() -> None:
    ranges = {"source_min": 0.0, "source_max": 2.0, "target_min": -1.0, "target_max": 1.0}
    found = scale_rewards(torch.tensor([0.0, 1.0, 2.0, 5.0, -3.0, 0.5, NAN]), **ranges)
    assert found[:-1].tolist() == [-1, 0, 1, 1, -1, -0.5]
    assert found[-1].isnan()
    with pytest.raises(ConfigError, match="source_min < source_max and target_min < target_max"):
        scale_rewards(torch.ones(1), **{**ranges, "source_max": 0.0})


def test_the_overlong_penalty_is_bounded() -> None:
    """100 tokens, the last 20 of them the buffer: from 80 on it falls to −2 at 100, and not below at 150."""
    options: dict[str, Any] = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_buffer_penalty": 2.0}
    found = overlong_penalty(torch.tensor([0, 80, 85, 90, 100, 150]), **options)
    assert found.tolist() == [0, 0, -0.5, -1, -2, -2]
    for length in (0, 101):
        with pytest.raises(ConfigError, match="overlong_buffer_length"):
            overlong_penalty(torch.tensor([1]), **{**options, "overlong_buffer_length": length})


def test_the_penalty_for_not_stopping() -> None:
    rewards = torch.tensor([1.0, -1.0, 1.0, NAN])
    found = rewards + stop_penalty(torch.tensor([0.0, 1.0, 1.0, 0.0]), missing_eos_penalty=0.5)
    assert found[:3].tolist() == [1, -1.5, 0.5]
    assert found[3].isnan()


def test_clipping_advantages() -> None:
    advantages = torch.tensor([-9.0, -1.0, 0.0, 9.0])
    assert clip_advantages(advantages, -2.0, 3.0).tolist() == [-2, -1, 0, 3]
    assert clip_advantages(advantages, None, 3.0).tolist() == [-9, -1, 0, 3]
    assert torch.equal(clip_advantages(advantages, None, None), advantages)
    with pytest.raises(ConfigError, match="advantage_clip_low <= 0 <= advantage_clip_high"):
        clip_advantages(advantages, 1.0, 2.0)
