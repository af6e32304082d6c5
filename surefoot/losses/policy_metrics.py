"""What a step of policy gradient logs. Every number merges over micro-batches to that of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surefoot.losses.mismatch import Weights
from surefoot.types import Metric, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Measured:
    """`total` is the rows' share of the loss; the others are [rows, tokens]. `gap` is o − g."""

    total: Tensor
    mask: Tensor
    ratio: Tensor
    advantages: Tensor
    gap: Tensor
    weights: Weights
    kl: Tensor | None
    entropy: Tensor | None


@torch.no_grad()
def policy_metrics(
    measured: Measured, loss_type: str, options: Mapping[str, Any], norm: float, own_units: float
) -> Metrics:
    """
    - `loss`: weighted by `own_units` of the step's `norm` tokens or sequences, so that shares merge to the step's loss.
    - `kl`, `entropy`: means over tokens; kl as it enters the loss, without β.
    - `ratio/min`, `/mean`, `/max`: of the ratio that the loss reads.
    - `clip_ratio/low`, `/high`, `/region`: fraction of tokens whose gradient the clip takes away, at its lower or upper
      bound, and both; with cispo `clip_ratio/high` alone, the fraction of tokens whose ratio is capped.
    - `generator_mismatch/mean`, `/max`: of |o − g|.
    - `importance_weight/min`, `/mean`, `/max`: of exp(o − g), before any bound; `/outside`: fraction of tokens whose
      weight a bound changed or dropped; `/non_finite`: number of weights that were NaN or infinite, which are in no
      other number.
    - `num_tokens`, `skipped_rows`: sums.

    Minima and maxima are absent where there is no token.
    """
    places = measured.mask.flatten().nonzero().squeeze(1)

    def own(values: Tensor) -> Tensor:
        return values.flatten()[places]

    raw, gap, ratio = own(measured.weights.raw), own(measured.gap).abs(), own(measured.ratio)
    known = raw.isfinite()
    means = {"kl": measured.kl, "entropy": measured.entropy, "importance_weight/outside": measured.weights.outside}
    return {
        "loss": Metric(float(measured.total) * norm / own_units if own_units else 0.0, weight=own_units),
        **{name: mean_of(own(values)) for name, values in means.items() if values is not None},
        **{
            name: mean_of(found)
            for name, found in _clipped(ratio, own(measured.advantages), loss_type, options).items()
        },
        **spread("ratio", ratio),
        **spread("importance_weight", raw[known]),
        "importance_weight/non_finite": Metric(float((~known).sum()), reduce="sum"),
        **{
            name: metric
            for name, metric in spread("generator_mismatch", gap[gap.isfinite()]).items()
            if "min" not in name
        },
        "num_tokens": Metric(float(len(places)), reduce="sum"),
        "skipped_rows": Metric(float((~measured.mask.any(1)).sum()), reduce="sum"),
    }


def _clipped(ratio: Tensor, advantages: Tensor, loss_type: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    if loss_type == "cispo":
        return {"clip_ratio/high": ratio > options["ratio_clip_max"]}
    if loss_type != "clip":
        return {}
    low = (ratio < 1 - options["ratio_clip_min"]) & (advantages < 0)
    high = (ratio > 1 + options["ratio_clip_max"]) & (advantages > 0)
    return {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": low | high}


def mean_of(values: Tensor) -> Metric:
    """Weighted by their number."""
    return Metric(float(values.double().mean()) if len(values) else 0.0, weight=float(len(values)))


def spread(name: str, values: Tensor) -> dict[str, Metric]:
    """Minimum, mean and maximum."""
    mean = {f"{name}/mean": mean_of(values)}
    if not len(values):
        return mean
    low, high = (float(bound) for bound in values.aminmax())
    return {f"{name}/min": Metric(low, reduce="min"), **mean, f"{name}/max": Metric(high, reduce="max")}
