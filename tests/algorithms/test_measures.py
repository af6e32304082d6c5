"""What each algorithm says that its validation measures is what a real validation measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.config_file import algorithm_config, algorithm_names
from tests.helpers import runs


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_measures(algorithm: str, tmp_path: Path) -> None:
    case = next(case for case, (name, _) in runs.CASES.items() if name == algorithm)
    file = runs.write_project(tmp_path, case=case)
    runs.trained(file, "max_num_steps=1", "val_at_end=true", "checkpointing.enabled=false")
    line = runs.metric_lines(tmp_path / "run")[-1]
    assert line.pop("kind") == "val"
    line.pop("step")
    names = algorithm_config(runs.config_of(file)).measures()
    if not names:
        pytest.skip(f"{algorithm} cannot say it by its section: other sections name what it measures")
    assert sorted(line) == sorted([*names, *(f"heldout/{name}" for name in names)])
    for name in names:
        runs.config_of(file, f"checkpointing.metric_name=val:{name}")
        runs.config_of(file, f"checkpointing.metric_name=val:heldout/{name}")
