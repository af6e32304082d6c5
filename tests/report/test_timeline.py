"""Where the time goes, with a clock that the test moves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.report.timeline import SaveTally, Timeline
from surefoot.types import Clock, SaveEvent
from tests.report.kit import HandClock, lines_of, make, plain_console, printed, turn


def test_phases_add_up_and_nested_time_counts_once() -> None:
    clock = HandClock()
    timeline = Timeline(clock)
    with timeline.phase("train"):
        clock.passes(1)
        with timeline.phase("sync"):
            clock.passes(2)
        clock.passes(4)
    clock.passes(8)
    with timeline.phase("train"):
        clock.passes(16)
    timing = timeline.turn(tokens=62)
    # train: 1 + 4 + 16, sync: 2, all: 31, of which 8 between phases
    assert timing == {"wall_s": 31, "step_s": 31, "tokens_per_s": 2.0, "train_s": 21, "sync_s": 2}
    assert timeline.totals == {"train": 21, "sync": 2}


def test_validation_and_saves_count_in_the_wall_time_but_not_in_the_step() -> None:
    clock = HandClock()
    timeline = Timeline(clock)
    for name, seconds in {"validate": 5, "save": 3, "train": 2}.items():
        with timeline.phase(name):
            clock.passes(seconds)
    timing = timeline.turn(tokens=10)
    assert (timing["wall_s"], timing["step_s"], timing["tokens_per_s"]) == (10, 2, 5.0)
    assert timeline.left_s(4) == 40


def test_a_phase_that_fails_is_charged_and_closed() -> None:
    clock = HandClock()
    timeline = Timeline(clock)
    with pytest.raises(RuntimeError), timeline.phase("train"):
        clock.passes(3)
        raise RuntimeError
    clock.passes(5)
    assert timeline.current() == ("", 5)
    assert timeline.turn(tokens=0)["train_s"] == 3


def test_each_turn_starts_anew_and_totals_go_on() -> None:
    clock = HandClock()
    timeline = Timeline(clock)
    for seconds in (2, 6):
        with timeline.phase("train"):
            clock.passes(seconds)
        timing = timeline.turn(tokens=8)
    assert timing["train_s"] == 6
    assert timeline.totals["train"] == 8
    assert (timeline.pace().step_s, timeline.pace().tokens_per_s) == (4, 2)


def test_what_a_save_cost_shows_in_the_next_line_and_in_the_summary(tmp_path: Path) -> None:
    clock, now = Clock(), HandClock()
    console = plain_console()
    with make(tmp_path, now=now, console=console, progress="plain") as report:
        with report.phase("train"):
            now.passes(6)
        turn(report, clock)
        with report.phase("save"):
            now.passes(0.5)
        report.save_event(SaveEvent("finished", 1, "step_1", seconds=4.0, num_bytes=2_000_000_000))
        with report.phase("train"):
            now.passes(3)
        turn(report, clock)
        now.passes(0.5)
        with report.phase("train"):
            now.passes(3)
        turn(report, clock)
    first, second, third = (line["timing"] for line in lines_of(tmp_path))
    assert "save_s" not in first
    assert second["save_s"] == 0.5
    assert (second["save_background_s"], second["save_bytes"], second["step_s"]) == (4.0, 2_000_000_000, 3)
    assert "save_background_s" not in third
    rows = {line.split()[0]: line.split() for line in printed(console).splitlines() if line.strip()}
    assert rows["train"] == ["train", "12.0", "s", "92.3%", "4.0", "s"]  # 12 of 13 s, over three steps
    assert rows["other"] == ["other", "500", "ms", "3.8%", "167", "ms"]
    assert "1 finished, holding training up for 500 ms" in printed(console)
    assert "2.0 GB written in the background in 4.0 s at 500 MB/s" in printed(console)


def test_save_events_from_many_threads_are_all_counted() -> None:
    tally = SaveTally()
    start = threading.Barrier(8)

    def tell() -> None:
        start.wait()
        for step in range(500):
            tally.add(SaveEvent("finished", step, "", seconds=0.5, num_bytes=3))
            tally.add(SaveEvent("failed", step, "", message="no room"))

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tally.saves.finished, tally.saves.failed) == (4000, 4000)
    assert (tally.saves.background_s, tally.saves.num_bytes) == (2000.0, 12000)
    assert tally.news() == {"save_background_s": 2000.0, "save_bytes": 12000}
    assert tally.news() == {}


def test_the_summary_of_a_run_without_a_step_divides_by_nothing(tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=plain_console().file)
    console.print(make(tmp_path, now=HandClock()).summary())
    assert "Saves: none" in console.export_text()
