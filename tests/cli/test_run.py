"""`surefoot train` and `surefoot resume` as the terminal sees them."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot import build, cli
from surefoot.cli import app
from surefoot.errors import CheckpointError
from tests.helpers import runs


@pytest.mark.parametrize("command", ["train", "resume"])
def test_an_interrupt_before_the_run_begins_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, {"train": "start", "resume": "resume"}[command], interrupted)
    result = CliRunner().invoke(app, [command, str(runs.write_project(tmp_path))])
    assert result.exit_code == 130
    assert "interrupted before the run began" in result.output


def test_an_impossible_path_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["surefoot", "ckpt", "verify", "x" * 300])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert "File name too long" in capsys.readouterr().err


def test_modules_beside_the_configuration_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the installed command, whose own folder is the first that Python looks into."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["surefoot", "--version"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main()
    assert sys.path[-1] == str(tmp_path)


def test_a_folder_in_use_is_refused_before_anything_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = runs.write_project(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    monkeypatch.setattr(build, "start", lambda *args, **kwargs: pytest.fail("too late"))
    result = CliRunner().invoke(app, ["train", str(file)])
    assert isinstance(result.exception, CheckpointError)
    assert "holds files that are not a run's (notes.txt)" in str(result.exception)


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"surefoot {metadata.version('surefoot')}\n")


@pytest.mark.parametrize(
    ("limits", "longer"),
    [
        (["max_num_steps=2"], " max_num_steps=4"),
        (["max_num_steps=null", "max_num_epochs=1"], " max_num_epochs=2"),
        (["max_num_steps=5", "max_num_epochs=1"], " max_num_steps=10 max_num_epochs=2"),
    ],
)
def test_a_run_at_its_limit_says_how_to_go_on(memory_path: Path, limits: list[str], longer: str) -> None:
    file, run_dir = runs.write_project(memory_path), memory_path / "run"
    ended = CliRunner().invoke(app, ["train", str(file), f"run_dir={run_dir}", *limits])
    assert ended.exit_code == 0
    again = CliRunner().invoke(app, ["resume", str(run_dir)])
    assert again.exit_code == 0
    assert "nothing to do, the run is finished: " in again.output
    command = f"surefoot resume {run_dir}{longer}"
    for told in (ended, again):
        assert f"to go on, for longer: {command}" in told.output
    assert CliRunner().invoke(app, command.split()[1:]).exit_code == 0


def test_what_is_named_to_go_on_is_above_where_the_run_is(memory_path: Path) -> None:
    runs.trained(runs.write_project(memory_path), "max_num_steps=12")  # of 5 in an epoch
    ended = CliRunner().invoke(app, ["resume", str(memory_path / "run"), "max_num_steps=2", "max_num_epochs=1"])
    assert ended.exit_code == 0
    assert "max_num_steps=24 max_num_epochs=6" in ended.output


def test_a_run_is_resumed_in_its_own_folder(memory_path: Path) -> None:
    runs.trained(runs.write_project(memory_path), "max_num_steps=1")
    refused = CliRunner().invoke(app, ["resume", str(memory_path / "run"), f"run_dir={memory_path / 'other'}"])
    assert refused.exit_code != 0
    assert f"run_dir={memory_path / 'other'}: a run is resumed in its own folder" in str(refused.exception)
    assert not (memory_path / "other").exists()
