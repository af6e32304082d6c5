"""What `docs/rewards.md` shows, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from surefoot.config import DataConfig
from surefoot.rollout.environments import EnvironmentConfig, environment_names, load_environment
from surefoot.rollout.reward_calls import STYLES
from surefoot.rollout.reward_config import RewardConfig
from surefoot.rollout.reward_functions import BUILT_IN

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_tables_are_complete() -> None:
    for name in [*BUILT_IN, *STYLES, *environment_names()]:
        assert f"| `{name}` |" in PAGE


def test_the_sections_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_module.py").write_text(blocks("python")[1])
    monkeypatch.syspath_prepend(tmp_path)
    for block in map(yaml.safe_load, blocks("yaml")):
        for section in block.get("rewards", []):
            RewardConfig(**section)
        if "environment" in block:
            load_environment(EnvironmentConfig(**block["environment"]))
        if "data" in block:
            DataConfig(**block["data"])


def test_a_function_from_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(blocks("python")[0])
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "{'final_number': [1.0, 0.0], 'short': [1.0, None]} [1.5, 0.0]\n"


def test_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_of_the_page.py").write_text(blocks("python")[1])
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(name="echo_of_the_page.Echo", options={"num_rounds": 3})
    echo = load_environment(config)()
    (row,) = echo.rows(1, seed=7)
    assert echo.reset(row) == [{"role": "user", "content": "say 7"}]
    steps = [echo.step({"role": "assistant", "content": text}) for text in ("7", "8", "77")]
    assert [(step.reward, step.done) for step in steps] == [(1.0, False), (0.0, False), (1.0, True)]
