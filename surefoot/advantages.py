"""From rewards to advantages: pure functions, which also say what they could not use.

Rewards are [rows]. NaN is a reward function that abstained (`None`): such a row is in no mean and no deviation and has
advantage 0. Groups are told by their ids, never by their texts, and need not lie next to each other. What is per token
is [rows, tokens], padded on the right; its mask is 1 on the model's own tokens and 0 on prompts, on what an environment
said and on padding. Everything is computed in float64 and returned as it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from surefoot.errors import ConfigError
from surefoot.types import Metric

if TYPE_CHECKING:
    from torch import Tensor

Scale: TypeAlias = Literal["group", "batch", "none"]

EPSILON = 1e-6
# Sums in float32 leave equal rewards different in their last bits. A deviation below this part of the largest value is
# such a rest: nothing is divided by it.
ROUNDING = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Counts:
    """What advantages were made of.

    Attributes:
        zero_variance_groups: with two rewards or more, all of them equal: nothing is learned from such a group.
        abstained_rows: without a reward.
        lone_rows: rows that are the only ones of their group with a reward. Where others are what a row is measured
            against, its advantage is 0.
    """

    groups: int
    zero_variance_groups: int
    abstained_rows: int
    lone_rows: int

    @property
    def metrics(self) -> dict[str, Metric]:
        """`zero_variance_groups` as a fraction of the groups, and the numbers of rows."""
        fraction = self.zero_variance_groups / self.groups if self.groups else 0.0
        return {
            "zero_variance_groups": Metric(fraction, weight=float(self.groups)),
            "abstained_rows": Metric(float(self.abstained_rows), reduce="sum"),
            "lone_rows": Metric(float(self.lone_rows), reduce="sum"),
        }


# -------------------------------------------------------------------------------------------------- one number per row


def group_advantages(
    rewards: Tensor, groups: Sequence[str], *, leave_one_out: bool = False, scale: Scale = "group"
) -> tuple[Tensor, Counts]:
    """GRPO (arXiv:2402.03300): (R − mean) / (σ + 1e-6) within the group [rows].

    Args:
        leave_one_out: the mean is that of the group's other rows (RLOO, arXiv:2402.14740). σ stays that of all of them:
            without the lone success of [1, 0, 0, 0] it would be 0.
        scale: σ of the group, of all rewards of the batch, or none (Dr. GRPO, arXiv:2503.20783). A σ at rounding level
            scales nothing.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), ["a"] * 4)[0]
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    wide, index = _checked(rewards, groups), _index(groups)
    count, mean, sigma = (found[index] for found in _moments(wide, index))
    result = (wide - mean).masked_fill(wide.isnan(), 0.0)  # a lone row's is 0 too
    if leave_one_out:
        result = result * count / (count - 1).clamp(min=1)
    if scale != "none":
        sigma = sigma if scale == "group" else _moments(wide, torch.zeros_like(index))[2][0]
        result = torch.where(sigma > 0, result / (sigma + EPSILON), result)
    return result.to(rewards.dtype), _counts([wide], index)


def gdpo(
    rewards: Mapping[str, Tensor],
    groups: Sequence[str],
    weights: Mapping[str, float],
    *,
    leave_one_out: bool = False,
    scale: Scale = "group",
) -> tuple[Tensor, Counts]:
    """GDPO (arXiv:2601.05242): the group advantages of each reward by itself, weighted, summed, and divided by the
    standard deviation of that over the batch [rows]; their mean is 0 already. No reward is drowned by one that spreads
    more.

    Args:
        rewards, weights: by the reward functions' names. Where one abstained, its part is 0.

    Returns:
        Advantages and counts. A group has zero variance when no reward varies in it, a row has abstained when all
        functions have.

    Raises:
        ValueError: the two name different functions.
    """
    if not rewards or rewards.keys() != weights.keys():
        raise ValueError(f"expected one weight for each reward, found rewards {[*rewards]} and weights {[*weights]}")
    wide = {name: _checked(values, groups) for name, values in rewards.items()}
    total = torch.zeros(len(groups), dtype=torch.float64)
    for name, values in wide.items():
        total += weights[name] * group_advantages(values, groups, leave_one_out=leave_one_out, scale=scale)[0]
    given = torch.stack([~values.isnan() for values in wide.values()]).any(0)
    sigma = deviation(total[given])
    total = total / (sigma + EPSILON) if sigma else total
    return total.to(next(iter(rewards.values())).dtype), _counts([*wide.values()], _index(groups))


