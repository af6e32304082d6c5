"""What each algorithm says that its validation measures is what a real validation measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.config_file import algorithm_config
from tests.helpers import runs


@pytest.mark.parametrize("case", runs.CASES)
def test_measures(case: str, tmp_path: Path) -> None:
    file = runs.write_project(tmp_path, case=case)
    runs.trained(file, "max_num_steps=1", "val_at_end=true", "checkpointing.enabled=false")
    line = runs.metric_lines(tmp_path / "run")[-1]
    assert line.pop("kind") == "val"
    line.pop("step")
    names = algorithm_config(runs.config_of(file)).measures()
    assert sorted(line) == sorted([*names, *(f"heldout/{name}" for name in names)])
    for name in names:
        runs.config_of(file, f"checkpointing.metric_name=val:{name}")
        runs.config_of(file, f"checkpointing.metric_name=val:heldout/{name}")
