"""Progress on the console in plain lines, for log files and pipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from surefoot.report.text import duration, event_text, headline, number, rollout_text
from surefoot.report.timeline import Timeline
from surefoot.types import Clock, SaveEvent


class PlainProgress:
    """One aligned line per `log_period` steps, without colour, flushed at once.

    Args:
        log_period: `None` for messages, failed saves and warnings only.
    """

    name = "progress"

    def __init__(self, console: Console, total_steps: int | None, timeline: Timeline, log_period: int | None) -> None:
        self._console = console
        self._total_steps = total_steps
        self._timeline = timeline
        self._log_period = log_period

    def start(self) -> None:
        pass

    def step(self, clock: Clock, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        if clock.step % (self._log_period or 1) and clock.step != self._total_steps:
            return
        values = "  ".join(f"{name} {number(value):>9}" for name, value in headline(metrics).items())
        speed = f"{timing['tokens_per_s']:>8,.0f} tokens/s  {duration(timing['step_s']):>6}/step"
        if self._total_steps is not None and clock.step < self._total_steps:
            speed += f"  ETA {duration(self._timeline.left_s(self._total_steps - clock.step))}"
        self._show("step", f"{self._count(clock.step)}  epoch {clock.epoch}", values, speed)

    def rollouts(self, step: int, rollouts: Mapping[str, Mapping[str, Any]]) -> None:
        """Some rollouts of the step that is being made, by what they are shown for."""
        if not step % (self._log_period or 1) or step == self._total_steps:
            for name, rollout in rollouts.items():
                self._show(name, rollout_text(rollout))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        values = "  ".join(f"{name} {number(value)}" for name, value in headline(metrics).items())
        self._show("validation", f"step {self._count(step)}  {values}")

    def save_event(self, event: SaveEvent) -> None:
        """May be called from any thread."""
        if event.kind == "failed":
            self.message(f"checkpoint  {event_text(event)}")
        else:
            self._show("pruned" if event.kind == "pruned" else "checkpoint", event_text(event))

    def message(self, text: str) -> None:
        """Print one line. May be called from any thread."""
        file = self._console.file  # not through rich, which takes ten times as long to find nothing to colour
        file.write(text + "\n")
        file.flush()

    def close(self) -> None:
        pass

    def _show(self, label: str, *values: str) -> None:
        if self._log_period is not None:
            self.message("  ".join([label, *values]))

    def _count(self, step: int) -> str:
        total = "" if self._total_steps is None else f"/{self._total_steps:,}"
        return f"{step:>{max(0, len(total) - 1)},}{total}"
