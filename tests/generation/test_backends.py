"""What the configuration says of the generator's backend, before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from tests.helpers import runs

VLLM = ("generation.backend=vllm", "generation.exact=false")


def test_vllm_must_be_told_that_it_is_not_exact(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation.exact: with vLLM a completion depends"):
        runs.config_of(runs.write_project(tmp_path, case="grpo"), "generation.backend=vllm")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["generation.temperature=2.5"], "temperatures from 0.01 to 2, or at 0, found 2.5"),
        (["evaluation.temperature=0.001"], "temperatures from 0.01 to 2, or at 0, found 0.001"),
        (["generation.min_p=0.1", "generation.top_p=0.9"], "vLLM applies min_p before top_p"),
    ],
)
def test_settings_that_vllm_would_change_are_refused(tmp_path: Path, settings: list[str], named: str) -> None:
    file = runs.write_project(tmp_path, case="grpo")
    correction = "grpo.importance_sampling_correction=token"
    with pytest.raises(ConfigError, match=named):
        runs.config_of(file, correction, *VLLM, *settings)
    runs.config_of(file, correction, *settings)  # the torch sampler does as told


def test_a_greedy_validation_is_fine(tmp_path: Path) -> None:
    config = runs.config_of(runs.write_project(tmp_path, case="grpo"), *VLLM, "evaluation.temperature=0")
    assert config.generation.backend == "vllm"  # type: ignore[attr-defined]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_named_before_anything_is_made(tmp_path: Path) -> None:
    file = runs.write_project(tmp_path, case="grpo")
    (tmp_path / "train.jsonl").unlink()  # it would be missed next
    with pytest.raises(ConfigError, match=r"vllm is not installed here. Install it \(pip install 'surefoot\[vllm\]'"):
        runs.started(file, *VLLM)
    assert not (tmp_path / "run").exists()
