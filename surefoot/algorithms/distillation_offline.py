"""Off-policy distillation: on a data set's completions, the student's next-token distributions become a teacher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import ClassVar, Literal

from pydantic import model_validator

from surefoot.algorithms._teachers import SameTokenizerConfig, Teachers
from surefoot.config import Place, PositiveInt
from surefoot.data.source import iterate, training_source, validate
from surefoot.types import Algorithm, BatchRef, Clock, EngineSpec, Kit, Metrics, Objective, Poll, Source

_SENSE_ROWS = 8


class OfflineDistillationConfig(SameTokenizerConfig):
    """Distillation on the completions of a data set.

    Attributes:
        precompute: what the teachers say of all rows is computed before the first step and kept on disk, so that no
            teacher is in memory while the student trains; needs `top_k`.
        cache: where that is kept; default: surefoot/<teacher>_logprobs in ~/.cache.
        val_batch_size: rows of one validation batch; it changes speed and memory, never the result.
    """

    places: ClassVar[tuple[str, ...]] = ("cache",)

    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "forward_kl"
    precompute: bool = False
    cache: Place | None = None
    val_batch_size: PositiveInt = 32

    @model_validator(mode="after")
    def _something_small_is_kept(self) -> OfflineDistillationConfig:
        if self.precompute and self.top_k is None:
            raise ValueError("precompute keeps the teacher's likeliest tokens, never whole vocabularies: set top_k")
        if self.cache is not None and not self.precompute:
            raise ValueError("cache: nothing is kept without precompute: true")
        return self


class OfflineDistillation(Algorithm):
    """Rows come from the data set, what the teachers say of them is added, one loss is minimised."""

    Config = OfflineDistillationConfig
    config: OfflineDistillationConfig

    def __init__(self, config: OfflineDistillationConfig) -> None:
        super().__init__(config)
        self._teachers, self._sense_is_checked = Teachers(config), False
        if config.precompute:  # of all tokens: a data set's rows are known by their ids alone
            self._teachers.head = replace(self._teachers.head, mask=None)

    def engines(self) -> Mapping[str, EngineSpec]:
        kept = {"precomputed": self._teachers.head, "cache": self.config.cache} if self.config.precompute else {}
        return {"policy": EngineSpec()} | self.config.specs(**kept)

    def source(self, kit: Kit) -> Source:
        self._kit = kit
        self._teachers.check(kit)
        return training_source(kit)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        if not self._sense_is_checked:
            self._sense_is_checked = True
            for some in islice(iterate(kit.train_data, kit.plane, _SENSE_ROWS), 1):
                self._teachers.warn_of_nonsense(some, kit)
        return self._teachers.add(ref, kit)

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        return [self._teachers.objective(self._kit)]

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """The loss and what it measures besides, on each set and over all of them."""

        def measure(batch: BatchRef) -> Metrics:
            batch = self._teachers.add(batch, kit)
            return kit.engines["policy"].evaluate(batch, self._teachers.objective(kit))

        return validate(kit, poll, self.config.val_batch_size, measure)