def raw_advantages(rewards: Tensor) -> Tensor:
    """The rewards themselves [rows], 0 where all functions abstained."""
    return rewards.nan_to_num(nan=0.0)


def deviation(values: Tensor) -> float:
    """The sample standard deviation of what is not NaN; 0.0 for fewer than two values, and at rounding level. A group
    is worth training on when that of its raw rewards is not 0."""
    return float(_moments(values.double(), torch.zeros(len(values), dtype=torch.long))[2].sum())


# ------------------------------------------------------------------------------------------------ one number per token


def per_token(advantages: Tensor, loss_mask: Sequence[Tensor]) -> list[Tensor]:
    """A row's advantage [rows] on each of its own tokens, as a column."""
    return [advantage * (mask != 0) for advantage, mask in zip(advantages, loss_mask, strict=True)]


def padded(column: Sequence[Tensor]) -> Tensor:
    """A column as [rows, tokens], zeros on the right."""
    return pad_sequence(list(column), batch_first=True)


def unpadded(values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The reverse of `padded`."""
    return [row[:length].clone() for row, length in zip(values, lengths, strict=True)]


def at_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """What stands at each row's last own token [rows], 0 in rows without one."""
    return torch.where(_last(mask != 0), values, 0.0).sum(1)


def reinforce_plus_plus(
    rewards: Tensor,
    groups: Sequence[str],
    mask: Tensor,
    *,
    minus_baseline: bool = True,
    penalties: Tensor | None = None,
) -> tuple[Tensor, Counts]:
    """REINFORCE++ (arXiv:2501.03262): the reward at a row's last own token, less each token's penalty, summed from
    every token to the end, whitened over all tokens of the batch [rows, tokens].

    Args:
        minus_baseline: the group's mean is taken off the rewards; lone rows are then left out, as abstained ones are.
        penalties: β · KL of each token, from `losses.kl.kl_values`.
    """
    wide, index = _checked(rewards, groups), _index(groups)
    used, counts = ~wide.isnan(), _counts([wide], index)
    if minus_baseline:
        used &= ~_lone([wide], index)
        wide = group_advantages(wide, groups, scale="none")[0]
    own = (mask != 0) & used[:, None]
    summed = _token_rewards(wide, own, penalties).flip(1).cumsum(1).flip(1)
    return whiten(summed, own).to(rewards.dtype), counts


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gae_gamma: float = 1.0,
    gae_lambda: float = 0.95,
    gae_lambda_value: float | None = None,
    gae_lambda_policy: float | None = None,
    length_adaptive_alpha: float = 0.0,
    penalties: Tensor | None = None,
    final_values: Tensor | None = None,
    normalize_advantages: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438) over the model's own tokens.

    The reward stands at a row's last own token, less each token's penalty. Tokens that are not the model's are no step:
    from the last own token before a tool's answer the next state is the first own token after it.

    Args:
        values: of the state in which each token was chosen, `losses.value.state_values`.
        gae_lambda_value, gae_lambda_policy: λ of the returns and of the advantages, where it is not `gae_lambda` (VAPO,
            arXiv:2504.05118).
        length_adaptive_alpha: α; the advantages' λ is max(0, 1 − 1 / (α · own tokens)) row by row (VAPO). 0: off.
        penalties: β · KL of each token, from `losses.kl.kl_values`.
        final_values: [rows], the value of what came after the last own token, for responses that were cut off; 0 for
            those that ended. `None`: all ended.
        normalize_advantages: whiten the advantages, not the returns.

    Returns:
        Advantages and returns = advantages (with the returns' λ) + values, both [rows, tokens] and 0 outside the mask.
        In rows that abstained advantages are 0 and returns are the values, so that neither model is pulled anywhere.

    Raises:
        ConfigError: `length_adaptive_alpha` and `gae_lambda_policy` are both set.
    """
    if length_adaptive_alpha and gae_lambda_policy is not None:
        raise ConfigError("length_adaptive_alpha and gae_lambda_policy both set the advantages' λ: remove one")
    wide, given = values.double(), ~rewards.isnan()
    own = (mask != 0) & given[:, None]
    at_tokens = _token_rewards(rewards.double(), own, penalties)
    last = torch.zeros(len(wide), dtype=torch.float64) if final_values is None else final_values.double()

    value_lambda = gae_lambda if gae_lambda_value is None else gae_lambda_value
    policy_lambda: Tensor | float = gae_lambda if gae_lambda_policy is None else gae_lambda_policy
    if length_adaptive_alpha:
        policy_lambda = (1 - 1 / (length_adaptive_alpha * own.sum(1).double().clamp(min=1))).clamp(min=0)
    advantages, for_returns = (
        _accumulated(at_tokens, wide, own, gae_gamma, decay, last) for decay in (policy_lambda, value_lambda)
    )
    returns = for_returns + wide
    if normalize_advantages:
        advantages = whiten(advantages, own)
    return advantages.to(values.dtype), (returns * (mask != 0)).to(values.dtype)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / √(σ² + 1e-8) over the mask, 0 outside. Values that are equal, or a single one, become 0."""
    own = mask != 0
    chosen = values[own].double()
    if not len(chosen):
        return torch.zeros_like(values)
    sigma = deviation(chosen)
    whitened = torch.zeros_like(values, dtype=torch.float64)
    whitened[own] = (chosen - chosen.mean()) / ((sigma**2 + 1e-8) ** 0.5 if sigma else 1.0)
    return whitened.to(values.dtype)


def _token_rewards(rewards: Tensor, own: Tensor, penalties: Tensor | None) -> Tensor:
    """Float64 [rows, tokens]: each row's reward at its last own token, less the penalties; 0 outside."""
    at_tokens = torch.where(_last(own), rewards[:, None], 0.0)
    return at_tokens if penalties is None else at_tokens - penalties.double().masked_fill(~own, 0.0)


def _last(own: Tensor) -> Tensor:
    """Where each row's last own token is [rows, tokens]."""
    return own & (own.flip(1).cumsum(1).flip(1) == 1)


def _accumulated(
    rewards: Tensor, values: Tensor, own: Tensor, gamma: float, decay: Tensor | float, final_values: Tensor
) -> Tensor:
    """A = δ + γλ · A', δ = r + γV' − V, where ' is the row's next own token. `decay` is λ, or [rows]."""
    order = own.long().argsort(dim=1, descending=True, stable=True)  # the own tokens first
    lengths = own.sum(1)
    kept = torch.arange(own.shape[1]) < lengths[:, None]
    rewards, values = rewards.gather(1, order), values.gather(1, order).masked_fill(~kept, 0.0)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    following += torch.nn.functional.one_hot((lengths - 1).clamp(min=0), own.shape[1]) * final_values[:, None]
    found = (rewards + gamma * following - values).masked_fill(~kept, 0.0).t().contiguous()  # [tokens, rows]
    for t in reversed(range(int(lengths.max()) - 1)):
        found[t].add_(gamma * decay * found[t + 1])
    return torch.zeros_like(values).scatter_(1, order, found.t())


# ----------------------------------------------------------------------------------------- edits of rewards, advantages


def scale_rewards(
    rewards: Tensor, *, source_min: float, source_max: float, target_min: float, target_max: float
) -> Tensor:
    """Linear from [source_min, source_max] to [target_min, target_max]; what lies outside is clamped first.

    Raises:
        ConfigError: a range is empty.
    """
    if not (source_min < source_max and target_min < target_max):
        raise ConfigError(
            f"expected source_min < source_max and target_min < target_max, found {source_min}, {source_max} and "
            f"{target_min}, {target_max}"
        )
    part = (rewards.clamp(source_min, source_max) - source_min) / (source_max - source_min)
    return target_min + part * (target_max - target_min)


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, overlong_buffer_length: int, overlong_buffer_penalty: float
) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), to be added to rewards [rows]: 0 for responses that
    end before the buffer in front of `max_response_length` tokens, falling to −`overlong_buffer_penalty` at its end,
    and no lower beyond.

    Raises:
        ConfigError: the buffer is empty or longer than the response.
    """
    if not 0 < overlong_buffer_length <= max_response_length:
        raise ConfigError(
            f"overlong_buffer_length must lie in (0, max_response_length], found {overlong_buffer_length} of "
            f"{max_response_length}"
        )
    over = lengths - (max_response_length - overlong_buffer_length)
    return -overlong_buffer_penalty * (over / overlong_buffer_length).clamp(0, 1)


def stop_penalty(truncated: Tensor, *, missing_eos_penalty: float) -> Tensor:
    """For responses that were cut off −`missing_eos_penalty`, to be added to rewards [rows]; else 0. It is no factor on
    the reward, which would raise a negative one."""
    return -missing_eos_penalty * (truncated != 0)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Between the bounds; `None`: no bound.

    Raises:
        ConfigError: the bounds do not enclose 0, so that clipping would turn an advantage's sign.
    """
    lower, upper = float("-inf") if low is None else low, float("inf") if high is None else high
    if not lower <= 0 <= upper:
        raise ConfigError(f"expected advantage_clip_low <= 0 <= advantage_clip_high, found {low} and {high}")
    return advantages.clamp(lower, upper)


