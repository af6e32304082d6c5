"""NaN and infinity stop the run, and never reach a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import loop
from surefoot.checkpoint import LocalReader
from surefoot.errors import NonFiniteError, SaveFailed
from surefoot.run import Run
from tests.faults.project import Project, assert_all_sound, before_offer, fails, in_every_case
from tests.helpers import runs


def assert_all_finite(checkpoints: Path) -> None:
    for path in checkpoints.glob("step_*"):
        reader = LocalReader.open(path)
        for name in reader.files():
            if name.endswith(".safetensors"):
                for key, tensor in reader.tensors(name).items():
                    assert bool(torch.isfinite(tensor).all()), (path, name, key)


def plant(run: Run, value: float) -> None:
    engine: Any = run.kit.engines["policy"]
    with torch.no_grad():
        for name, tensor in engine._state().items():  # what is trained: under LoRA `weights` are merged copies
            if name.startswith("weights/"):
                tensor.view(-1)[-1] = value


def test_a_learning_rate_that_blows_everything_up(every_project: Project, memory_path: Path) -> None:
    run = every_project.start(
        memory_path / "run",
        "policy.optimizer.lr=1e38",
        "policy.scheduler.warmup_steps=0",
        "checkpointing.save_period=1",
        "val_period=0",
    )
    with pytest.raises((NonFiniteError, SaveFailed)) as caught:
        loop.train(run)
    error = caught.value if isinstance(caught.value, NonFiniteError) else caught.value.__cause__
    assert isinstance(error, NonFiniteError)
    assert run.clock.step < 6
    assert_all_sound(memory_path / "run" / "checkpoints")
    assert_all_finite(memory_path / "run" / "checkpoints")


@in_every_case("value", math.nan, math.inf, -math.inf)
def test_a_weight_that_breaks_the_loss(every_project: Project, memory_path: Path, value: float) -> None:
    """Planted in step 4: that step is not done, and the run goes on from step 2 as if nothing had happened."""
    run_dir = memory_path / "run"
    run = every_project.start(run_dir)
    engine: Any = run.kit.engines["policy"]
    train = engine.train

    def planted(*args: Any) -> Any:
        if run.clock.step == 3:
            plant(run, value)
        return train(*args)

    engine.train = planted
    with pytest.raises(NonFiniteError):
        loop.train(run)
    assert run.clock.step == 3
    assert {path.name for path in (run_dir / "checkpoints").glob("step_*")} == {"step_2"}
    assert_all_finite(run_dir / "checkpoints")
    every_project.assert_goes_on(run_dir, 2)


@in_every_case("value", math.nan, math.inf)
def test_a_weight_that_breaks_no_loss_yet(every_project: Project, memory_path: Path, value: float) -> None:
    """It is seen while it is written: that save fails, and the one before stays the newest."""
    run_dir = memory_path / "run"
    run = every_project.start(run_dir)
    before_offer(run, 4, lambda: plant(run, value))
    assert isinstance(fails(run, after=4, save=4).__cause__, NonFiniteError)
    assert_all_sound(run_dir / "checkpoints")
    assert_all_finite(run_dir / "checkpoints")
    every_project.assert_goes_on(run_dir, 2)


def test_what_is_not_finite_is_not_rescued_either(project: Project, memory_path: Path) -> None:
    run_dir, rescue = memory_path / "run", memory_path / "rescue"
    run = project.start(run_dir, f"checkpointing.rescue_dir={rescue}")
    before_offer(run, 4, lambda: plant(run, math.nan))
    failure = fails(run, after=4, save=4)
    assert "The rescue of step 4 failed too" in str(failure)
    assert not list(rescue.glob("step_*"))
    assert runs.resumed(run_dir).clock.step == 2
