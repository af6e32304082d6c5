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

_BARS = 28
_COLOURS = ("green", "magenta")
_PHASE_COLOURS = {
    **{"rollout": "cyan", "reward": "yellow", "log-probs": "magenta", "teacher": "bright_blue"},
    **{"train": "blue", "sync": "green", "save": "red", "other": "bright_black"},
}
_VALIDATION = {
    "loss": "validation",
    "reward": "held out",
    "accuracy": "pairs right",
    "rewards/accuracies": "pairs right",
}
_MOST_COMPLETIONS = 3


class DemoView:
    """Drawn by whoever calls `draw`, on that thread: no thread of its own gets in the way of the watch for a save.

    Attributes:
        live: to be entered while the runs train; `None` where there is no terminal.
    """

    def __init__(self, console: Console, runs: Sequence[WatchedRun]) -> None:
        self._console, self._runs = console, runs
        self._colours = dict(zip((run.name for run in runs), cycle(_COLOURS), strict=False))
        self._width = max(len(run.name) for run in runs) + 2
        self._began_s = time.monotonic()
        self._printed = {run.name: ("starting", 0) for run in runs}
        terminal = console.is_interactive and console.file.isatty()
        self.live = Live(console=console, auto_refresh=False) if terminal else None

    def event(self, run: WatchedRun, text: str, style: str = "") -> None:
        """One line that stays, with the seconds since the start."""
        seconds = f"{time.monotonic() - self._began_s:6.1f} s  "
        line = Text.assemble((seconds, "dim"), (f"{run.name:<{self._width}}", self._colours[run.name]), (text, style))
        self._console.print(line, soft_wrap=True)

    def draw(self) -> None:
        if self.live:
            self.live.update(Group(*(self._panel(run) for run in self._runs)), refresh=True)
            return
        for run in self._runs:
            (old_status, num_old), status, num_validations = self._printed[run.name], run.status, run.num_validations
            if num_validations > num_old:
                self.event(run, f"{self._pace(run)}   {_measured(run)}")
                if run is self._runs[0] and run.completions():
                    self.event(run, "   ".join(_completions(run)))
            if status not in (old_status, "starting"):
                self.event(run, status)
            self._printed[run.name] = status, num_validations

    def _panel(self, run: WatchedRun) -> Panel:
        colour = self._colours[run.name]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, width=_BARS)
        grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row(ProgressBar(run.num_steps, run.step, _BARS, complete_style=colour), self._pace(run))
        grid.add_row(Text(_curve(run), colour), _measured(run))
        grid.add_row(*_where_the_time_goes(run))
        saves = Text.assemble(("checkpoints  ", "dim"), *((f"{step:,}  ", "green") for step in run.saved()))
        for step in run.saved("tmp_"):
            left_over = run.status == "starting" or run.step < step
            saves.append(*((f"{step:,} half-written", "red") if left_over else (f"{step:,} being written", "yellow")))
        title = Text.assemble((run.name, f"bold {colour}"), (f"  {run.status}", "not bold dim"))
        return Panel(
            Group(grid, *map(Text, _completions(run)), saves),
            title=title,
            title_align="left",
            border_style=colour,
            expand=False,
        )

    def _pace(self, run: WatchedRun) -> str:
        recent = [timing["wall_s"] for timing in run.timings()[-_recent(run) :]]
        return f"step {run.step:>5,}/{run.num_steps:,} " + (f"{1 / fmean(recent):5.1f} steps/s" if recent else "")


def _recent(run: WatchedRun) -> int:
    """So many of the last steps are shown as one number."""
    return max(1, run.num_steps // 20)


def _curve(run: WatchedRun) -> str:
    """Of the reward, where there is one; else of the loss's logarithm, so that the last tenth of the way shows too."""
    bucket = max(1, math.ceil(run.num_steps / _BARS))
    rewards = run.values("train", "reward")
    values = rewards or [math.log(max(loss, 1e-9)) for loss in run.values("train", "loss")]
    return sparkline([fmean(values[start : start + bucket]) for start in range(0, len(values), bucket)])


def _measured(run: WatchedRun) -> str:
    name = "reward" if run.values("train", "reward") else "loss"
    shown = {name: run.values("train", name)[-_recent(run) :]}
    shown |= {name: run.values("val", metric)[-1:] for metric, name in _VALIDATION.items() if run.values("val", metric)}
    return "   ".join(f"{name} {number(fmean(values)):<9}" for name, values in shown.items() if values)


def _where_the_time_goes(run: WatchedRun) -> tuple[Text, Text]:
    """One bar of all phases, and a legend of those that show in it."""
    bar, legend = Text(overflow="crop"), Text()
    for name, share in run.shares().items():
        colour = _PHASE_COLOURS[name]
        if cells := round(share * _BARS):
            bar.append("█" * cells, colour)
            legend.append(f"{name} {share:.0%}  ", colour)
    return bar, legend


def _completions(run: WatchedRun) -> list[str]:
    """The most frequent ones of one prompt, and what each is worth; where they are compared, against the others."""
    return [
        f"{row['prompt']}{row['completion']:<4}{row['count']:>2}×  reward {row['reward']:g}"
        + (f"  advantage {row['advantage']:+.2f}" if "advantage" in row else "")
        for row in run.completions()[:_MOST_COMPLETIONS]
    ]


def say(console: Console, label: str, text: str) -> None:
    """One line that stays."""
    console.print(Text.assemble((f"{label:<17}", "bold"), text), soft_wrap=True)
