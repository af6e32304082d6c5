"""Supervised fine-tuning: minimise the negative log-likelihood of the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from surefoot.config import AlgorithmConfig, PositiveInt
from surefoot.data.source import training_source, validate
from surefoot.losses.supervised import NLL
from surefoot.types import Algorithm, Clock, Head, Kit, Metric, Metrics, Objective, Poll, Source


class SFTConfig(AlgorithmConfig):
    """`val_batch_size`: rows of one validation batch; it changes speed and memory, never the result."""

    val_batch_size: PositiveInt = 32

    def measures(self) -> Sequence[str]:
        return ("loss", "perplexity", "num_tokens", "skipped_rows")


class SFT(Algorithm):
    """The whole method. Rows come from the data set, nothing is added to them, one loss is minimised."""

    Config = SFTConfig
    config: SFTConfig

    def source(self, kit: Kit) -> Source:
        return training_source(kit)

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        return [Objective("policy", Head(("logprobs",)), NLL())]

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """Loss (per trained token) and perplexity, on each set and over all of them."""
        (objective,) = self.objectives(Clock())
        policy = kit.engines["policy"]
        measured = validate(kit, poll, self.config.val_batch_size, lambda batch: policy.evaluate(batch, objective))
        return measured | _perplexities(measured)


def _perplexities(metrics: Metrics) -> dict[str, Metric]:
    """exp of every mean loss; taken after the reduction, since it does not average."""
    return {
        name.removesuffix("loss") + "perplexity": Metric(_exp(metric.value), metric.weight, "last")
        for name, metric in metrics.items()
        if name.rpartition("/")[2] == "loss"
    }


def _exp(loss: float) -> float:
    """A loss above 700 nats has a perplexity beyond a float's range."""
    return math.exp(loss) if loss < 700 else math.inf
