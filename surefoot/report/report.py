"""The run's report: one place is told what happened, and every view is fed from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType

from surefoot.config import LoggerConfig
from surefoot.report.metrics_file import MetricsFile
from surefoot.report.progress import Progress, make_progress
from surefoot.report.summary import summary_table
from surefoot.report.tensorboard import TensorBoardView
from surefoot.report.text import event_text
from surefoot.report.timeline import SaveTally, Timeline
from surefoot.report.view import StepLine, View
from surefoot.report.wandb import WandbView
from surefoot.types import Clock, Metrics, Reader, SaveEvent, Sink, Writer

logger = logging.getLogger(__name__)

_TAKEN = frozenset({"step", "kind", "epoch", "rows", "tokens", "timing"})


class RunReport:
    """Implements `run.Report`: `metrics.jsonl`, TensorBoard, Weights & Biases and the progress on the console.

    A view that fails is switched off with one warning and never stops training. `metrics.jsonl` is no view: training
    stops when it cannot be written. On resume, `restore` or `restart` comes before the first step.

    Args:
        run_dir: the run's folder.
        total_steps: steps the run is to have at its end, where that is known.
        console: where progress, messages and the closing summary go; standard output by default.
        now: a clock in seconds that only goes forward.

    Raises:
        ConfigError: `config.wandb` without the package.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: LoggerConfig,
        *,
        total_steps: int | None,
        console: Console | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        run_dir = Path(run_dir)
        self._total_steps = total_steps
        self._console = console or Console()
        self._timeline = Timeline(now)
        self._tally = SaveTally()
        self._file = MetricsFile(run_dir / "metrics.jsonl")
        title = run_dir.absolute().name
        self._progress: Progress = make_progress(config, self._console, title, total_steps, self._timeline)
        self._views: list[View] = [self._progress]
        if config.tensorboard:
            self._views.append(TensorBoardView(run_dir / "tensorboard"))
        if config.wandb:
            self._views.append(WandbView(run_dir, config.wandb_project, config.wandb_mode))
        self._step = 0
        self._tokens = 0
        self._measured: dict[str, tuple[int, dict[str, float]]] = {}  # "train", "val" -> the step and its metrics
        self._closed = False
        self._print_summary = config.progress != "off"

    def __enter__(self) -> RunReport:
        self._timeline.start()
        self._show(self._progress, self._progress.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- what the loop tells

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._timeline.phase(name)

    def step(self, clock: Clock, metrics: Metrics) -> None:
        """Record the step that `clock` has just advanced past.

        Raises:
            SurefootError: `metrics.jsonl` cannot be written.
            ValueError: a metric has a name that the line needs for itself.
        """
        values = self._measure("train", clock, metrics)
        timing = self._timeline.turn(clock.tokens - self._tokens) | self._tally.news()
        self._tokens = clock.tokens
        pace, total = self._timeline.pace(), self._total_steps
        eta_s = None if total is None else self._timeline.left_s(max(0, total - clock.step))
        line = StepLine(clock.step, clock.epoch, clock.rows, clock.tokens, values, timing, pace, eta_s)
        head = {"step": line.step, "kind": "train", "epoch": line.epoch, "rows": line.rows, "tokens": line.tokens}
        self._file.append({**head, **values, "timing": timing})
        for view in self._views:
            self._show(view, partial(view.step, line))

    def validation(self, clock: Clock, metrics: Metrics) -> None:
        """Record what was measured on the validation sets after `clock.step`. Raises as `step` does."""
        values = self._measure("val", clock, metrics)
        self._file.append({"step": clock.step, "kind": "val", **values})
        for view in self._views:
            self._show(view, partial(view.validation, clock.step, values))

    def training_info(self, clock: Clock) -> dict[str, Any]:
        """step, epoch, consumed_samples, consumed_tokens, and what was measured at this very step: "train:<m>",
        "val:<m>", "val:<set>/<m>". Values of an earlier step are never repeated. May hold NaN and infinity."""
        info: dict[str, Any] = {
            "step": clock.step,
            "epoch": clock.epoch,
            "consumed_samples": clock.rows,
            "consumed_tokens": clock.tokens,
        }
        for kind, (step, values) in self._measured.items():
            if step == clock.step:
                info |= {f"{kind}:{name}": value for name, value in values.items()}
        return info

    def save_event(self, event: SaveEvent) -> None:
        """What the checkpoint manager tells. May be called from any thread, and after `close`."""
        self._tally.add(event)
        shown = self._show(self._progress, partial(self._progress.save_event, event))
        if not shown and event.kind in ("failed", "warning"):
            logger.warning("checkpoint: %s", event_text(event))

    def message(self, text: str) -> None:
        """Show one line. May be called from any thread."""
        if not self._show(self._progress, partial(self._progress.message, text)):
            logger.info("%s", text)

    def summary(self) -> RenderableType:
        """Where the time went and what the saves cost, for a rich console."""
        return summary_table(self._timeline, self._tally.saves)

    def close(self) -> None:
        """Stop the live view, print the summary, flush and close every view and the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for view in self._views:
            self._show(view, view.close)
        if self._timeline.turns and self._print_summary:
            self._show(self._progress, partial(self._console.print, self.summary()))
        self._file.close()

    # ------------------------------------------------------------------------------------------------------- Saveable

    def settle(self) -> None:
        """Every line is with the operating system when the call that made it returns."""

    def snapshot(self) -> Writer:
        """Captures how far `metrics.jsonl` goes. The writer syncs it first, so a checkpoint never knows of a line that
        a power cut can take away; if that fails, the save fails."""
        sync = self._file.sync_later()
        state = {"step": self._step, "tokens": self._tokens, **self._file.state()}

        def write(sink: Sink) -> None:
            sync()
            sink.json("metrics.json", state)

        return write

    def restore(self, reader: Reader) -> None:
        """Go on after the checkpoint's step; what was recorded later is set aside."""
        state = reader.json("metrics.json")
        self._tokens = state["tokens"]
        self._resume(state["step"], state)

    def restart(self) -> None:
        """Begin again at step 0, in the folder of a run that ended before its first save."""
        self._resume(0, None)

    def _resume(self, step: int, state: dict[str, Any] | None) -> None:
        self._step = step
        self._file.cut(step, state)
        for view in self._views:
            self._show(view, partial(view.resume, step if state else -1))

    # ---------------------------------------------------------------------------------------------------------- inside

    def _measure(self, kind: str, clock: Clock, metrics: Metrics) -> dict[str, float]:
        if taken := sorted(_TAKEN & metrics.keys()):
            raise ValueError(f"metrics named {', '.join(taken)}: a line of metrics.jsonl uses these names for itself")
        values = {name: float(metric.value) for name, metric in metrics.items()}
        self._step = clock.step
        self._measured[kind] = (clock.step, values)
        return values

    def _show(self, view: View, call: Callable[[], None]) -> bool:
        """Let a view do its part. Returns whether it did: one that fails is switched off, and said so, once."""
        if view not in self._views:
            return False
        try:
            call()
        except (Exception, SystemExit) as error:  # rich exits the process when a pipe's reader is gone
            self._views = [other for other in self._views if other is not view]
            logger.warning("%s is switched off, training goes on: %s: %s", view.name, type(error).__name__, error)
            return False
        return True
