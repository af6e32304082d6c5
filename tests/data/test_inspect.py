"""`surefoot data inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig
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
    assert "cut at 30 tokens: 1" in shown
    assert "the model reads" not in shown
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


def test_prompts_are_shown_with_what_rewards_get(model: str, data: str) -> None:
    asked = ["inspect", data, "--model", model, "--prompts", "--max-length", "30", "--columns", "prompt=question"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    shown = done.output.replace("\n", "")
    assert "columns for rewards: answer" in shown and "2 of 3 rows" in shown and "all of prompts" in shown
    (row, *_) = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["rows"]
    assert row["text"].endswith("<|im_start|>assistant\n") and not sum(row["loss_mask"])
    assert "rows that are --pairs" in CliRunner().invoke(app, [*asked, "--pairs"]).output


@pytest.mark.parametrize(
    ("reads", "given", "length"), [(64, [], 64), (4096, [], 512), (4096, ["--max-length", "999"], 999)]
)
def test_rows_are_cut_where_a_run_with_the_model_would_cut_them(
    model: str, data: str, reads: int, given: list[str], length: int
) -> None:
    LlamaConfig(max_position_embeddings=reads).save_pretrained(model)
    arguments = ["inspect", data, "--model", model, *given, *COLUMNS]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"cut at {length} tokens: {int(length == 64)} (the model reads at most {reads})" in done.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (found["max_length"], found["model_reads"], found["lengths"]["max"] <= length) == (length, reads, True)


def test_nothing_to_train_is_a_failure(model: str, data: str) -> None:
    done = CliRunner().invoke(app, ["inspect", data, "--model", model, "--max-length", "3", *COLUMNS])
    assert done.exit_code == 1
    assert isinstance(done.exception, DataError)
    assert "none of its 3 rows can be trained on" in str(done.exception)


def test_a_mapping_that_is_none(model: str, data: str) -> None:
    done = CliRunner().invoke(app, ["inspect", data, "--model", model, "--columns", "prompt"])
    assert done.exit_code == 2
    assert "expected ours=theirs" in done.output


def test_pairs_are_shown_side_by_side(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "good", "rejected": "bad", "margin": m} for m in (1.5, 2)]
    rows.append({"prompt": "q", "chosen": "same", "rejected": "same", "margin": 0})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["inspect", str(path), "--model", model, "--rows", "1"])
    assert done.exit_code == 0, done.output
    shown = done.output.replace("\n", "")
    assert "row 0, chosen (margin 1.5): " in shown
    assert "row 0, rejected (margin 1.5): " in shown
    assert "row 1" not in shown
    assert (
        "first example, as text, rejected (margin 1.5):<|im_start|>userq<|im_end|><|im_start|>assistantbad<|im_end|>"
        in shown
    )
    assert "dropped: 1 × both sides the same" in shown
    assert "2 pairs from 3 rows" in shown
    done = CliRunner().invoke(app, ["inspect", str(path), "--model", model, "--json"])
    shown = json.loads(done.stdout)
    assert shown["counts"]["kept"] == len(shown["pairs"]) == 2
    assert [pair["margin"] for pair in shown["pairs"]] == [1.5, 2]
    assert shown["pairs"][0]["chosen"]["text"].endswith("good<|im_end|>")
    assert sum(shown["pairs"][1]["rejected"]["loss_mask"]) == len(shown["pairs"][1]["rejected"]["ids"]) - shown[
        "pairs"
    ][1]["chosen"]["loss_mask"].index(1)


def test_binary_feedback_and_what_the_rows_are_can_be_said(model: str, tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "a", "label": True}) + "\n")
    done = CliRunner().invoke(app, ["inspect", str(path), "--model", model])
    assert isinstance(done.exception, DataError)
    assert "binary feedback" in str(done.exception)
    done = CliRunner().invoke(app, ["inspect", str(path), "--model", model, "--no-pairs"])
    assert done.exit_code == 0, done.output
    path.write_text(json.dumps({"context": "q", "completions": [{"rank": i, "completion": str(i)} for i in range(3)]}))
    for ranking, pairs in (("best_worst", 1), ("all_pairs", 3)):
        options = ["--model", model, "--json", "--ranking", ranking]
        done = CliRunner().invoke(app, ["inspect", str(path), *options])
        assert json.loads(done.stdout)["counts"]["kept"] == pairs
