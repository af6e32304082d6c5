"""`metrics.jsonl`: what a line holds, and that a resume neither loses, repeats nor rewrites one."""

from __future__ import annotations

import json
import logging
import math
import os
from io import FileIO
from pathlib import Path

import pytest

from surefoot.errors import SurefootError
from surefoot.report import RunReport
from surefoot.report.metrics_file import MetricsFile
from surefoot.types import Clock, Metric
from tests.report.kit import HandClock, JsonFolder, lines_of, make, turn, without_timing


def save(report: RunReport, folder: Path) -> JsonFolder:
    checkpoint = JsonFolder(folder)
    report.snapshot()(checkpoint)  # type: ignore[arg-type]
    return checkpoint


def clock_at(step: int) -> Clock:
    return Clock(step=step, version=step, epoch=0, rows=2 * step, tokens=10 * step)


def test_lines_hold_what_was_measured_and_timings_stay_apart(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        clock = Clock()
        turn(report, clock, {"loss": Metric(0.1 + 0.2), "num_tokens": Metric(7.0, reduce="sum")})
        report.validation(clock, {"loss": Metric(1.5), "held_out/loss": Metric(1.5)})
    train, val = lines_of(tmp_path)
    timing = train.pop("timing")
    assert train == {
        **{"step": 1, "kind": "train", "epoch": 0, "rows": 2, "tokens": 10},
        **{"loss": 0.30000000000000004, "num_tokens": 7.0},
    }
    assert val == {"step": 1, "kind": "val", "loss": 1.5, "held_out/loss": 1.5}
    assert {"wall_s", "step_s", "tokens_per_s"} <= timing.keys()


@pytest.mark.parametrize("value", [5e-324, 1.7976931348623157e308, 1 / 3, -0.0, 2**53 + 1.0])
def test_numbers_round_trip_exactly(tmp_path: Path, value: float) -> None:
    with make(tmp_path) as report:
        turn(report, Clock(), {"loss": Metric(value)})
    read = lines_of(tmp_path)[0]["loss"]
    assert read == value
    assert math.copysign(1, read) == math.copysign(1, value)


def test_what_json_cannot_say_is_text(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not JSON: {constant}")

    with make(tmp_path) as report:
        turn(report, Clock(), {"a": Metric(math.nan), "b": Metric(math.inf), "c": Metric(-math.inf)})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["a"], line["b"], line["c"]) == ("NaN", "Infinity", "-Infinity")


def test_a_metric_may_not_take_the_lines_own_names(tmp_path: Path) -> None:
    with make(tmp_path) as report, pytest.raises(ValueError, match="step, tokens"):
        turn(report, Clock(), {"tokens": Metric(1.0), "step": Metric(2.0), "loss": Metric(1.0)})


def test_a_resumed_run_has_the_lines_of_the_straight_run(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with make(straight) as report:
        clock = Clock()
        for _ in range(6):
            turn(report, clock)
    with make(broken) as report:
        clock = Clock()
        for _ in range(3):
            turn(report, clock)
        checkpoint = save(report, tmp_path / "step_3")
        for _ in range(2):
            turn(report, clock)
    before = (broken / "metrics.jsonl").read_bytes()

    now = HandClock()
    resumed = make(broken, now=now)
    resumed.restore(checkpoint)  # type: ignore[arg-type]
    with resumed:
        clock = clock_at(3)
        for _ in range(3):
            now.passes(2)
            turn(resumed, clock)

    assert without_timing(broken) == without_timing(straight)
    after, aside = (broken / "metrics.jsonl").read_bytes(), broken / "metrics.after_step_3.1.jsonl"
    kept = before[: -len(aside.read_bytes())]
    assert after.startswith(kept)
    assert kept + aside.read_bytes() == before
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == [4, 5]
    assert lines_of(broken)[3]["timing"]["tokens_per_s"] == 5  # the step's 10 tokens in 2 s, not the run's 40


def test_a_later_resume_from_the_same_step_overwrites_no_set_aside_file(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        clock = Clock()
        turn(report, clock)
        checkpoint = save(report, tmp_path / "step_1")
        turn(report, clock)
    for _ in range(2):
        resumed = make(tmp_path)
        resumed.restore(checkpoint)  # type: ignore[arg-type]
        with resumed:
            turn(resumed, clock_at(1), {"loss": Metric(7.0)})
    assert json.loads((tmp_path / "metrics.after_step_1.1.jsonl").read_text())["loss"] == 0.5
    assert json.loads((tmp_path / "metrics.after_step_1.2.jsonl").read_text())["loss"] == 7.0
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_a_resume_with_nothing_to_cut_changes_nothing(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        turn(report, Clock())
        checkpoint = save(report, tmp_path / "step_1")
    before = (tmp_path / "metrics.jsonl").stat()
    make(tmp_path).restore(checkpoint)  # type: ignore[arg-type]
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(tmp_path.glob("*.after_step_*")) == []


def test_a_run_that_died_before_its_first_save_starts_with_an_empty_file(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        report.validation(Clock(), {"loss": Metric(3.0)})
        turn(report, Clock())
    again = make(tmp_path)
    again.restart()
    with again:
        turn(again, Clock())
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    assert len((tmp_path / "metrics.after_step_0.1.jsonl").read_text().splitlines()) == 2


def test_half_a_line_of_a_run_that_died_before_its_first_save_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "ki')
    again = make(tmp_path)
    again.restart()
    with again:
        turn(again, Clock())
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    assert (tmp_path / "metrics.after_step_0.1.jsonl").read_bytes() == b'{"step": 1, "ki'


def test_half_a_line_after_the_checkpoint_goes_with_the_later_lines(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        turn(report, Clock())
        checkpoint = save(report, tmp_path / "step_1")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2')
    make(tmp_path).restore(checkpoint)  # type: ignore[arg-type]
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    assert (tmp_path / "metrics.after_step_1.1.jsonl").read_bytes() == b'{"step": 2'


@pytest.mark.parametrize("damage", ["missing", "shorter", "edited"])
def test_a_file_that_is_not_as_the_checkpoint_left_it_is_kept_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with make(tmp_path) as report:
        clock = Clock()
        for _ in range(3):
            turn(report, clock)
        checkpoint = save(report, tmp_path / "step_3")
        turn(report, clock)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":
        path.write_bytes(b"".join(lines[:2])[:-5])
    else:
        path.write_bytes(b"".join([lines[0], b"a note of mine\n", *lines[2:]]))

    resumed = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        resumed.restore(checkpoint)  # type: ignore[arg-type]
    assert "not as the checkpoint of step 3 left it" in caplog.text
    with resumed:
        turn(resumed, clock_at(3), {"loss": Metric(9.0)})
    kept = {"missing": [], "shorter": lines[:1], "edited": [lines[0], b"a note of mine\n", lines[2]]}[damage]
    after = path.read_bytes().splitlines(keepends=True)
    assert after[:-1] == kept
    assert json.loads(after[-1])["loss"] == 9.0


def test_the_writer_writes_what_was_captured_not_what_is_there_now(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        clock = Clock()
        turn(report, clock)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        writer = report.snapshot()
        turn(report, clock)
    writer(checkpoint := JsonFolder(tmp_path / "step_1"))  # type: ignore[arg-type]
    state = checkpoint.json("metrics.json")
    assert state == {"step": 1, "tokens": 10, "size": size}


def test_a_file_deleted_under_the_run_is_told_at_the_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(tmp_path) as report:
        turn(report, Clock())
        (tmp_path / "metrics.jsonl").unlink()
        checkpoint = save(report, tmp_path / "step_1")
    make(tmp_path).restore(checkpoint)  # type: ignore[arg-type]
    assert "not as the checkpoint of step 1 left it" in caplog.text


def test_the_writer_syncs_the_file_itself_and_passes_its_failure_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as report:
        turn(report, Clock())
        writer = report.snapshot()

        def broken_disk(descriptor: int) -> None:
            assert os.path.samestat(os.fstat(descriptor), (tmp_path / "metrics.jsonl").stat())
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", broken_disk)
        with pytest.raises(OSError, match="Input/output"):
            writer(JsonFolder(tmp_path / "step_1"))  # type: ignore[arg-type]
        monkeypatch.undo()
    assert not (tmp_path / "step_1" / "metrics.json").exists()


def test_a_line_that_cannot_be_written_stops_the_run_and_names_the_path(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file._file = FileIO("/dev/full", "ab")  # a real device without room; reading it first would never end
    with pytest.raises(SurefootError, match=r"cannot write .*metrics\.jsonl: No space left"):
        file.append({"step": 1})
    file.close()


def test_a_folder_in_the_files_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with make(tmp_path) as report, pytest.raises(SurefootError, match=r"cannot write .*metrics\.jsonl"):
        turn(report, Clock())


def test_a_rescue_after_close_still_finds_whole_lines(tmp_path: Path) -> None:
    with make(tmp_path) as report:
        turn(report, Clock())
    state = save(report, tmp_path / "rescue").json("metrics.json")
    assert state["size"] == (tmp_path / "metrics.jsonl").stat().st_size
    assert state["step"] == 1
