"""TensorBoard and Weights & Biases: the same numbers under the same names, each in its own place."""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError

_QUEUED_EVENTS = 1000  # wait here while the disk is slow, so that a step does not
_FLUSH_PERIOD_S = 10


class TensorBoardTracker:
    """Written by the tensorboard package's own event writer. `torch.utils.tensorboard` makes an event of every number,
    which takes a step of a small model a tenth longer.

    The import and the first file come with the first number: a run that fails in its preparation leaves none.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first_step = 0
        self._writer: Any = None

    def resume(self, first_step: int) -> None:
        """Readers are told to drop the points from `first_step` on: the run is about to make them again."""
        self._first_step = first_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder), _QUEUED_EVENTS, _FLUSH_PERIOD_S)
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=self._first_step, session_log=start))
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """One W&B run per run folder, whatever the number of resumes: its id is kept in `<run_dir>/wandb_id`.

    W&B refuses points before the last step it knows, which a resume from an older checkpoint makes. So `step` is logged
    as a metric of its own and set as the x-axis, and nothing is refused; steps done twice show twice.

    Raises:
        ConfigError: the package is missing or cannot be imported.
    """

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, mode: str) -> None:
        self._run_dir = run_dir
        self._options = {"project": project, "mode": mode, "name": run_dir.name, "dir": str(run_dir), "resume": "allow"}
        self._run: Any = None
        try:
            self._wandb: Any = importlib.import_module("wandb")
            self._init = self._wandb.init  # a folder named wandb, left by an earlier run, imports too and has no init
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"logger.wandb is true, but the package wandb cannot be imported ({error}): "
                "pip install 'surefoot[wandb]', or set logger.wandb to false"
            ) from error

    def resume(self, first_step: int) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            kept = self._run_dir / "wandb_id"
            if not kept.exists():
                kept.write_text(secrets.token_hex(4))
            settings = self._wandb.Settings(console="off", silent=True)
            self._run = self._init(id=kept.read_text().strip(), settings=settings, **self._options)
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
