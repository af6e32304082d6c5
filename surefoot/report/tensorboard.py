"""TensorBoard scalars under `<run_dir>/tensorboard`, written by the tensorboard package's own event writer.

Not `torch.utils.tensorboard`: it imports an image stack that scalars do not need. The import and the first file come
with the first step, so a run that fails in its preparation leaves no empty event file and starts sooner.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.report.view import StepLine

# Events wait here while the disk is slow, so that a step does not; a step is one event.
_QUEUED_EVENTS = 1000
_FLUSH_PERIOD_S = 10
# The event writer's checksum is written in Python, byte by byte: every tag costs. All timings are in metrics.jsonl.
_TIMINGS = ("step_s", "tokens_per_s", "save_s")


class TensorBoardView:
    """Tags are `train/<metric>`, `val/<metric>` and `timing/<name>`."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge_from: int | None = None
        self._writer: Any = None

    def resume(self, step: int) -> None:
        self._purge_from = step + 1

    def step(self, line: StepLine) -> None:
        tags = {f"train/{name}": value for name, value in line.metrics.items()} | {"train/epoch": line.epoch}
        self._write(line.step, tags | {f"timing/{name}": line.timing[name] for name in _TIMINGS if name in line.timing})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, {f"val/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, tags: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _open(self) -> Any:
        """On resume, tell readers to drop the points that the run is about to make again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self._folder), _QUEUED_EVENTS, _FLUSH_PERIOD_S)
        if self._purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=time.time(), step=self._purge_from, session_log=start))
        return writer
