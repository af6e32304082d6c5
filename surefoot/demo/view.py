"""Two runs side by side while they train: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from surefoot.demo.watch import WatchedRun
from surefoot.report.text import duration, number, sparkline

_WIDTH = 100
_SPARKS = 30
_RECENT_STEPS = 50
_COLOURS = {"straight": "green", "killed": "magenta"}


class DemoView:
    """Drawn by whoever calls `draw`, on that thread: nothing competes with the watch for a save.

    Args:
        num_steps: of each run.
        line_period: steps between a run's plain lines.
    """

    def __init__(self, console: Console, runs: Sequence[WatchedRun], num_steps: int, line_period: int) -> None:
        self._console, self._runs, self._num_steps, self._line_period = console, runs, num_steps, line_period
        self._began_s = time.monotonic()
        self._printed: dict[str, int] = {}
        live = console.is_interactive and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False) if live else None

    def __enter__(self) -> DemoView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self.draw()
            self._live.stop()

    def event(self, text: str, style: str = "") -> None:
        """One line that stays, with the time since the runs were started."""
        line = Text.assemble((f"{time.monotonic() - self._began_s:6.1f} s  ", "dim"), (text, style))
        self._console.print(line, highlight=False, soft_wrap=True)

    def draw(self) -> None:
        if self._live:
            self._live.update(Group(*(self._panel(run) for run in self._runs)), refresh=True)
            return
        for run in self._runs:
            reached = run.step - run.step % self._line_period
            if reached != self._printed.get(run.name, 0):
                self._printed[run.name] = reached
                self.event(f"{run.name:<9}{self._plain(run)}")

    def _plain(self, run: WatchedRun) -> str:
        validation = "".join(f"   validation {number(value)}" for value in run.values("val")[-1:])
        saved = "".join(f"   newest checkpoint step_{step}" for step in run.saved()[-1:])
        return f"step {run.step:>5,}/{self._num_steps:,}   loss {_loss(run)}{validation}   {_speed(run)}{saved}"

    # ------------------------------------------------------------------------------------------------- on a terminal

    def _panel(self, run: WatchedRun) -> RenderableType:
        width = min(self._console.width, _WIDTH)
        colour = _COLOURS.get(run.name, "cyan")
        losses, validations = run.values("train"), run.values("val")
        rows = [
            self._bar(run, width - 4, colour),
            Text.assemble(("loss         ", "dim"), (f"{_loss(run):<9}", "bold"), (_curve(losses), colour)),
            Text.assemble(
                ("validation   ", "dim"),
                (f"{number(validations[-1]) if validations else '-':<9}", "bold"),
                (_curve(validations), colour),
            ),
            Text.assemble(("checkpoints  ", "dim"), *self._checkpoints(run)),
        ]
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(rows)
        title = Text.assemble((run.name, f"bold {colour}"), (f"  {run.status}", "dim"))
        return Panel(text, title=title, title_align="left", border_style=colour, width=width)

    def _bar(self, run: WatchedRun, width: int, colour: str) -> Text:
        step, total = run.step, self._num_steps
        count = f"{step:,}/{total:,}"
        after = f"{step / total:>4.0%}  {_speed(run)}"
        cells = max(4, width - 13 - len(count) - len(after) - 4)
        done, begun = cells * step // total, cells * run.resumed_from // total
        bar = [
            ("━" * min(done, begun), f"dim {colour}"),
            ("━" * max(0, done - begun), colour),
            ("─" * (cells - done), "dim"),
        ]
        return Text.assemble(("step         ", "dim"), (count, "bold"), "  ", *bar, "  ", after)

    def _checkpoints(self, run: WatchedRun) -> list[tuple[str, str]]:
        parts = [(f"{step}  ", "green") for step in run.saved()]
        for step in run.unfinished():
            left_over = bool(run.kills) and (run.status != "training" or run.step < step)
            parts.append((f"{step} half-written  ", "red") if left_over else (f"{step} being written  ", "yellow"))
        return parts or [("none yet", "dim")]


def _loss(run: WatchedRun) -> str:
    recent = run.values("train")[-_RECENT_STEPS:]
    return number(sum(recent) / len(recent)) if recent else "-"


def _speed(run: WatchedRun) -> str:
    recent = [timing["wall_s"] for timing in run.timings()[-_RECENT_STEPS:]]
    return f"{len(recent) / sum(recent):5.1f} steps/s" if sum(recent) else duration(0)


def _curve(values: Sequence[float]) -> str:
    """On a logarithmic scale, where the last tenth of the way shows too; each bar is a mean of neighbours."""
    bars = min(_SPARKS, len(values))
    cuts = [len(values) * i // bars for i in range(bars + 1)] if bars else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    return sparkline([math.log(mean) if mean > 0 else math.nan for mean in means])