# --------------------------------------------------------------------------------------------------------------- groups


def _checked(rewards: Tensor, groups: Sequence[str]) -> Tensor:
    """Raises `ValueError` when a reward is infinite, the rows are not those of the groups, or rewards are integers:
    advantages come back in the rewards' type."""
    if rewards.shape != (len(groups),) or not rewards.is_floating_point():
        found = f"shape {tuple(rewards.shape)}, {rewards.dtype}"
        raise ValueError(f"expected one real number for each of {len(groups)} rows, found {found}")
    if rewards.isinf().any():
        row = int(rewards.isinf().nonzero()[0])
        raise ValueError(f"the reward of row {row} (group {groups[row]}) is {float(rewards[row])}: it must be finite")
    return rewards.double()


def _index(groups: Sequence[str]) -> Tensor:
    """The number of each row's group [rows], counted from 0 in order of appearance."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return torch.tensor([numbers[group] for group in groups], dtype=torch.long)


def _moments(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, mean and `deviation` of each group's values that are not NaN; all [groups] and float64."""
    given = ~values.isnan()
    total = int(index.max()) + 1 if len(index) else 0

    def summed(of: Tensor) -> Tensor:
        return torch.zeros(total, dtype=torch.float64).index_add_(0, index, of.double().masked_fill(~given, 0.0))

    count = summed(given)
    mean = summed(values) / count.clamp(min=1)
    sigma = (summed((values - mean[index]) ** 2) / (count - 1).clamp(min=1)).sqrt()
    largest = torch.zeros_like(mean).scatter_reduce_(0, index, values.abs().nan_to_num(nan=0.0), "amax")
    return count, mean, torch.where(sigma > ROUNDING * largest, sigma, 0.0)


def _lone(columns: Sequence[Tensor], index: Tensor) -> Tensor:
    """[rows]: has a reward, and in no column is there another one in its group."""
    given = torch.stack([~column.isnan() for column in columns])
    accompanied = torch.stack([_moments(column, index)[0][index] > 1 for column in columns])
    return given.any(0) & ~(given & accompanied).any(0)


def _counts(columns: Sequence[Tensor], index: Tensor) -> Counts:
    moments = [_moments(column, index) for column in columns]
    several = torch.stack([count > 1 for count, _, _ in moments]).any(0)
    varied = torch.stack([sigma > 0 for _, _, sigma in moments]).any(0)
    abstained = torch.stack([column.isnan() for column in columns]).all(0)
    flat, lone = several & ~varied, _lone(columns, index)
    return Counts(len(several), int(flat.sum()), int(abstained.sum()), int(lone.sum()))
