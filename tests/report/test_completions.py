"""`completions/`: readable by anyone, whole or absent, and never rewritten by a resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from surefoot.errors import StorageFailed
from surefoot.report.completions import Completions
from tests.report import kit


def columns(step: int) -> dict[str, Any]:
    return {
        "id": ["e0_d0_g0", "e0_d0_g1", "e0_d0_g2"],
        "prompt": ["1+1=", "1+1=", "1+1="],
        "completion": ["2", "é\n☺\x00", ""],
        "reward": torch.tensor([1.0, float("nan"), -0.5]),
        "advantage": torch.tensor([0.5, 0.0, -0.5]),
        "version": torch.tensor([step - 1] * 3),
    }


def written(folder: Path, *steps: int) -> Completions:
    completions = Completions(folder / "completions")
    for step in steps:
        completions.write(step, columns(step))
    return completions


def test_a_file_reads_as_what_was_said(tmp_path: Path) -> None:
    assert not (tmp_path / "completions").exists()
    written(tmp_path, 3)
    (file,) = (tmp_path / "completions").iterdir()
    assert file.name == "step_3.parquet"
    rows = pq.read_table(file).to_pylist()
    assert [*rows[0]] == ["id", "prompt", "completion", "reward", "advantage", "version"]
    assert [row["completion"] for row in rows] == ["2", "é\n☺\x00", ""]
    assert [row["reward"] for row in rows] == [1.0, None, -0.5]
    assert {row["version"] for row in rows} == {2}


def test_types_are_the_columns_own(tmp_path: Path) -> None:
    """Whatever the values look like, long ones too."""
    texts = {"completion": ["2024-01-01", "2024-01-02", "x" * 5_000_000], "id": ["1", "2", "3"]}
    numbers = {"reward": torch.full((3,), float("nan")), "advantage": torch.ones(3)}
    Completions(tmp_path / "completions").write(1, columns(1) | texts | numbers)
    table = pq.read_table(tmp_path / "completions" / "step_1.parquet")
    assert {field.name: str(field.type) for field in table.schema} == {
        **dict.fromkeys(("id", "prompt", "completion"), "string"),
        **dict.fromkeys(("reward", "advantage"), "double"),
        "version": "int64",
    }
    assert table["completion"].to_pylist() == texts["completion"]


def test_the_best_and_the_worst_are_shown_on_the_console(tmp_path: Path) -> None:
    console, completions = kit.plain_console(), Completions(tmp_path / "completions")
    report = kit.make(tmp_path, console=console, progress="plain", log_period=2, completions=completions)
    with report:
        for step in (1, 2):
            completions.write(step, columns(step))
    lines = kit.printed(console).splitlines()
    assert lines[:2] == [
        "best  reward 1  advantage +0.50  '1+1=' -> '2'",
        "worst  reward -0.5000  advantage -0.50  '1+1=' -> ''",
    ]
    assert len(lines) == 2


def test_of_equals_the_one_that_taught_most_is_shown_and_only_the_policys_own(tmp_path: Path) -> None:
    seen: list[Any] = []
    completions = Completions(tmp_path / "completions")
    completions.show = lambda step, rollouts: seen.append([row["completion"] for row in rollouts.values()])
    row = {"id": list("abc"), "completion": list("abc"), "reward": torch.ones(3)}
    completions.write(1, row | {"advantage": torch.tensor([0.0, 2.0, -1.0])})
    completions.write(2, row | {"answered_by": ["dataset", "policy", "teacher"]})
    completions.write(3, row | {"answered_by": ["dataset"] * 3})
    assert seen == [["b", "c"], ["b"]]


def test_a_step_in_which_all_abstain_shows_nothing(tmp_path: Path) -> None:
    seen: list[Any] = []
    completions = Completions(tmp_path / "completions")
    completions.show = lambda step, rollouts: seen.append(rollouts)
    completions.write(1, columns(1) | {"reward": torch.full((3,), float("nan"))})
    completions.write(2, columns(2) | {"reward": torch.tensor([float("nan"), 1.0, float("nan")])})
    assert [list(rollouts) for rollouts in seen] == [["best"]]


def test_a_resume_sets_later_steps_aside(tmp_path: Path) -> None:
    for expected in ("completions.after_step_2.1", "completions.after_step_2.2"):
        completions = written(tmp_path, 1, 2, 3, 10)
        completions.cut(2)
        assert sorted(path.name for path in (tmp_path / expected).iterdir()) == ["step_10.parquet", "step_3.parquet"]
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == ["step_1.parquet", "step_2.parquet"]
    completions.cut(2)
    assert len(list(tmp_path.iterdir())) == 3, "there is nothing more to set aside"
    Completions(tmp_path / "none").cut(0)


def test_what_a_checkpoint_knows_of_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(f"{Path(f'/proc/self/fd/{fd}').readlink()}"), sync(fd))[1]
    )
    completions = written(tmp_path, 1, 2)
    (tmp_path / "completions" / "step_1.parquet").unlink()
    completions.sync()
    assert [Path(path).name for path in synced] == ["step_2.parquet", "completions"]
    completions.sync()
    assert len(synced) == 2


def test_a_folder_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "completions").write_text("a file")
    with pytest.raises(StorageFailed, match=r"cannot write .*step_1\.parquet"):
        written(tmp_path, 1)
