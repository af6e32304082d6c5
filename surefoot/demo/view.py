"""Runs side by side while they train: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.demo.watch import WatchedRun
from surefoot.report.text import number, sparkline

_BARS = 40
_RECENT_STEPS = 50
_COLOURS = ("green", "magenta")
_VALIDATION = {"loss": "validation", "accuracy": "pairs right", "rewards/accuracies": "pairs right"}


class DemoView:
    """Drawn by whoever calls `draw`, on that thread: no thread of its own gets in the way of the watch for a save.

    Attributes:
        live: to be entered while the runs train; `None` where there is no terminal.
    """

    def __init__(self, console: Console, runs: Sequence[WatchedRun]) -> None:
        self._console, self._runs = console, runs
        self._colours = dict(zip((run.name for run in runs), cycle(_COLOURS), strict=False))
        self._began_s = time.monotonic()
        self._printed = {run.name: ("starting", 0) for run in runs}
        terminal = console.is_interactive and console.file.isatty()
        self.live = Live(console=console, auto_refresh=False) if terminal else None

    def event(self, run: WatchedRun, text: str, style: str = "") -> None:
        """One line that stays, with the seconds since the start."""
        seconds = f"{time.monotonic() - self._began_s:6.1f} s  "
        line = Text.assemble((seconds, "dim"), (f"{run.name:<10}", self._colours[run.name]), (text, style))
        self._console.print(line, soft_wrap=True)

    def draw(self) -> None:
        if self.live:
            self.live.update(Group(*(self._panel(run) for run in self._runs)), refresh=True)
            return
        for run in self._runs:
            (old_status, num_old), status, num_validations = self._printed[run.name], run.status, len(run.losses("val"))
            if num_validations > num_old:
                self.event(run, f"{self._pace(run)}   {_losses(run)}")
            if status not in (old_status, "starting"):
                self.event(run, status)
            self._printed[run.name] = status, num_validations

    def _panel(self, run: WatchedRun) -> Panel:
        colour, losses, bucket = self._colours[run.name], run.losses("train"), max(1, run.num_steps // _BARS)
        means = [fmean(losses[start : start + bucket]) for start in range(0, len(losses), bucket)]
        curve = sparkline([math.log(max(mean, 1e-9)) for mean in means])  # so that the last tenth of the way shows too
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(run.num_steps, run.step, _BARS, complete_style=colour), self._pace(run))
        grid.add_row(Text(curve, colour), _losses(run))
        saves = Text.assemble(("checkpoints  ", "dim"), *((f"{step:,}  ", "green") for step in run.saved()))
        for step in run.saved("tmp_"):
            left_over = run.status == "starting" or run.step < step
            saves.append(*((f"{step:,} half-written", "red") if left_over else (f"{step:,} being written", "yellow")))
        title = Text.assemble((run.name, f"bold {colour}"), (f"  {run.status}", "not bold dim"))
        return Panel(Group(grid, saves), title=title, title_align="left", border_style=colour, expand=False)

    def _pace(self, run: WatchedRun) -> str:
        recent = [timing["wall_s"] for timing in run.timings()[-_RECENT_STEPS:]]
        return f"step {run.step:>5,}/{run.num_steps:,} " + (f"{1 / fmean(recent):5.0f} steps/s" if recent else "")


def _losses(run: WatchedRun) -> str:
    recent = {"loss": run.losses("train")[-_RECENT_STEPS:]}
    recent |= {
        name: run.values("val", metric)[-1:] for metric, name in _VALIDATION.items() if run.values("val", metric)
    }
    return "   ".join(f"{name} {number(fmean(values)):<9}" for name, values in recent.items() if values)


def say(console: Console, label: str, text: str) -> None:
    """One line that stays."""
    console.print(Text.assemble((f"{label:<17}", "bold"), text), soft_wrap=True)
