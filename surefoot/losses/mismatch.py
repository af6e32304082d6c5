"""Corrections for a generator whose log-probs are not the trainer's: weights exp(o − g) for the policy-gradient term.

o is a token's log-prob under the policy that should have sampled it, as the trainer computes it; g is the one that the
generator sampled it with. All tensors are [rows, tokens]; `gap` is o − g, 0 where the mask is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

TRUNCATIONS = ("tis", "icepop", "seq-mask-tis")


@dataclass(frozen=True, slots=True)
class Weights:
    """All [rows, tokens].

    Attributes:
        raw: exp(o − g) as it comes, NaN and infinity included.
        used: what the loss is multiplied by.
        outside: where the bounds changed a weight or dropped the token; all False without bounds.
    """

    raw: Tensor
    used: Tensor
    outside: Tensor


def importance_weights(
    gap: Tensor,
    mask: Tensor,
    *,
    level: str | None,
    truncation: str | None = None,
    low: float = 0.0,
    high: float = float("inf"),
) -> Weights:
    """The weights without gradient. One that is NaN or infinite becomes 0: nothing is known about its token.

    Args:
        level: "token"; "sequence": one weight for all of a row's tokens, of the sum of its gaps; `None`: measured token
            by token, and 1 where used.
        truncation: "tis": clamped to [low, high] (truncated importance sampling). "icepop": 0 outside (IcePop).
            "seq-mask-tis": 0 for whole rows whose exp(mean of the gaps) lies outside.
    """
    gap = gap.detach()
    raw = (gap.sum(1, keepdim=True).expand_as(gap) if level == "sequence" else gap).exp()
    if level is None:
        return Weights(raw, torch.ones_like(raw), torch.zeros_like(mask))
    measured = raw
    if truncation == "seq-mask-tis":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        measured = (gap.sum(1, keepdim=True) / lengths).exp().expand_as(gap)
    inside = (measured >= low) & (measured <= high)
    used = raw.clamp(low, high) if truncation == "tis" else torch.where(inside, raw, 0.0)
    return Weights(raw, torch.where(raw.isfinite(), used, 0.0), mask & ~inside & raw.isfinite())
