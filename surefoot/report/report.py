"""The run's report: one place is told what happened, and every view is fed from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from rich.console import Console

from surefoot.config import LoggerConfig
from surefoot.report.completions import Completions
from surefoot.report.live import LiveProgress
from surefoot.report.metrics_file import MetricsFile
from surefoot.report.progress import PlainProgress
from surefoot.report.text import summary
from surefoot.report.timeline import Timeline
from surefoot.report.trackers import TensorBoardTracker, WandbTracker
from surefoot.types import Clock, Metrics, Reader, SaveEvent, Sink, Writer

logger = logging.getLogger(__name__)

_View: TypeAlias = PlainProgress | TensorBoardTracker | WandbTracker

_TAKEN = frozenset({"step", "kind", "epoch", "rows", "tokens", "timing"})
# The timings that TensorBoard and W&B get, for every number costs them time. All are in metrics.jsonl.
_TRACKED = ("step_s", "tokens_per_s", "save_s")


class RunReport:
    """Implements `run.Report`: `metrics.jsonl`, TensorBoard, Weights & Biases and the progress on the console.

    A view that fails is switched off with one warning and never stops training. `metrics.jsonl` is no view: training
    stops when it cannot be written. On resume, `restore` or `restart` comes before the first step.

    Args:
        run_dir: the run's folder; it exists.
        total_steps: steps the run is to have at its end, where that is known.
        console: where progress, messages and the closing summary go; standard output by default.
        timeline: of the run's phases.
        completions: the record of rollouts, where the run has any.

    Raises:
        ConfigError: `config.wandb` without the package.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LoggerConfig,
        *,
        total_steps: int | None,
        console: Console | None = None,
        timeline: Timeline | None = None,
        completions: Completions | None = None,
    ) -> None:
        run_dir = run_dir.absolute()
        self._console = console or Console()
        self._timeline = timeline or Timeline(time.perf_counter)
        self._completions = completions
        self._file = MetricsFile(run_dir / "metrics.jsonl")
        # The stream itself is asked too: variables such as FORCE_COLOR make rich take any file for a terminal.
        is_terminal = self._console.is_interactive and self._console.file.isatty()
        if config.progress == "live" or (config.progress == "auto" and is_terminal):
            self._progress: PlainProgress = LiveProgress(self._console, total_steps, self._timeline, run_dir.name)
        else:
            period = None if config.progress == "off" else config.log_period
            self._progress = PlainProgress(self._console, total_steps, self._timeline, period)
        self._trackers: list[TensorBoardTracker | WandbTracker] = []
        if config.tensorboard:
            self._trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
        if config.wandb:
            self._trackers.append(WandbTracker(run_dir, config.wandb_project, config.wandb_mode))
        self._switched_off: set[str] = set()  # names of views
        self._step = 0
        self._tokens = 0
        self._measured: dict[str, float] = {}  # at `_step`
        self._saves: list[SaveEvent] = []  # finished ones; only ever appended to, from any thread
        self._saves_told = 0
        self._print_summary = config.progress != "off"
        if completions is not None:
            completions.show = lambda *args: self._show(self._progress, self._progress.rollouts, *args)

    def __enter__(self) -> RunReport:
        self._timeline.start()
        self._show(self._progress, self._progress.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for view in (self._progress, *self._trackers):
            self._show(view, view.close)
        if self._timeline.turns and self._print_summary:
            self._show(self._progress, self._console.print, summary(self._timeline, self._saves))
        self._file.close()

    # ---------------------------------------------------------------------------------------------- what the loop tells

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._timeline.phase(name)

    def step(self, clock: Clock, metrics: Metrics) -> None:
        """Record the step that `clock` has just advanced past.

        Raises:
            StorageFailed: `metrics.jsonl` cannot be written.
            ValueError: a metric has a name that the line needs for itself.
        """
        values = self._measure("train", clock, metrics)
        timing = self._timeline.turn(clock.tokens - self._tokens)
        if saves := self._saves[self._saves_told :]:
            self._saves_told += len(saves)
            timing["save_background_s"] = sum(save.seconds for save in saves)
            timing["save_bytes"] = sum(save.num_bytes for save in saves)
        self._tokens = clock.tokens
        head = {"step": clock.step, "kind": "train", "epoch": clock.epoch, "rows": clock.rows, "tokens": clock.tokens}
        self._file.append({**head, **values, "timing": timing})
        self._show(self._progress, self._progress.step, clock, values, timing)
        tracked = {f"train/{name}": value for name, value in values.items()} | {"train/epoch": clock.epoch}
        self._track(clock.step, tracked | {f"timing/{name}": timing[name] for name in _TRACKED if name in timing})

    def validation(self, clock: Clock, metrics: Metrics) -> None:
        """Record what was measured on the validation sets after `clock.step`. Raises as `step` does."""
        values = self._measure("val", clock, metrics)
        self._file.append({"step": clock.step, "kind": "val", **values})
        self._show(self._progress, self._progress.validation, clock.step, values)
        self._track(clock.step, {f"val/{name}": value for name, value in values.items()})

    def training_info(self, clock: Clock) -> dict[str, Any]:
        """step, epoch, consumed_samples, consumed_tokens, and what was measured at this very step: "train:<m>",
        "val:<m>", "val:<set>/<m>". Values of an earlier step are never repeated. May hold NaN and infinity."""
        return {
            "step": clock.step,
            "epoch": clock.epoch,
            "consumed_samples": clock.rows,
            "consumed_tokens": clock.tokens,
            **(self._measured if clock.step == self._step else {}),
        }

    def save_event(self, event: SaveEvent) -> None:
        """What the checkpoint manager tells. May be called from any thread, and after `close`."""
        if event.kind == "finished":
            self._saves.append(event)
        self._show(self._progress, self._progress.save_event, event)

    def message(self, text: str) -> None:
        """Show one line. May be called from any thread."""
        self._show(self._progress, self._progress.message, text)

    # ------------------------------------------------------------------------------------------------------- Saveable

    def settle(self) -> None:
        """Every line is with the operating system when the call that made it returns."""

    def snapshot(self) -> Writer:
        """Captures how far `metrics.jsonl` goes. The writer syncs it first, and the completions, so a checkpoint never
        knows of a line that a power cut can take away; if that fails, the save fails."""
        state = {"step": self._step, "tokens": self._tokens, "size": self._file.size()}

        def write(sink: Sink) -> None:
            self._file.sync()
            if self._completions is not None:
                self._completions.sync()
            sink.json("metrics.json", state)

        return write

    def restore(self, reader: Reader) -> None:
        """Go on after the checkpoint's step; what was recorded later is set aside."""
        state = reader.json("metrics.json")
        self._tokens = state["tokens"]
        self._resume(state["step"], state["size"], first_step=state["step"] + 1)

    def restart(self) -> None:
        """Begin at step 0. What a run recorded that ended before its first save is set aside."""
        self._resume(0, 0, first_step=0)

    def _resume(self, step: int, size: int, first_step: int) -> None:
        self._step = step
        self._file.cut(step, size)
        if self._completions is not None:
            self._completions.cut(step)
        for tracker in self._trackers:
            self._show(tracker, tracker.resume, first_step)

    def _measure(self, kind: str, clock: Clock, metrics: Metrics) -> dict[str, float]:
        if taken := sorted(_TAKEN & metrics.keys()):
            raise ValueError(f"metrics named {', '.join(taken)}: a line of metrics.jsonl uses these names for itself")
        values = {name: float(metric.value) for name, metric in metrics.items()}
        if clock.step != self._step:
            self._step, self._measured = clock.step, {}
        self._measured |= {f"{kind}:{name}": value for name, value in values.items()}
        return values

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            self._show(tracker, tracker.log, step, values)

    def _show(self, view: _View, call: Callable[..., None], *args: Any) -> None:
        """Let a view do its part. One that fails is switched off, and said so, once."""
        if view.name in self._switched_off:
            return
        try:
            call(*args)
        except (Exception, SystemExit) as error:  # rich exits the process when a pipe's reader is gone
            self._switched_off.add(view.name)
            logger.warning("%s is switched off, training goes on: %s: %s", view.name, type(error).__name__, error)
            if view is self._progress:
                with suppress(Exception, SystemExit):
                    view.close()  # ends the thread that draws, and gives standard output back
