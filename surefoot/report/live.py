"""The live view: a few lines at the bottom of the terminal, redrawn twice a second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.report.progress import PlainProgress
from surefoot.report.text import duration, sparkline
from surefoot.report.timeline import Timeline
from surefoot.types import Clock

_REDRAWS_PER_S = 2  # each takes a few milliseconds of the steps' time
_MAX_WIDTH = 100
_BARS = 32
_RECENT = 20 * _BARS


class LiveProgress(PlainProgress):
    """The newest of the plain lines, drawn in a frame by a thread of rich's. What that thread reads is replaced as a
    whole, never changed in place."""

    name = "live view"

    def __init__(self, console: Console, total_steps: int | None, timeline: Timeline, title: str) -> None:
        super().__init__(console, total_steps, timeline, log_period=1)
        self._title = title
        self._rows = {"step": "waiting for the first", "validation": "none yet", "checkpoint": "none yet"}
        self._step = 0
        self._curve, self._values = "loss", tuple[float, ...]()
        self._live = Live(self, console=console, refresh_per_second=_REDRAWS_PER_S)

    def start(self) -> None:
        self._live.start(refresh=True)

    def step(self, clock: Clock, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        super().step(clock, metrics, timing)
        self._step = clock.step
        if "reward" in metrics:  # says more than the loss of a policy, which stays about 0
            self._curve = "reward"
        self._values = (*self._values[1 - _RECENT :], metrics.get(self._curve, math.nan))

    def message(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _show(self, label: str, *values: str) -> None:
        self._rows[label] = "\n".join(value.strip() for value in values)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, overflow="crop", min_width=10)
        grid.add_column(no_wrap=True, overflow="crop")
        for label, text in list(self._rows.items()):
            grid.add_row(label, Text(text))
        if not options.ascii_only:
            values = self._values
            bar = math.ceil(len(values) / _BARS) or 1
            means = [fmean(values[i : i + bar]) for i in range(0, len(values), bar)]
            grid.add_row(self._curve, Text(sparkline(means), "cyan"))
        phase, seconds = self._timeline.current()
        now = f"  {phase} for {duration(seconds)}" if phase else ""
        grid.add_row("running", duration(self._timeline.elapsed_s()) + now)
        if self._total_steps is not None:
            grid.add_row("", ProgressBar(self._total_steps, self._step, width=2 * _BARS))
        # Room for a terminal's echo of ^C, which would otherwise wrap and leave a line of the frame behind.
        title = Text.assemble(("surefoot  ", "bold cyan"), self._title)
        yield Panel(
            grid,
            title=title,
            title_align="left",
            border_style="dim cyan",
            width=min(max(options.max_width - 3, 4), _MAX_WIDTH),
        )
