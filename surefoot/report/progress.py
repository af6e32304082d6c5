"""Progress on the console: plain lines, for log files and pipes, or the live view of `live.py` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rich.console import Console

from surefoot.config import LoggerConfig
from surefoot.report.live import LiveProgress
from surefoot.report.text import EVENT_STYLES, duration, event_text, headline, number
from surefoot.report.timeline import Timeline
from surefoot.report.view import StepLine, View
from surefoot.types import SaveEvent

_METRICS_PER_LINE = 6


class Progress(View, Protocol):
    """A view that also shows messages and what becomes of the saves."""

    def start(self) -> None: ...

    def save_event(self, event: SaveEvent) -> None:
        """May be called from any thread."""
        ...

    def message(self, text: str, style: str = "") -> None:
        """Print one line. May be called from any thread."""
        ...


def make_progress(
    config: LoggerConfig, console: Console, title: str, total_steps: int | None, timeline: Timeline
) -> Progress:
    """What `logger.progress` asks for. "auto" asks the stream itself, not rich: environment variables such as
    FORCE_COLOR make rich take a log file for a terminal."""
    if config.progress == "live" or (config.progress == "auto" and console.is_interactive and console.file.isatty()):
        return LiveProgress(console, title, total_steps, timeline)
    return PlainProgress(console, total_steps, config.log_period, quiet=config.progress == "off")


class PlainProgress:
    """One aligned line per `log_period` steps, without colour, flushed at once.

    Args:
        quiet: only messages, failed saves and warnings.
    """

    name = "progress"

    def __init__(self, console: Console, total_steps: int | None, log_period: int, *, quiet: bool = False) -> None:
        self._console = console
        self._total_steps = total_steps
        self._log_period = log_period
        self._quiet = quiet

    def start(self) -> None:
        pass

    def resume(self, step: int) -> None:
        pass

    def step(self, line: StepLine) -> None:
        if self._quiet or (line.step % self._log_period and line.step != self._total_steps):
            return
        parts = [self._step_text(line.step), f"epoch {line.epoch}"]
        parts += [f"{name} {number(value):>9}" for name, value in headline(line.metrics, _METRICS_PER_LINE)]
        parts += [f"{line.pace.tokens_per_s:>8,.0f} tokens/s", f"{duration(line.pace.step_s):>6}/step"]
        if line.eta_s:
            parts.append(f"ETA {duration(line.eta_s)}")
        self.message("  ".join(parts))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._quiet:
            values = "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
            self.message(f"{self._step_text(step)}  validation  {values}")

    def save_event(self, event: SaveEvent) -> None:
        if not self._quiet or event.kind in ("failed", "warning"):
            self.message(f"checkpoint: {event_text(event)}", EVENT_STYLES[event.kind])

    def message(self, text: str, style: str = "") -> None:
        file = self._console.file  # not through rich, which takes ten times as long to find nothing to colour
        file.write(text + "\n")
        file.flush()

    def close(self) -> None:
        pass

    def _step_text(self, step: int) -> str:
        if self._total_steps is None:
            return f"step {step:>7,}"
        total = f"{self._total_steps:,}"
        return f"step {step:>{len(total)},}/{total}"
