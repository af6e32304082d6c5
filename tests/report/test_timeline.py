"""Where the time goes, with a clock that the test moves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from surefoot.report.text import summary
from surefoot.report.timeline import Timeline
from surefoot.types import Clock, SaveEvent
from tests.report.kit import HandClock, lines_of, make, plain_console, printed, turn


def test_the_phases_of_a_step_add_up() -> None:
    clock = HandClock()
    timeline = Timeline(clock)
    for name, seconds in (("train", 5), ("sync", 2), ("train", 16)):
        with timeline.phase(name):
            clock.passes(seconds)
    clock.passes(8)
    timing = timeline.turn(tokens=62)
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
    assert timeline.current()[0] == ""
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
    assert (timing["step_s"], timing["tokens_per_s"]) == (6, 8 / 6)


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
    assert "2.0 GB written in the background in 4.0 s" in printed(console)


def test_save_events_from_many_threads_are_all_counted(tmp_path: Path) -> None:
    report = make(tmp_path)
    start = threading.Barrier(8)

    def tell() -> None:
        start.wait()
        for step in range(500):
            report.save_event(SaveEvent("finished", step, "", seconds=0.5, num_bytes=3))
            report.save_event(SaveEvent("writing", step, ""))

    threads = [threading.Thread(target=tell) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with report:
        clock = Clock()
        turn(report, clock)
        turn(report, clock)
    first, second = (line["timing"] for line in lines_of(tmp_path))
    assert (first["save_background_s"], first["save_bytes"]) == (2000.0, 12000)
    assert "save_bytes" not in second


def test_the_summary_of_a_run_without_a_step_divides_by_nothing() -> None:
    console = plain_console()
    console.print(summary(Timeline(HandClock()), []))
    assert "Saves: none" in printed(console)


def test_a_phase_inside_another_takes_its_time_from_it() -> None:
    clock = HandClock()
    timeline = Timeline(clock)
    with timeline.phase("data"):
        clock.passes(1)
        with timeline.phase("rollout"):
            clock.passes(4)
            assert timeline.current() == ("rollout", 4.0)
        assert timeline.current() == ("data", 0.0)
        with timeline.phase("rollout"):
            clock.passes(2)
        clock.passes(0.5)
    assert timeline.current()[0] == ""
    timing = timeline.turn(0)
    assert (timing["data_s"], timing["rollout_s"], timing["wall_s"]) == (1.5, 6.0, 7.5)
