"""Weights & Biases, for those who installed the extra `wandb`."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError
from surefoot.report.view import StepLine


class WandbView:
    """One W&B run per run folder, whatever the number of resumes: its id is kept in `<run_dir>/wandb_id`.

    W&B refuses points before the last step it knows, which a resume from an older checkpoint makes. So `step` is logged
    as a metric of its own and set as the x-axis, and nothing is refused; steps done twice show twice.

    Raises:
        ConfigError: the package is missing or cannot be imported.
    """

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, mode: str) -> None:
        self._run_dir, self._project, self._mode = run_dir, project, mode
        self._run: Any = None
        try:
            self._wandb: Any = importlib.import_module("wandb")
            self._init = self._wandb.init  # a folder named wandb, left by an earlier run, imports too and has no init
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"logger.wandb is true, but the package wandb cannot be imported ({error}): "
                "pip install 'surefoot[wandb]', or set logger.wandb to false"
            ) from error

    def resume(self, step: int) -> None:
        pass

    def step(self, line: StepLine) -> None:
        values = {f"train/{name}": value for name, value in line.metrics.items()} | {"train/epoch": line.epoch}
        self._log(line.step, values | {f"timing/{name}": value for name, value in line.timing.items()})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {f"val/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self._run is None:
            self._run = self._start()
        self._run.log({"step": step, **values})

    def _start(self) -> Any:
        kept = self._run_dir / "wandb_id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(4))
        run = self._init(
            project=self._project,
            name=self._run_dir.name,
            id=kept.read_text().strip(),
            resume="allow",
            mode=self._mode,
            dir=str(self._run_dir),
            settings=self._wandb.Settings(console="off", silent=True),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
