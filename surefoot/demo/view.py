"""Two runs side by side while they train: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from surefoot.demo.watch import WatchedRun
from surefoot.report.text import number, sparkline

_WIDTH = 100
_LABEL_WIDTH = 13
_SPARKS = 40
_RECENT_STEPS = 50
_COLOURS = {"straight": "green", "killed": "magenta"}


class DemoView:
    """Drawn by whoever calls `draw`, on that thread: no thread of its own gets in the way of the watch for a save.

    Args:
        num_steps: of each run.
    """

    def __init__(self, console: Console, runs: Sequence[WatchedRun], num_steps: int) -> None:
        self._console, self._runs, self._num_steps = console, runs, num_steps
        self._began_s = time.monotonic()
        self._printed = {run.name: 0 for run in runs}
        live = console.is_interactive and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False) if live else None

    def __enter__(self) -> DemoView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def event(self, run: WatchedRun, text: str, style: str = "") -> None:
        """One line that stays, with the seconds since the start."""
        seconds = f"{time.monotonic() - self._began_s:6.1f} s  "
        line = Text.assemble((seconds, "dim"), (f"{run.name:<10}", _COLOURS.get(run.name, "")), (text, style))
        self._console.print(line, soft_wrap=True)

    def draw(self) -> None:
        if self._live:
            self._live.update(Group(*(self._panel(run) for run in self._runs)), refresh=True)
            return
        for run in [run for run in self._runs if run.status in ("training", "ended")]:
            validations = run.values("val")
            if len(validations) > self._printed[run.name]:
                self.event(
                    run,
                    f"step {run.step:>5,}/{self._num_steps:,}   loss {_loss(run):<9} "
                    f"validation {number(validations[-1]):<9} {_speed(run)}",
                )
            self._printed[run.name] = len(validations)

    def _panel(self, run: WatchedRun) -> Panel:
        colour = _COLOURS.get(run.name, "cyan")
        width = min(self._console.width, _WIDTH)
        losses, validations = run.values("train"), run.values("val")
        validation = number(validations[-1]) if validations else "-"
        rows = {
            "step": self._bar(run, width - 4 - _LABEL_WIDTH, colour),
            "loss": Text.assemble((f"{_loss(run):<10}", "bold"), (_curve(losses), colour)),
            "validation": Text.assemble((f"{validation:<10}", "bold"), (_curve(validations), colour)),
            "checkpoints": Text.assemble(*_checkpoints(run)),
        }
        lines = [Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), row) for label, row in rows.items()]
        title = Text.assemble((run.name, f"bold {colour}"), (f"  {run.status}", "not bold dim"))
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
        return Panel(text, title=title, title_align="left", border_style=colour, width=width)

    def _bar(self, run: WatchedRun, width: int, colour: str) -> Text:
        """What was done before the resume is drawn dim."""
        count, after = f"{run.step:>5,}/{self._num_steps:,}  ", f"  {run.step / self._num_steps:>4.0%}  {_speed(run)}"
        cells = max(4, width - len(count) - len(after))
        done = cells * run.step // self._num_steps
        before = min(done, cells * run.resumed_from // self._num_steps)
        parts = [("━" * before, f"dim {colour}"), ("━" * (done - before), colour), ("─" * (cells - done), "dim")]
        return Text.assemble((count, "bold"), *parts, after)


def _checkpoints(run: WatchedRun) -> list[tuple[str, str]]:
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
    return f"{len(recent) / sum(recent):4.0f} steps/s" if recent else "  - steps/s"


def _curve(values: Sequence[float]) -> str:
    """On a logarithmic scale, where the last tenth of the way shows too; each bar is a mean of neighbours."""
    bars = min(_SPARKS, len(values))
    cuts = [len(values) * i // bars for i in range(bars + 1)] if bars else [0]
    return sparkline([math.log(max(sum(values[a:b]) / (b - a), 1e-9)) for a, b in pairwise(cuts)])
