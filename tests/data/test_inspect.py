"""`surefoot data inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.cli.data import app
from surefoot.errors import DataError
from tests.helpers import tokenizers as tiny


@pytest.fixture
def model(tmp_path: Path) -> str:
    tiny.byte_level().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"question": "q" * n, "answer": "a" * n} for n in (1, 2, 40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "a.jsonl")


COLUMNS = ["--columns", "prompt=question", "--columns", "completion=answer"]


def test_tokens_lengths_and_counts_are_shown(model: str, data: str) -> None:
    done = CliRunner().invoke(app, ["inspect", data, "--model", model, "--max-length", "30", *COLUMNS])
    assert done.exit_code == 0, done.output
    shown = done.output.replace("\n", "")
    assert "<|im_start|>|" in shown
    assert "padding" in shown
    assert "lengths in tokens: min" in shown
    assert "dropped: 1 × nothing to train within 30 tokens" in shown
    assert "cut: 1" in shown
    assert "2 of 3 rows" in shown


def test_json_for_programs(model: str, data: str) -> None:
    done = CliRunner().invoke(app, ["inspect", data, "--model", model, "--json", "--rows", "1", *COLUMNS])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    (row,) = shown["rows"]
    assert row["text"].endswith("assistant\na<|im_end|>")
    assert sum(row["loss_mask"]) == 2
    assert len(row["ids"]) == len(row["loss_mask"]) == shown["lengths"]["min"]
    assert shown["counts"]["kept"] == 3


def test_nothing_to_train_is_a_failure(model: str, data: str) -> None:
    done = CliRunner().invoke(app, ["inspect", data, "--model", model, "--max-length", "3", *COLUMNS])
    assert done.exit_code == 1
    assert isinstance(done.exception, DataError)
    assert "none of its 3 rows can be trained on" in str(done.exception)


def test_a_mapping_that_is_none(model: str, data: str) -> None:
    done = CliRunner().invoke(app, ["inspect", data, "--model", model, "--columns", "prompt"])
    assert done.exit_code == 2
    assert "expected ours=theirs" in done.output
