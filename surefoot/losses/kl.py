"""Estimators of the divergence between the policy and a reference, from the log-probs of sampled tokens.

With x = the policy's log-prob − the reference's: k1 = x, k2 = x²/2, k3 = exp(−x) − 1 + x
(http://joschu.net/blog/kl-approx.html). Which divergence a loss term pulls along is told by its gradient on samples of
the policy, not by its value: k1 by itself has none in expectation, k3 by itself has that of KL(reference‖policy). So
each estimator here is a value and, next to it, the factor of ∇log-prob in its gradient, written out. Both stay finite
and keep their sign however far x is out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

    _Pair: TypeAlias = tuple[Tensor, Tensor]

LOG_LIMIT = 20.0  # what is put into exp is clamped to this: e^20 is 4.9e8


def kl_penalty(logprobs: Tensor, reference: Tensor, ratio: Tensor, kind: str) -> Tensor:
    """One number per token, with a gradient in `logprobs`.

    Over tokens sampled by whatever `ratio` is the importance ratio against, the expected gradient is that of
    KL(policy‖reference) for `k1`, `k2` and `k3`. `k3_plain` leaves the ratio out: on the policy's own samples it has
    the gradient of KL(reference‖policy), and is what TRL computes by default. `k2` and `k3` have one and the same
    gradient and differ in the value; k1's varies more.

    Args:
        logprobs, reference: of the sampled tokens, any shape, alike.
        ratio: exp(log-prob − that at sampling), of which only the value is used; 1 on the policy's own samples.
    """
    detached = logprobs.detach()
    value, factor = _ESTIMATORS[kind](detached - reference, ratio.detach())
    return value + factor * (logprobs - detached)


def kl_values(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """The estimator's value for each token, for a penalty in the reward."""
    return _ESTIMATORS[kind](logprobs - reference, torch.ones_like(logprobs))[0]


def adapted_coefficient(coefficient: float, kl: float, *, target: float, step: float) -> float:
    """The next KL coefficient of a controller that steers the KL measured to `target`: β · (1 + step · e) with e =
    KL / target − 1 between −0.2 and 0.2 (arXiv:1909.08593, section 2.2).

    >>> adapted_coefficient(0.1, 0.022, target=0.02, step=0.5)
    0.105
    """
    return coefficient * (1 + step * min(max(kl / target - 1, -0.2), 0.2))


def _k1(x: Tensor, ratio: Tensor) -> _Pair:
    return ratio * x, ratio * (x + 1)


def _k2(x: Tensor, ratio: Tensor) -> _Pair:
    return ratio * x**2 / 2, ratio * x


def _k3(x: Tensor, ratio: Tensor) -> _Pair:
    # The gradient of ratio · k3 is ratio · (k3 + 1 − exp(−x)) = ratio · x: two numbers of size exp(−x) that cancel.
    return ratio * _k3_plain(x, ratio)[0], ratio * x


def _k3_plain(x: Tensor, ratio: Tensor) -> _Pair:
    d = (-x).clamp(max=LOG_LIMIT)
    return d.expm1() - d, -d.expm1()  # not exp − 1: rounding would make it negative near 0


_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], _Pair]] = {"k1": _k1, "k2": _k2, "k3": _k3, "k3_plain": _k3_plain}
KINDS = tuple(_ESTIMATORS)
