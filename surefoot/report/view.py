"""What every view gets to see, and the one small protocol that views keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pace:
    """Means over the newest steps, without validation and saves."""

    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StepLine:
    """One training step as measured.

    Attributes:
        rows, tokens: trained so far, in total, like `Clock`.
        metrics: plain numbers, already reduced.
        timing: seconds (names end in `_s`) and rates; the only part that differs from one run of the same seed to the
            next.
        eta_s: seconds left, `None` where the number of steps is unknown.
    """

    step: int
    epoch: int
    rows: int
    tokens: int
    metrics: Mapping[str, float]
    timing: Mapping[str, float]
    pace: Pace
    eta_s: float | None = None


class View(Protocol):
    """Shows a run somewhere. A view may fail: the report then says so once and goes on without it."""

    name: str

    def resume(self, step: int) -> None:
        """The run goes on after `step`: what the view holds about later steps did not happen. Called before `step`
        and `validation`, or not at all."""
        ...

    def step(self, line: StepLine) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
