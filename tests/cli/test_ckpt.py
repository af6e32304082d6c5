from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from surefoot.checkpoint import directory, verify
from surefoot.cli import ckpt
from surefoot.errors import ConfigError, CorruptCheckpoint
from tests.checkpoint import runs


@pytest.mark.parametrize(
    ("section", "named"), [("5", "a mapping of keys to values, found 5"), ("{save_period: x}", "save_period")]
)
def test_a_configuration_edited_into_nonsense_is_named(tmp_path: Path, section: str, named: str) -> None:
    (tmp_path / "config.yaml").write_text(f"checkpointing: {section}\n")
    with pytest.raises(ConfigError, match=named):
        ckpt.list_(tmp_path, as_json=False)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_what_a_run_prunes_meanwhile_is_not_reported_as_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    manager = runs.manager(tmp_path)
    for step in (2, 4):
        manager.save(step, {"step": step}, runs.writers(step))
    manager.shutdown()

    def pruned_first(check: Any) -> Any:
        def checked(path: Path, *args: Any) -> Any:
            if path.name == "step_2" and path.exists():
                shutil.rmtree(path)
            return check(path, *args)

        return checked

    if command == "ls":
        monkeypatch.setattr(directory, "inspect_checkpoint", pruned_first(directory.inspect_checkpoint))
    else:
        monkeypatch.setattr("surefoot.checkpoint.verify_checkpoint", pruned_first(verify.verify_checkpoint))
    with pytest.raises(typer.Exit) as ended:
        (ckpt.list_ if command == "ls" else ckpt.verify)(tmp_path, as_json=False)
    assert ended.value.exit_code == 0


def test_what_checkpoints_are_ranked_by_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("checkpointing: {metric_name: 'val:reward', higher_is_better: true}\n")
    manager = runs.manager(tmp_path / "checkpoints")
    manager.save(2, {"step": 2, "val:reward": 0.625, "val:other": 9.0}, runs.writers(2))
    manager.shutdown()
    with pytest.raises(typer.Exit):
        ckpt.list_(tmp_path, as_json=False)
    said = capsys.readouterr().out
    assert "val:reward" in said and "0.625" in said and "val:other" not in said


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="there is no checkpoint"):
        ckpt.diff(tmp_path / "step_2", tmp_path / "step_2", as_json=False)


def test_where_a_runs_checkpoints_are_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CorruptCheckpoint, match=r"those of a run are in .*/checkpoints, as step_N"):
        ckpt.diff(tmp_path, tmp_path, as_json=False)
