"""Weights for a generator that is not the trainer: levels, bounds, numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.losses.mismatch import Weights, importance_weights

# Two rows; the last place of the second is not trained. exp: [2, 0.5, 4] and [0.9, 1.1].
WEIGHTS = torch.tensor([[2.0, 0.5, 4.0], [0.9, 1.1, 1.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
GAP = WEIGHTS.log()


def weights(gap: Tensor = GAP, level: str | None = "token", **options: object) -> Weights:
    return importance_weights(gap, MASK, level=level, **options)  # type: ignore[arg-type]


def close(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found[MASK], torch.tensor(expected)[MASK])


def test_levels() -> None:
    close(weights().used, WEIGHTS.tolist())
    close(weights(level="sequence").used, [[4.0] * 3, [0.99] * 3])  # 2 · 0.5 · 4 and 0.9 · 1.1
    close(weights(level=None).used, [[1.0] * 3] * 2)
    close(weights(level=None).raw, WEIGHTS.tolist())
    assert not weights().outside.any()


def test_bounds() -> None:
    tis = weights(truncation="tis", low=0.6, high=3.0)
    close(tis.used, [[2.0, 0.6, 3.0], [0.9, 1.1, 1.0]])
    assert tis.outside.tolist() == [[False, True, True], [False] * 3]
    icepop = weights(truncation="icepop", low=0.6, high=3.0)
    close(icepop.used, [[2.0, 0.0, 0.0], [0.9, 1.1, 1.0]])
    assert icepop.outside.tolist() == tis.outside.tolist()
    # exp of the means of the gaps: 4^(1/3) = 1.59 and 0.99^(1/2) = 0.995. What is kept keeps its own weights.
    mask = weights(truncation="seq-mask-tis", low=0.99, high=1.5)
    close(mask.used, [[0.0] * 3, [0.9, 1.1, 1.0]])
    assert mask.outside.tolist() == [[True] * 3, [False] * 3]
    close(weights(level="sequence", truncation="icepop", low=0.5, high=2.0).used, [[0.0] * 3, [0.99] * 3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1000.0])
@pytest.mark.parametrize("truncation", [None, "tis", "icepop", "seq-mask-tis"])
def test_what_is_not_finite_weighs_nothing(bad: float, truncation: str | None) -> None:
    """Also where a bound would have made an ordinary number of it."""
    gap = GAP.clone()
    gap[0, 1] = bad
    found = weights(gap, truncation=truncation, low=0.5, high=5.0)
    assert float(found.used[0, 1]) == 0
    assert found.used.isfinite().all()
    assert int((MASK & ~found.raw.isfinite()).sum()) == 1
    close(found.used[1:].repeat(2, 1), [[0.9, 1.1, 1.0]] * 2)
    whole = weights(gap, level="sequence")
    close(whole.used, [[0.0] * 3, [0.99] * 3])


def test_a_token_that_was_never_sampled_so() -> None:
    """A log-prob of −inf under the policy: the weight is 0, a number like others."""
    gap = GAP.clone()
    gap[0, 1] = -math.inf
    found = weights(gap)
    assert float(found.used[0, 1]) == 0 and found.raw.isfinite().all()


def test_no_gradient() -> None:
    gap = GAP.clone().requires_grad_()
    assert not weights(gap, truncation="tis", high=3.0).used.requires_grad
