"""The loss of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from surefoot.types import Metric, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class NLL:
    """Negative log-likelihood per trained token: -Σ logprob · mask / tokens, over all rows of one optimizer step.

    Reads the column `loss_mask` [rows, tokens] and the output `logprobs` [rows, tokens]. Where no token is trained the
    loss is 0 and so is its gradient.
    """

    fields: tuple[str, ...] = ("loss_mask",)
    whole_step: ClassVar[bool] = False

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": float(columns["loss_mask"].sum())}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and `loss` (mean over tokens), `num_tokens`, `skipped_rows`."""
        logprobs = out["logprobs"]
        mask = columns["loss_mask"].to(logprobs.dtype)
        total = -(logprobs * mask).sum()
        tokens = float(mask.sum())
        metrics = {
            "loss": Metric(float(total.detach()) / tokens if tokens else 0.0, weight=tokens),
            "num_tokens": Metric(tokens, reduce="sum"),
            "skipped_rows": Metric(float((mask.sum(dim=1) == 0).sum()), reduce="sum"),
        }
        return total / (norm["tokens"] or 1.0), metrics
