"""The loss of PPO's value model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import pad

from surefoot.errors import ConfigError
from surefoot.types import Metric, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def state_values(scalars: Tensor) -> Tensor:
    """From a value model's output to the value of the state in which each token was chosen, [..., tokens] both.

    The scalar at a token has seen that token; the value that its advantage is measured against must not. So token t
    gets the scalar at t − 1, and token 0, before which there is nothing, 0.

    >>> state_values(torch.tensor([3.0, 4.0, 5.0]))
    tensor([0., 3., 4.])
    """
    return pad(scalars[..., :-1], (1, 0))


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The mean over trained tokens of ½ · max((v − R)², (clip(v, v_old ± c) − R)²) (PPO, arXiv:1707.06347; the clipped
    term as in its authors' code).

    Reads the output `scalar` and the columns `loss_mask`, `old_values` and `returns`, all [rows, tokens]. v is
    `state_values` of the output, and `old_values` and `returns` are aligned as v is.

    Attributes:
        cliprange: c; `None`: no clipping.

    Raises:
        ConfigError: `cliprange` is not above 0.
    """

    cliprange: float | None = None
    fields: ClassVar[tuple[str, ...]] = ("loss_mask", "old_values", "returns")
    whole_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.cliprange is not None and not (math.isfinite(self.cliprange) and self.cliprange > 0):
            raise ConfigError(f"cliprange must be above 0, or null for none, found {self.cliprange}")

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """`tokens`, and what the explained variance of the whole step is made of: sums of R, R², e and e², where e is
        the old value's error R − v_old."""
        mask = columns["loss_mask"] != 0
        returns = columns["returns"][mask].double()
        errors = returns - columns["old_values"][mask].double()
        sums = {"returns": returns, "squared_returns": returns**2, "errors": errors, "squared_errors": errors**2}
        return {"tokens": float(mask.sum()), **{name: float(values.sum()) for name, values in sums.items()}}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and metrics: means over tokens of the `loss`, of `values`, of `returns`
        and of `clip_ratio` (the clipped term is the larger one); and `explained_variance`: 1 − Var(R − v_old) / Var(R)
        over the whole step, of the values that the advantages were made with. Absent where all returns are equal."""
        mask = columns["loss_mask"] != 0
        values = state_values(out["scalar"])[mask]
        returns, old = (columns[name][mask].to(values.dtype) for name in ("returns", "old_values"))
        squared = (values - returns) ** 2
        clipped = squared
        if self.cliprange is not None:
            clipped = (torch.clamp(values, old - self.cliprange, old + self.cliprange) - returns) ** 2
        total = torch.maximum(squared, clipped).sum() / 2
        tokens = float(len(values))
        sums = {
            "loss": total,
            "values": values.sum(),
            "returns": returns.sum(),
            "clip_ratio": (clipped > squared).sum(),
        }
        metrics = {
            name: Metric(float(value.detach()) / tokens if tokens else 0.0, weight=tokens)
            for name, value in sums.items()
        }
        explained = _explained_variance(norm)
        if explained is not None:
            metrics["explained_variance"] = Metric(explained, weight=tokens)
        metrics["num_tokens"] = Metric(tokens, reduce="sum")
        metrics["skipped_rows"] = Metric(float((~mask.any(1)).sum()), reduce="sum")
        return total / (norm["tokens"] or 1.0), metrics


def _explained_variance(norm: Mapping[str, float]) -> float | None:
    """`None` where the returns do not vary beyond rounding."""
    tokens = norm["tokens"] or 1.0
    means = {name: total / tokens for name, total in norm.items()}
    variance = means["squared_returns"] - means["returns"] ** 2
    if variance <= 1e-12 * means["squared_returns"]:
        return None
    return 1 - (means["squared_errors"] - means["errors"] ** 2) / variance
