"""`describe` and `diff`, on the checkpoints of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot import loop
from surefoot.checkpoint.inspection import describe, diff
from tests.helpers import runs


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = runs.write_project(tmp_path_factory.mktemp("project"))
    runs.trained(file, "max_num_steps=2", "val_period=0")
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=4"))
    return file.parent / "run"


def test_a_checkpoint_does_not_differ_from_itself(run_dir: Path) -> None:
    assert diff(run_dir / "checkpoints/step_4", run_dir / "checkpoints/step_4") == []


def test_two_steps_differ_in_what_training_changed(run_dir: Path) -> None:
    found = {d.what: d for d in diff(run_dir / "checkpoints/step_2", run_dir / "checkpoints/step_4")}
    assert "tensors differ; most" in found["policy/weights/model.safetensors"].detail
    assert "step: 2 and 4" in found["clock/clock.json"].detail
    assert not [name for name in found if name.startswith("fingerprint")], "made of the same, though resumed"


def test_a_checkpoint_says_what_it_is(run_dir: Path) -> None:
    found = describe(run_dir / "checkpoints/step_4")
    assert (found.manifest.step, found.training_info["step"]) == (4, 4)
    assert found.parts["policy"][0] >= 6
    assert [entry.from_step for entry in found.manifest.lineage] == [0, 2]
