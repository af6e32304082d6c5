"""The live view: a few lines at the bottom of the terminal, redrawn four times a second at most.

The training thread only stores numbers here. Drawing happens on a thread of its own, and each redraw is followed by a
rest many times as long as it took, so that the view costs the steps next to nothing, whatever the terminal's speed.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterable, Mapping
from time import perf_counter

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from surefoot.report.text import EVENT_STYLES, duration, event_text, headline, loss_of, number, sparkline
from surefoot.report.timeline import Timeline
from surefoot.report.view import StepLine
from surefoot.types import SaveEvent

logger = logging.getLogger(__name__)

_REDRAW_PERIOD_S = 0.25
_REST_PER_REDRAW = 100
_MAX_WIDTH = 100
_LABEL_WIDTH = 12
_SPARKS = 32
_METRICS = 4


class LiveProgress:
    """Draws the newest numbers. State is replaced, never changed in place, so drawing needs no lock.

    Args:
        title: stands in the frame.
        timeline: is asked, at each redraw, what is being done.
    """

    name = "live view"

    def __init__(self, console: Console, title: str, total_steps: int | None, timeline: Timeline) -> None:
        self._console = console
        self._title = title
        self._total_steps = total_steps
        self._timeline = timeline
        self._line: StepLine | None = None
        self._resumed_at = 0
        # One bar of the sparkline is the mean of so many steps, and the bars show a sixth of the run.
        self._steps_per_spark = max(1, (total_steps or 0) // (6 * _SPARKS))
        self._sparks: tuple[tuple[float, int], ...] = ()  # sum of losses, number of them
        self._checkpoint = ("none yet", "dim")
        self._validation: tuple[int, Mapping[str, float]] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="surefoot-live-view", daemon=True)
        self._live = Live(self, console=console, auto_refresh=False)

    def start(self) -> None:
        self._live.start(refresh=True)
        atexit.register(self.close)  # gives the cursor back, whatever ends the process
        self._thread.start()

    def resume(self, step: int) -> None:
        self._resumed_at = step

    def step(self, line: StepLine) -> None:
        _, loss = loss_of(line.metrics)
        if self._sparks and self._sparks[-1][1] < self._steps_per_spark:
            total, count = self._sparks[-1]
            self._sparks = (*self._sparks[:-1], (total + loss, count + 1))
        else:
            self._sparks = (*self._sparks[-_SPARKS + 1 :], (loss, 1))
        self._line = line

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._validation = (step, metrics)

    def save_event(self, event: SaveEvent) -> None:
        if event.kind in ("writing", "finished", "failed"):
            self._checkpoint = (event_text(event), EVENT_STYLES[event.kind])
        if event.kind in ("failed", "warning"):
            self.message(f"checkpoint: {event_text(event)}", EVENT_STYLES[event.kind])

    def message(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def close(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        atexit.unregister(self.close)
        if self._thread.ident is not None:
            self._thread.join()
        self._live.stop()

    def _redraw(self) -> None:
        rest_s = 0.0
        try:
            while not self._stopping.wait(max(_REDRAW_PERIOD_S, rest_s)):
                began = perf_counter()
                self._live.refresh()
                rest_s = _REST_PER_REDRAW * (perf_counter() - began)
        except (Exception, SystemExit) as error:  # rich exits the process when a pipe's reader is gone
            logger.warning("the live view is switched off: %s: %s", type(error).__name__, error)

    # ------------------------------------------------------------------------------------------------------- drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MAX_WIDTH)
        rows = [
            self._bar(width - 4, options.ascii_only),
            *self._training(options.ascii_only),
            self._row("validation", self._validation_parts()),
            self._row("checkpoint", [self._checkpoint]),
            self._row("now", self._now_parts()),
        ]
        overflow: OverflowMethod = "crop" if options.ascii_only else "ellipsis"
        text = Text("\n", no_wrap=True, overflow=overflow).join(rows)
        title = Text.assemble(("surefoot", "bold cyan"), ("  " + self._title if self._title else "", "not bold dim"))
        yield Panel(text, title=title, title_align="left", border_style="dim cyan", width=width)

    def _bar(self, width: int, ascii_only: bool) -> Text:
        step = self._line.step if self._line else self._resumed_at
        if self._total_steps is None:
            return self._row("step", [(f"{step:,}", "bold"), *self._where()])
        count = Text.assemble((f"{step:,}", "bold"), (f"/{self._total_steps:,}", "dim"))
        after = Text("  ").join(Text(*part) for part in [(f"{step / self._total_steps:.0%}", "bold"), *self._where()])
        label = Text("step".ljust(_LABEL_WIDTH), "dim")
        cells = max(4, width - len(label) - len(count) - len(after) - 4)
        done = min(cells, cells * step // self._total_steps)
        full, empty = ("=", "-") if ascii_only else ("━", "─")
        return Text.assemble(label, count, "  ", (full * done, "green"), (empty * (cells - done), "dim"), "  ", after)

    def _where(self) -> list[tuple[str, str]]:
        if self._line is None:
            return []
        eta = [(f"ETA {duration(self._line.eta_s)}", "cyan")] if self._line.eta_s else []
        return [(f"epoch {self._line.epoch}", ""), *eta]

    def _training(self, ascii_only: bool) -> list[Text]:
        if self._line is None:
            return [self._row("loss", [("waiting for the first step", "dim")])]
        metrics, pace = self._line.metrics, self._line.pace
        name, loss = loss_of(metrics)
        sparks = "" if ascii_only else sparkline([total / count for total, count in self._sparks])
        others = headline({key: value for key, value in metrics.items() if key not in (name, "lr")}, _METRICS)
        speed = [(f"{pace.tokens_per_s:,.0f} tokens/s", ""), (f"{duration(pace.step_s)}/step", "")]
        rate = [(f"learning rate {number(metrics['lr'])}", "")] if "lr" in metrics else []
        return [
            self._row(name, [(number(loss), "bold"), (sparks, "cyan")]),
            self._row("metrics", _pairs(others) or [("-", "dim")]),
            self._row("speed", [*speed, *rate]),
        ]

    def _validation_parts(self) -> list[tuple[str, str]]:
        if self._validation is None:
            return [("none yet", "dim")]
        step, metrics = self._validation
        return [(f"step {step:,}", ""), *_pairs(headline(metrics, _METRICS))]

    def _now_parts(self) -> list[tuple[str, str]]:
        running = duration(self._timeline.elapsed_s())
        if self._stopping.is_set():
            return [(f"ended after {running}", "")]
        name, seconds = self._timeline.current()
        return [(name or "between steps", ""), (f"for {duration(seconds)}", "dim"), (f"running {running}", "dim")]

    @staticmethod
    def _row(label: str, parts: Iterable[tuple[str, str]]) -> Text:
        return Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), Text("   ").join(Text(*part) for part in parts))


def _pairs(metrics: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    return [(f"{name} {number(value)}", "") for name, value in metrics]
