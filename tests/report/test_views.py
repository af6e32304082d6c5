"""TensorBoard and W&B, and that no view can stop a run."""

from __future__ import annotations

import doctest
import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import surefoot.report.text
from surefoot.errors import ConfigError
from surefoot.report.trackers import WandbTracker
from surefoot.run import Report
from surefoot.types import Clock, Metric, SaveEvent
from tests.report.kit import JsonFolder, lines_of, make, printed, turn


def points(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_holds_the_same_numbers_and_a_resume_leaves_no_point_twice(tmp_path: Path) -> None:
    clock = Clock()
    with make(tmp_path, tensorboard=True) as report:
        for _ in range(4):
            turn(report, clock)
            if clock.step == 2:
                report.validation(clock, {"loss": Metric(0.75)})
                report.snapshot()(checkpoint := JsonFolder(tmp_path / "step_2"))  # type: ignore[arg-type]
    assert points(tmp_path, "train/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]
    assert "timing/tokens_per_s" in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]

    resumed = make(tmp_path, tensorboard=True)
    resumed.restore(checkpoint)  # type: ignore[arg-type]
    with resumed:
        turn(resumed, Clock(step=2, tokens=20), {"loss": Metric(8.0)})
    assert points(tmp_path, "train/loss") == [(1, 1.0), (2, 0.5), (3, 8.0)]
    assert points(tmp_path, "val/loss") == [(2, 0.75)]


def test_a_restart_drops_all_points(tmp_path: Path) -> None:
    with make(tmp_path, tensorboard=True) as report:
        report.validation(Clock(), {"loss": Metric(4.0)})
        turn(report, Clock())
    again = make(tmp_path, tensorboard=True)
    again.restart()
    with again:
        turn(again, Clock(), {"loss": Metric(2.0)})
        again.validation(Clock(), {"loss": Metric(5.0)})
    assert points(tmp_path, "train/loss") == [(1, 2.0)]
    assert points(tmp_path, "val/loss") == [(0, 5.0)]


def test_a_view_that_fails_is_switched_off_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file in the folder's place")
    clock = Clock()
    with caplog.at_level(logging.WARNING), make(tmp_path, tensorboard=True) as report:
        for _ in range(3):
            turn(report, clock)
    assert [record.message.partition(",")[0] for record in caplog.records] == ["TensorBoard is switched off"]
    assert len(lines_of(tmp_path)) == 3


@pytest.mark.parametrize("progress", ["plain", "live"])
def test_a_console_whose_reader_is_gone_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, progress: str
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    clock = Clock()
    console = Console(file=Gone(), force_terminal=True)
    with caplog.at_level(logging.INFO), make(tmp_path, console=console, progress=progress) as report:
        for _ in range(3):
            turn(report, clock)
        report.message("said to nobody")
        report.save_event(SaveEvent("failed", 3, "tmp_step_3", message="disk full"))
    messages = [record.message for record in caplog.records]
    assert len([m for m in messages if "switched off" in m]) == 1
    assert len(lines_of(tmp_path)) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_goes_away_under_the_live_view_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class HangsUp(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    clock, file, stdout = Clock(), HangsUp(), sys.stdout
    console = Console(file=file, force_terminal=True)
    with caplog.at_level(logging.WARNING), make(tmp_path, console=console, progress="live") as report:
        turn(report, clock)
        file.gone = True
        report.message("to nobody")
        assert sys.stdout is stdout
        turn(report, clock)
    assert [record.message.partition(",")[0] for record in caplog.records] == ["live view is switched off"]
    assert len(lines_of(tmp_path)) == 2


def test_a_pipe_closed_by_its_reader_does_not_end_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.report.kit import *\n"
        "from rich.console import Console\n"
        f"with make(Path({str(tmp_path)!r}), console=Console(), progress=sys.argv[1]) as report:\n"
        "    clock = Clock(); sys.stdin.readline()\n"
        "    for _ in range(5): turn(report, clock); report.message('x' * 100)\n"
    )
    for progress in ("plain", "live"):
        command = [sys.executable, "-c", code, progress]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout and process.stdin and process.stderr
        process.stdout.close()
        process.stdin.write(b"go\n")
        process.stdin.close()
        errors = process.stderr.read().decode()
        process.stderr.close()
        process.wait()
        assert "switched off" in errors
        assert "Traceback" not in errors
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5] * 2


def test_training_info_never_repeats_an_older_validation(tmp_path: Path) -> None:
    clock = Clock()
    with make(tmp_path) as report:
        turn(report, clock)
        report.validation(clock, {"loss": Metric(1.5), "held_out/loss": Metric(1.75)})
        assert report.training_info(clock) == {
            **{"step": 1, "epoch": 0, "consumed_samples": 2, "consumed_tokens": 10},
            **{"train:loss": 1.0, "train:lr": 1e-5, "val:loss": 1.5, "val:held_out/loss": 1.75},
        }
        turn(report, clock)
        info = report.training_info(clock)
    assert info["train:loss"] == 0.5
    assert not [key for key in info if key.startswith("val:")]
    assert not [key for key in report.training_info(Clock(step=9)) if ":" in key]


def test_events_after_the_end_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(tmp_path, tensorboard=True, progress="live") as report:
        turn(report, Clock())
    report.save_event(SaveEvent("finished", 1, "step_1"))
    report.message("late")
    assert "late\n" in printed(report._console)
    assert caplog.text == ""


def test_the_report_keeps_the_loops_protocol() -> None:
    from surefoot.report import RunReport

    wanted = {name for name in vars(Report) if not name.startswith("_")} | {"settle", "snapshot", "restore"}
    assert wanted <= set(dir(RunReport))


@pytest.mark.parametrize("module", [None, SimpleNamespace()], ids=["missing", "a folder named wandb"])
def test_wandb_without_its_package_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match=r"logger\.wandb.*surefoot\[wandb\]"):
        make(tmp_path, wandb=True)


def test_wandb_goes_on_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Against a stand-in that records the calls: the service cannot be reached from a test."""
    calls: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []

    def define_metric(name: str, step_metric: str | None = None, hidden: bool | None = None) -> None: ...

    run = SimpleNamespace(log=logged.append, finish=lambda: None, define_metric=define_metric)

    def init(**options: Any) -> Any:
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **options: options))
    for _ in range(2):
        with make(tmp_path, wandb=True, wandb_mode="offline") as report:
            turn(report, Clock())
            report.validation(Clock(step=1), {"loss": Metric(3.0)})
    assert calls[0]["id"] == calls[1]["id"] == (tmp_path / "wandb_id").read_text()
    assert (calls[0]["mode"], calls[0]["resume"]) == ("offline", "allow")
    assert logged[0]["step"] == 1
    assert logged[0]["train/loss"] == 1.0
    assert logged[1] == {"step": 1, "val/loss": 3.0}
    assert caplog.text == ""  # every call was one that W&B knows


def test_a_wandb_that_cannot_start_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**options: Any) -> Any:
        raise RuntimeError("no route to host")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **options: options))
    with make(tmp_path, wandb=True) as report:
        turn(report, Clock())
    assert "Weights & Biases is switched off, training goes on: RuntimeError: no route to host" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_the_examples_in_the_documentation_are_right() -> None:
    assert doctest.testmod(surefoot.report.text).failed == 0
    assert WandbTracker.name != ""
