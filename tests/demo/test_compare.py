"""The comparison of two runs finds any difference there is, says where, and finds none where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surefoot.demo.compare import compare_runs

STEP = 4
WEIGHTS = f"checkpoints/step_{STEP}/policy/weights/model.safetensors"
CLOCK = f"checkpoints/step_{STEP}/clock/clock.json"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that differ only in what is theirs: timings, and what says which run it is."""
    for name in ("one", "other"):
        checkpoint = tmp_path / name / "checkpoints" / f"step_{STEP}"
        for folder in ("policy/weights", "policy/optimizer", "clock"):
            (checkpoint / folder).mkdir(parents=True)
        tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
        save_file(tensors, checkpoint / "policy/weights/model.safetensors")
        save_file({"exp_avg.a": torch.zeros(2, 3)}, checkpoint / "policy/optimizer/state.safetensors")
        (checkpoint / "clock/clock.json").write_text(json.dumps({"step": STEP, "rows": 128}))
        (checkpoint / "manifest.json").write_text(json.dumps({"run_id": name}))
        lines = [{"step": s, "kind": "train", "loss": 1 / s, "timing": {"wall_s": len(name) / s}} for s in (1, 2, 3, 4)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "one", tmp_path / "other"


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    data = path.read_bytes()
    path.write_bytes(change(data))
    assert path.read_bytes() != data


def test_equal_runs_are_the_same(runs: tuple[Path, Path]) -> None:
    found = compare_runs(*runs, STEP)
    assert found.differences == []
    assert (found.num_files, found.num_lines) == (3, 4)
    assert found.num_bytes > 4 * (6 + 3 + 6)


@pytest.mark.parametrize("from_end", range(1, 4 * 9 + 1))
def test_one_flipped_bit_of_a_tensor_is_found(runs: tuple[Path, Path], from_end: int) -> None:
    edit(
        runs[1] / WEIGHTS,
        lambda data: data[:-from_end] + bytes([data[-from_end] ^ 1]) + data[len(data) - from_end + 1 :],
    )
    assert compare_runs(*runs, STEP).differences == ["policy/weights/model.safetensors"]


def test_a_file_that_differs_outside_its_tensors_is_found(runs: tuple[Path, Path]) -> None:
    optimizer = "policy/optimizer/state.safetensors"
    save_file({"exp_avg.a": torch.zeros(2, 3)}, runs[1] / f"checkpoints/step_{STEP}" / optimizer, {"x": "y"})
    assert compare_runs(*runs, STEP).differences == [optimizer]


def test_a_changed_state_is_found(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / CLOCK, lambda data: data.replace(b"128", b"127"))
    assert compare_runs(*runs, STEP).differences == ["clock/clock.json"]


def test_a_missing_file_is_found(runs: tuple[Path, Path]) -> None:
    shutil.rmtree(runs[1] / f"checkpoints/step_{STEP}/clock")
    assert compare_runs(*runs, STEP).differences == ["clock/clock.json"]
    assert compare_runs(runs[1], runs[0], STEP).differences == ["clock/clock.json"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"loss": 0.5', b'"loss": 0.5000000000000001'),
        (b'"loss": 0.5', b'"loss": -0.5'),
        (b'"step": 2', b'"step": 5'),
        (b'"loss": 0.5', b'"lost": 0.5'),
    ],
)
def test_a_changed_metric_names_its_line(runs: tuple[Path, Path], before: bytes, after: bytes) -> None:
    edit(runs[1] / "metrics.jsonl", lambda data: data.replace(before, after, 1))
    assert compare_runs(*runs, STEP).differences == ["metrics.jsonl line 2"]


def test_zero_is_not_minus_zero(runs: tuple[Path, Path]) -> None:
    edit(runs[0] / "metrics.jsonl", lambda data: data.replace(b"0.5", b"0.0", 1))
    edit(runs[1] / "metrics.jsonl", lambda data: data.replace(b"0.5", b"-0.0", 1))
    assert compare_runs(*runs, STEP).differences == ["metrics.jsonl line 2"]


def test_a_missing_line_is_found(runs: tuple[Path, Path]) -> None:
    edit(runs[1] / "metrics.jsonl", lambda data: data[: data[:-1].rindex(b"\n") + 1])
    assert compare_runs(*runs, STEP).differences == ["metrics.jsonl line 4"]
    assert compare_runs(runs[1], runs[0], STEP).differences == ["metrics.jsonl line 4"]
