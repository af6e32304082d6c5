"""Reward models: a score for each answer, so that better answers score higher (Bradley–Terry)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from surefoot.config import AlgorithmConfig, NonNegativeReal, RowsOfPairs
from surefoot.data.source import training_source, validate
from surefoot.errors import ConfigError
from surefoot.losses.reward import RewardLoss
from surefoot.types import Algorithm, Clock, EngineSpec, Head, Kit, Metrics, Objective, Poll, Source

_log = logging.getLogger(__name__)


class RMConfig(AlgorithmConfig):
    """A model with one score head; the score is read at a row's last token.

    Attributes:
        margins: the chosen score must lead by the row's `margin`.
        centring: how strongly the mean score of each pair is kept near 0; 0: not at all.
        val_batch_size: rows of one validation batch, two to a pair; it changes speed and memory, never the result.
    """

    margins: bool = False
    centring: NonNegativeReal = 0.0
    val_batch_size: RowsOfPairs = 32

    def loss(self) -> RewardLoss:
        return RewardLoss(self.margins, self.centring)

    def measures(self) -> Sequence[str]:
        return self.loss().measures


class RM(Algorithm):
    """The whole method. Its checkpoints are folders of a model for sequence classification with one label."""

    Config = RMConfig
    config: RMConfig
    rows = "pairs"

    def engines(self) -> Mapping[str, EngineSpec]:
        return {"policy": EngineSpec(kind="scalar")}

    def source(self, kit: Kit) -> Source:
        """Raises `ConfigError` when margins are asked for and a data set has none."""
        for dataset in (kit.train_data, *kit.validation_data.values()):
            if self.config.margins and dataset.margins is None:
                raise ConfigError(f"rm.margins: true, but {dataset.name} has no margin: add it, or set margins: false")
            if not self.config.margins and dataset.margins is not None:
                _log.warning("%s has margins, which are not used: rm.margins is false", dataset.name)
        return training_source(kit)

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        return [Objective("policy", Head(("scalar",)), self.config.loss())]

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """Loss, accuracy, margin and mean scores, on each set and over all of them."""
        (objective,) = self.objectives(Clock())
        policy = kit.engines["policy"]
        return validate(kit, poll, self.config.val_batch_size, lambda batch: policy.evaluate(batch, objective))
