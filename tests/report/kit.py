"""What the tests of the report share: a clock that tests move, one training step, and a checkpoint folder of JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from surefoot.config import LoggerConfig
from surefoot.report import RunReport
from surefoot.report.timeline import Timeline
from surefoot.types import BatchRef, Clock, Metric, Metrics


class HandClock:
    """A clock in seconds that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


class JsonFolder:
    """The part of a sink and a reader that the report uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def json(self, path: str, *value: Any) -> Any:
        file = self.folder / path
        if value:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value[0]))
            return None
        return json.loads(file.read_text())


def plain_console(width: int = 200) -> Console:
    return Console(file=io.StringIO(), width=width)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def make(
    run_dir: Path, *, total_steps: int | None = 10, console: Console | None = None, now: Any = None, **config: Any
) -> RunReport:
    """Quiet and without TensorBoard unless `config`, keys of the `logger` section, says otherwise."""
    parts: dict[str, Any] = {} if now is None else {"timeline": Timeline(now)}
    parts["completions"] = config.pop("completions", None)
    settings = LoggerConfig(**{"tensorboard": False, "progress": "off", **config})
    run_dir.mkdir(exist_ok=True)
    return RunReport(run_dir, settings, total_steps=total_steps, console=console or plain_console(), **parts)


def turn(report: RunReport, clock: Clock, metrics: Metrics | None = None) -> None:
    """One step of two rows with five tokens each; the loss follows from the step."""
    clock.advance(BatchRef(("a_g0", "b_g0"), ("a", "b"), (5, 5), (0, 0), frozenset()), epoch=clock.step // 4)
    report.step(clock, metrics or {"loss": Metric(1 / clock.step), "lr": Metric(1e-5)})


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_timing(run_dir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines_of(run_dir)]
