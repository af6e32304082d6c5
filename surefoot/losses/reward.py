"""The loss of reward models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import logsigmoid

from surefoot.errors import ConfigError
from surefoot.types import Metric, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RewardLoss:
    """Bradley–Terry: the mean over pairs of −logσ(s chosen − s rejected − margin) + c · (s chosen + s rejected)².

    Rows come as pairs, the chosen one first. Reads the output `scalar` [rows, tokens] and takes each row's score at its
    last real token, which `attention_mask` (given by the engine) tells on whatever side the padding lies: no token's id
    is looked at. A pair with a side whose `loss_mask` is all 0 is left out and counted in `skipped_pairs`.

    Attributes:
        margins: whether to read the column `margin` [rows]; the chosen row's counts.
        centring: c, which keeps scores near 0 (arXiv:2312.09244). 0: off.

    Raises:
        ConfigError: `centring` is negative or not finite.
    """

    margins: bool = False
    centring: float = 0.0
    whole_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.centring) and self.centring >= 0):
            raise ConfigError(f"centring must be 0 or above, found {self.centring}")

    @property
    def measures(self) -> list[str]:
        """Names of the metrics."""
        columns = dict.fromkeys((*self.fields, "attention_mask"), torch.zeros(0, 1))
        return list(self({"scalar": torch.zeros(0, 1)}, columns, norm=self.counts(columns))[1])

    @property
    def fields(self) -> tuple[str, ...]:
        return ("loss_mask", "margin") if self.margins else ("loss_mask",)

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"pairs": float(_valid(columns["loss_mask"]).sum())}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and `loss`, `accuracy`, `margin` and `scores/…` as means over pairs."""
        valid = _valid(columns["loss_mask"])
        scores = last_scores(out["scalar"], columns["attention_mask"]).view(-1, 2)[valid]
        chosen, rejected = scores[:, 0], scores[:, 1]
        difference = chosen - rejected
        beyond = difference - columns["margin"][0::2][valid].to(scores.dtype) if self.margins else difference
        total = (self.centring * (chosen + rejected) ** 2 - logsigmoid(beyond)).sum()
        means = {
            "loss": total,
            "accuracy": (difference > 0).sum(),
            "margin": difference.sum(),
            "scores/chosen": chosen.sum(),
            "scores/rejected": rejected.sum(),
        }
        count = float(len(scores))
        metrics = {
            name: Metric(float(value.detach()) / count if count else 0.0, weight=count) for name, value in means.items()
        }
        metrics["num_tokens"] = Metric(float(columns["attention_mask"].sum()), reduce="sum")
        metrics["skipped_pairs"] = Metric(float((~valid).sum()), reduce="sum")
        return total / (norm["pairs"] or 1.0), metrics


def last_scores(scalars: Tensor, attention_mask: Tensor) -> Tensor:
    """Each row's score [rows] at its last real token, from [rows, tokens].

    >>> last_scores(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1, 1, 0]]))
    tensor([2.])
    """
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (places * (attention_mask != 0)).argmax(1)
    return scalars.gather(1, last[:, None]).squeeze(1)


def _valid(loss_mask: Tensor) -> Tensor:
    """[pairs]. Raises `ValueError` when a row has no partner."""
    if len(loss_mask) % 2:
        raise ValueError(f"preference rows come in pairs, the chosen one first; found {len(loss_mask)} rows")
    return (loss_mask != 0).any(1).view(-1, 2).all(1)
