"""`surefoot train` and `surefoot resume` as the terminal sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot import build
from surefoot.cli import app
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
