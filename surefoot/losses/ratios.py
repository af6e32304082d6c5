"""Importance ratios, and the policy-gradient losses made of them.

All tensors are [rows, tokens] and 0 where the mask is. Log-ratios are clamped before exp, so that no value overflows
and no gradient is NaN. The keyword arguments of a loss are the options that a configuration may set for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from surefoot.losses.kl import LOG_LIMIT

if TYPE_CHECKING:
    from torch import Tensor


def token_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """exp(l − o): how much likelier each token is than when it was sampled."""
    return (logprobs - old).clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def sequence_ratio(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """GSPO-token (arXiv:2507.18071, section 4.3): every token of a row has the value exp(mean over the row of l − o),
    and the gradient that its own ratio would have at that value."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    means = (logprobs - old).detach().sum(1, keepdim=True) / lengths
    return means.clamp(-LOG_LIMIT, LOG_LIMIT).exp() * (logprobs - logprobs.detach()).exp()


def clip(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    ratio_clip_min: float = 0.2,
    ratio_clip_max: float = 0.2,
    ratio_clip_c: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347); DAPO's clip-higher is a larger `ratio_clip_max` (arXiv:2503.14476).

    Args:
        ratio_clip_min, ratio_clip_max: the ratio counts from 1 − min to 1 + max.
        ratio_clip_c: dual clip (arXiv:1912.09729): where A < 0 the loss is at most −A · c.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - ratio_clip_min, 1 + ratio_clip_max))
    if ratio_clip_c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * ratio_clip_c), loss)


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, ratio_clip_max: float = 5.0) -> Tensor:
    """CISPO (arXiv:2506.13585): REINFORCE weighted by the ratio, which is capped at `ratio_clip_max` itself and has no
    gradient, so that no token drops out."""
    return -advantages * ratio.detach().clamp(max=ratio_clip_max) * logprobs


def sapo(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Tensor:
    """SAPO (arXiv:2511.20347): a soft gate 4/τ · σ(τ(ρ − 1)) in place of the clip, τ by the sign of the advantage."""
    tau = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -advantages * (tau * (ratio - 1)).sigmoid() * 4 / tau


def reinforce(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A · l, whatever the ratio (REINFORCE; RLOO by its advantages, arXiv:2402.14740)."""
    return -advantages * logprobs


_ALL: tuple[Callable[..., Tensor], ...] = (clip, cispo, sapo, reinforce)
LOSSES: Mapping[str, Callable[..., Tensor]] = {loss.__name__: loss for loss in _ALL}
