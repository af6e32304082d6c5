"""The fifteen losses of direct preference optimisation: from two sides of each pair to one number per pair.

A side's log-ratio is Δ = Σ mask · (log-prob under the policy − under the reference), and h = Δ chosen − Δ rejected.
The keyword arguments of a loss are the options that its entry in a configuration may set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from torch import Tensor

BETA = 0.1


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the step's pairs; each [pairs].

    Attributes:
        logprobs: summed under the policy, after the whole loss's `ld_alpha` and `length_average`; so is `reference`.
        ratios: Δ, the difference of the two.
        mean_ratios: Δ per token, also where `ratios` are sums.
    """

    logprobs: Tensor
    reference: Tensor
    ratios: Tensor
    mean_ratios: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the losses read. `chosen_nll` [pairs] is Σ −log-prob of the chosen side; `shift` is BCO's δ."""

    chosen: Side
    rejected: Side
    chosen_nll: Tensor
    shift: float

    @property
    def h(self) -> Tensor:
        return self.chosen.ratios - self.rejected.ratios


def sigmoid(pairs: Pairs, *, beta: float = BETA, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv:2305.18290, eq. 7); with label smoothing conservative DPO."""
    return _smoothed(beta * pairs.h, label_smoothing)


def hinge(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """SLiC on log-ratios (arXiv:2309.06657)."""
    return torch.relu(1 - beta * pairs.h)


def ipo(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """IPO (arXiv:2310.12036, eq. 17), on log-ratios per token."""
    return (pairs.chosen.mean_ratios - pairs.rejected.mean_ratios - 1 / (2 * beta)) ** 2


def exo_pair(pairs: Pairs, *, beta: float = BETA, label_smoothing: float = 0.0) -> Tensor:
    """EXO (arXiv:2402.00856, eq. 16): the reverse KL from (σ(βh), σ(−βh)) to (1 − ε, ε)."""
    x = beta * pairs.h
    wins = x.sigmoid() * (logsigmoid(x) - math.log1p(-label_smoothing))
    return wins + (-x).sigmoid() * (logsigmoid(-x) - math.log(label_smoothing))


def nca_pair(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """NCA for pairs (arXiv:2402.05369)."""
    chosen, rejected = beta * pairs.chosen.ratios, beta * pairs.rejected.ratios
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def robust(pairs: Pairs, *, beta: float = BETA, label_smoothing: float = 0.0) -> Tensor:
    """Robust DPO (arXiv:2403.00409): unbiased under labels that are flipped with probability ε."""
    x = beta * pairs.h
    kept, flipped = (1 - label_smoothing) * logsigmoid(x), label_smoothing * logsigmoid(-x)
    return (flipped - kept) / (1 - 2 * label_smoothing)


def bco_pair(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """BCO (arXiv:2404.04656): each side classified by its own reward, less the running shift δ."""
    chosen, rejected = beta * pairs.chosen.ratios, beta * pairs.rejected.ratios
    return -logsigmoid(chosen - pairs.shift) - logsigmoid(pairs.shift - rejected)


def sppo_hard(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """SPPO (arXiv:2405.00675) where the chosen side wins for certain."""
    half = 1 / (2 * beta)
    return (pairs.chosen.ratios - half) ** 2 + (pairs.rejected.ratios + half) ** 2


def aot(pairs: Pairs, *, beta: float = BETA, label_smoothing: float = 0.0) -> Tensor:
    """AOT, paired (arXiv:2406.05882): the policy's margins, sorted, against the reference's, sorted."""
    margins = (pairs.chosen.logprobs - pairs.rejected.logprobs).sort().values
    reference = (pairs.chosen.reference - pairs.rejected.reference).sort().values
    return _smoothed(beta * (margins - reference), label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float = BETA, label_smoothing: float = 0.0) -> Tensor:
    """AOT, unpaired (arXiv:2406.05882): the chosen log-ratios, sorted, against the rejected ones, sorted."""
    margins = pairs.chosen.ratios.sort().values - pairs.rejected.ratios.sort().values
    return _smoothed(beta * margins, label_smoothing)


def apo_zero(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """APO (arXiv:2408.06266, eq. 7), for chosen answers better than the model's: chosen up, rejected down."""
    return (-beta * pairs.chosen.ratios).sigmoid() + (beta * pairs.rejected.ratios).sigmoid()


def apo_down(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """APO (arXiv:2408.06266, eq. 8), for chosen answers worse than the model's: both down, rejected more."""
    return (beta * pairs.chosen.ratios).sigmoid() + (-beta * pairs.h).sigmoid()


def discopop(pairs: Pairs, *, beta: float = BETA, discopop_tau: float = 0.05) -> Tensor:
    """DiscoPOP (arXiv:2406.08414, eq. 5): logistic and exponential loss, blended by σ(βh/τ)."""
    x = beta * pairs.h
    blend = x / discopop_tau
    # exp(−x) · σ(x/τ) as one exponential: apart, the first overflows where the second is 0.
    return -logsigmoid(x) * (-blend).sigmoid() + (logsigmoid(blend) - x).exp()


def sft(pairs: Pairs) -> Tensor:
    """The chosen side's negative log-likelihood; its mean is over tokens, not pairs."""
    return pairs.chosen_nll


def sigmoid_norm(pairs: Pairs, *, beta: float = BETA) -> Tensor:
    """DPO on log-ratios per token."""
    return -logsigmoid(beta * (pairs.chosen.mean_ratios - pairs.rejected.mean_ratios))


def _smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


_ALL: tuple[Callable[..., Tensor], ...] = (
    *(sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired),
    *(apo_zero, apo_down, discopop, sft, sigmoid_norm),
)
LOSSES: Mapping[str, Callable[..., Tensor]] = {loss.__name__: loss for loss in _ALL}
