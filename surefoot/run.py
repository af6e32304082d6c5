"""What the loop turns over: the run's parts as the loop sees them. Built by `build`, and only there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from surefoot.types import Algorithm, Clock, Kit, Metrics, Saveable, Source, WeightSync

if TYPE_CHECKING:
    from surefoot.checkpoint import CheckpointManager


class Report(Saveable, AbstractContextManager[Any], Protocol):
    """Live progress, metrics.jsonl and the other views, fed from one place. Shown inside its `with` block."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a part of the step under this name."""
        ...

    def step(self, clock: Clock, metrics: Metrics) -> None: ...

    def validation(self, clock: Clock, metrics: Metrics) -> None: ...

    def training_info(self, clock: Clock) -> dict[str, Any]:
        """step, epoch, consumed_samples, consumed_tokens, and this step's metrics as "train:<m>" and "val:<m>"."""
        ...


class Stop(AbstractContextManager[Any], Protocol):
    """Signals and the deadline. Signals are caught inside its `with` block."""

    def check(self) -> None:
        """Raises `StopRequested` once a signal has come. Never waits."""
        ...

    def check_deadline(self) -> None:
        """Raises `StopRequested` when the next step and its save might not end before the deadline."""
        ...


@dataclass(frozen=True)
class Limits:
    """When to stop and when to validate, in steps. `max_num_steps` `None`: when the source is exhausted; `val_period`
    0: never."""

    max_num_steps: int | None = None
    val_period: int = 0
    val_at_start: bool = False
    val_at_end: bool = False


@dataclass(frozen=True)
class Run:
    """Everything the loop turns over. Made by `build`, and only there."""

    algorithm: Algorithm
    kit: Kit
    source: Source
    sync: WeightSync
    checkpoints: CheckpointManager
    report: Report
    stop: Stop
    limits: Limits
    clock: Clock = field(default_factory=Clock)

    @property
    def parts(self) -> dict[str, Saveable]:
        """What a checkpoint holds, by folder name. Metrics are synced first: they are part of what is committed. Of a
        frozen engine it holds the fingerprint."""
        return {
            "report": self.report,
            "clock": self.clock,
            "algorithm": self.algorithm,
            "source": self.source,
            "plane": self.kit.plane,
            **self.kit.engines,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    reason: str
    exit_code: int
