"""The loop's own decisions: when it ends, when it validates, what it saves, and with which exit status."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from surefoot import loop
from surefoot.errors import NonFiniteError, NothingTrained
from surefoot.run import Run
from tests.helpers import runs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return runs.write_project(tmp_path)


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))


def steps_validated(run_dir: Path) -> list[int]:
    return [line["step"] for line in runs.metric_lines(run_dir) if line["kind"] == "val"]


def test_ends_at_max_num_steps_with_the_last_step_saved(file: Path) -> None:
    outcome = runs.trained(file, "max_num_steps=5")
    assert (outcome.steps, outcome.exit_code) == (5, 0)
    assert steps_saved(file.parent / "run") == [2, 4, 5]


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (("max_num_steps=null", "max_num_epochs=1"), 5),
        (("max_num_steps=null", "max_num_epochs=2"), 10),
        (("max_num_steps=7", "max_num_epochs=1"), 5),
        (("max_num_steps=3", "max_num_epochs=9"), 3),
        (("max_num_steps=8",), 8),  # more than an epoch: the next one begins
    ],
)
def test_ends_at_whichever_limit_comes_first(file: Path, limits: tuple[str, ...], steps: int) -> None:
    outcome = runs.trained(file, *limits)
    assert outcome.steps == steps
    assert ("max_num_steps" if steps in (3, 8) else "used up") in outcome.reason


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("val_period=2",), [2, 4]),
        (("val_period=0", "val_at_end=true"), [5]),
        (("val_period=0", "val_at_start=true"), [0]),
        (("val_period=5", "val_at_start=true", "val_at_end=true"), [0, 5]),
        (("val_period=2", "val_at_end=true", "max_num_steps=null", "max_num_epochs=1"), [2, 4, 5]),
        (("val_period=0",), []),
    ],
)
def test_validates_when_told(file: Path, overrides: tuple[str, ...], steps: list[int]) -> None:
    runs.trained(file, "max_num_steps=5", *overrides)
    assert steps_validated(file.parent / "run") == steps


def test_the_last_checkpoint_has_the_last_validation(file: Path) -> None:
    runs.trained(
        file, "max_num_steps=null", "max_num_epochs=1", "checkpointing.save_period=5", "val_period=0", "val_at_end=true"
    )
    info = json.loads((file.parent / "run/checkpoints/step_5/training_info.json").read_text())
    assert "val:loss" in info


def test_nothing_trained_is_never_a_success(file: Path) -> None:
    run = runs.started(file)
    run.source.take = lambda clock, poll: None  # type: ignore[method-assign]
    with pytest.raises(NothingTrained, match="no training step was done"):
        loop.train(run)


def at_step(run: Run, step: int, call: Any) -> None:
    """Run `call` when this step has been trained, before it is reported."""
    report = run.report.step

    def stepping(clock: Any, metrics: Any) -> None:
        if clock.step == step:
            call()
        report(clock, metrics)

    run.report.step = stepping  # type: ignore[method-assign]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_last_step_and_ends(file: Path, number: int, code: int) -> None:
    run = runs.started(file, "max_num_steps=100", "checkpointing.save_period=50", "val_period=0")
    at_step(run, 3, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    outcome = loop.train(run)
    assert (outcome.steps, outcome.exit_code) == (3, code)
    assert steps_saved(file.parent / "run") == [3]
    assert signal.getsignal(number) is before


def test_a_signal_in_a_validation_leaves_it_to_the_resumed_run(file: Path) -> None:
    run = runs.started(file, "max_num_steps=4", "val_period=3", "sft.val_batch_size=1")
    evaluate = run.algorithm.evaluate

    def interrupted(kit: Any, poll: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(kit, poll)

    run.algorithm.evaluate = interrupted  # type: ignore[method-assign]
    run_dir = file.parent / "run"
    assert loop.train(run).exit_code == 143
    assert steps_saved(run_dir) == [2, 3]
    assert steps_validated(run_dir) == []
    loop.train(runs.resumed(run_dir))
    assert steps_validated(run_dir) == [3]
    kinds = [(line["step"], line["kind"]) for line in runs.metric_lines(run_dir)]
    assert kinds == [(1, "train"), (2, "train"), (3, "train"), (3, "val"), (4, "train")]


def test_a_signal_before_the_first_step_saves_nothing(file: Path) -> None:
    run = runs.started(file)
    take = run.source.take

    def signalled(clock: Any, poll: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        poll()
        return take(clock, poll)

    run.source.take = signalled  # type: ignore[method-assign]
    outcome = loop.train(run)
    assert (outcome.steps, outcome.exit_code) == (0, 143)
    assert steps_saved(file.parent / "run") == []


def test_a_near_deadline_saves_and_ends_well(file: Path) -> None:
    run = runs.started(file, "max_num_steps=100", "checkpointing.checkpoint_must_save_by='30:00:00:00'")
    at_step(run, 3, lambda: setattr(run.stop, "_deadline_s", 0.0))
    outcome = loop.train(run)
    assert (outcome.steps, outcome.exit_code) == (3, 0)
    assert "checkpoint_must_save_by" in outcome.reason
    assert steps_saved(file.parent / "run") == [2, 3]


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(file: Path) -> None:
    run = runs.started(file, "max_num_steps=5", "val_period=0")
    at_step(run, 3, lambda: next(iter(run.kit.engines["policy"].weights().values())).fill_(float("nan")))
    with pytest.raises(NonFiniteError, match="loss is nan"):
        loop.train(run)
    assert steps_saved(file.parent / "run") == [2]
