"""Plain lines and the live view, read back as text."""

from __future__ import annotations

import io
import logging
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.report import ConsoleHandler, configure_logging
from surefoot.report.live import LiveProgress
from surefoot.report.progress import PlainProgress
from surefoot.report.text import headline
from surefoot.types import Clock, Metric, SaveEvent
from tests.report.kit import HandClock, make, plain_console, printed, turn

METRICS = {"loss": Metric(1.25), "grad_norm": Metric(0.5), "num_tokens": Metric(10.0, reduce="sum"), "lr": Metric(2e-5)}


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system="truecolor", record=True)


def frame(report: object) -> str:
    """The live view as it would be drawn now."""
    console = Console(file=io.StringIO(), width=100)
    console.print(report._progress)  # type: ignore[attr-defined]
    return printed(console)


def test_plain_lines_are_aligned_and_hold_what_matters(tmp_path: Path) -> None:
    console, now, clock = plain_console(), HandClock(), Clock()
    with make(tmp_path, total_steps=12, console=console, now=now, progress="plain") as report:
        for _ in range(12):
            with report.phase("train"):
                now.passes(2)
            turn(report, clock, METRICS)
    lines = [line for line in printed(console).splitlines() if line.startswith("step")]
    assert len(lines) == 12
    for part in ("step   3/12", "epoch 0", "loss    1.2500", "lr  2.00e-05", "5 tokens/s", "2.0 s/step", "ETA 18.0 s"):
        assert part in lines[2]
    assert len({line.index("tokens/s") for line in lines}) == 1
    assert "num_tokens" not in printed(console)
    assert "ETA" not in lines[-1]
    assert "\x1b" not in printed(console)


def test_log_period_leaves_lines_out_but_never_the_last(tmp_path: Path) -> None:
    console, clock = plain_console(), Clock()
    with make(tmp_path, total_steps=7, console=console, progress="plain", log_period=3) as report:
        for _ in range(7):
            turn(report, clock)
    lines = [line for line in printed(console).splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]


def test_plain_lines_tell_of_saves_validation_and_messages(tmp_path: Path) -> None:
    console, clock = plain_console(), Clock()
    with make(tmp_path, total_steps=None, console=console, progress="plain") as report:
        turn(report, clock)
        report.validation(clock, {"loss": Metric(1.5), "held_out/loss": Metric(1.75)})
        report.save_event(SaveEvent("writing", 1, "step_1"))
        report.save_event(SaveEvent("finished", 1, "step_1", seconds=1.5, num_bytes=2_500_000))
        report.save_event(SaveEvent("pruned", 0, "step_0"))
        report.save_event(SaveEvent("failed", 2, "tmp_step_2", message="No space left [on] device"))
        report.message("[bold]as it stands[/bold]")
    text = printed(console)
    for part in (
        "validation  step 1  loss 1.5000  held_out/loss 1.7500",
        "writing step 1\n",
        "step 1 saved: 2.5 MB in 1.5 s",
        "pruned  step 0\n",
        "FAILED step 2: No space left [on] device",
        "[bold]as it stands[/bold]\n",
    ):
        assert part in text


def test_off_shows_messages_and_failures_only(tmp_path: Path) -> None:
    console, clock = plain_console(), Clock()
    with make(tmp_path, console=console, progress="off") as report:
        turn(report, clock)
        report.validation(clock, {"loss": Metric(1.5)})
        report.save_event(SaveEvent("writing", 1, "step_1"))
        report.save_event(SaveEvent("failed", 1, "tmp_step_1", message="disk full"))
        report.message("hello")
    assert printed(console) == "checkpoint  FAILED step 1: disk full\nhello\n"


def test_auto_is_plain_unless_the_stream_itself_is_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log_file = Console(file=io.StringIO(), force_terminal=True)  # what FORCE_COLOR=1 does to rich
    assert isinstance(make(tmp_path, console=log_file, progress="auto")._progress, PlainProgress)
    screen = Console(file=Terminal(), force_terminal=True)
    assert isinstance(make(tmp_path, console=screen, progress="auto")._progress, LiveProgress)


def test_one_frame_of_the_live_view(tmp_path: Path) -> None:
    now, clock = HandClock(), Clock()
    with make(tmp_path / "my-run", total_steps=200, console=terminal(), now=now, progress="live") as report:
        assert "waiting for the first" in frame(report)
        for step in range(50):
            with report.phase("train"):
                now.passes(2)
            turn(report, clock, METRICS | {"loss": Metric(5.0 - step / 20)})
        report.validation(clock, {"loss": Metric(1.5), "held_out/loss": Metric(1.75)})
        report.save_event(SaveEvent("finished", 50, "step_50", seconds=3.0, num_bytes=2_500_000_000))
        with report.phase("data"):
            now.passes(4)
            text = frame(report)
    for part in (
        *(
            "my-run",
            "validation",
            "checkpoint",
            "50/200",
            "epoch 12",
            "ETA 0:05:00",
            "2.5500",
            "█",
            "grad_norm    0.5000",
            "lr  2.00e-05",
        ),
        *("│ step        50/200", "5 tokens/s   2.0 s/step", "step  50/200  loss 1.5000  held_out/loss 1.7500"),
        *("step 50 saved: 2.5 GB in 3.0 s", "0:01:44  data for 4.0 s"),
    ):
        assert part in text, part
    assert "data" not in frame(report)


def test_the_curve_is_the_rewards_where_there_are_some(tmp_path: Path) -> None:
    with make(tmp_path / "run", console=terminal(), progress="live") as report:
        for metrics in (METRICS, METRICS | {"reward": Metric(0.5)}, METRICS):
            turn(report, Clock(), metrics)
        (line,) = [line for line in frame(report).splitlines() if line.startswith("│ reward ")]
    assert not any(line.startswith("│ loss ") for line in frame(report).splitlines()) and "▁" in line


def test_what_is_shown_of_the_metrics() -> None:
    validated = {"a/loss": 1.5, "a/num_tokens": 9.0, "loss": 1.5, "num_tokens": 9.0, "skipped_rows": 0.0}
    assert headline(validated) == {"loss": 1.5}
    assert headline(validated | {"b/loss": 1.5}) == {"a/loss": 1.5, "loss": 1.5, "b/loss": 1.5}
    assert headline({"value/loss": 2.0, "loss": 1.0}) == {"value/loss": 2.0, "loss": 1.0}
    assert headline({"score": 1.0}) == {"score": 1.0}


def test_the_live_view_shows_failures_above_itself_and_ends_with_the_summary(tmp_path: Path) -> None:
    console, clock = terminal(), Clock()
    stdout = sys.stdout
    with pytest.raises(RuntimeError), make(tmp_path, console=console, progress="live") as report:
        turn(report, clock)
        report.save_event(SaveEvent("writing", 1, "step_1"))
        report.save_event(SaveEvent("failed", 1, "tmp_step_1", message="disk full"))
        raise RuntimeError
    text = console.export_text()
    assert "checkpoint  FAILED step 1: disk full\n" in text
    assert text.index("FAILED") < text.rindex("╭") < text.index("Where the time went")
    assert sys.stdout is stdout
    assert "\x1b[?25h" in printed(console)  # the cursor is back
    for thread in threading.enumerate():
        if "Refresh" in type(thread).__name__:
            thread.join(timeout=30)  # rich tells it to end, and does not wait
            assert not thread.is_alive()


def test_the_live_view_copes_with_odd_terminals(tmp_path: Path) -> None:
    with make(tmp_path, total_steps=None, console=terminal(), progress="live") as report:
        turn(report, Clock(), {"policy_loss": Metric(float("nan")), "x" * 150: Metric(1.0)})
        for width in (4, 20, 300):
            console = Console(file=io.StringIO(), width=width)
            console.print(report._progress)
            assert all(len(line) <= width for line in printed(console).splitlines())
        file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        Console(file=file, width=100).print(report._progress)
        file.flush()


def test_save_events_from_threads_reach_the_console_whole(tmp_path: Path) -> None:
    console = plain_console()
    with make(tmp_path, console=console, progress="plain") as report:

        def tell(worker: int) -> None:
            for step in range(100):
                report.save_event(SaveEvent("pruned", 1000 * worker + step, ""))

        threads = [threading.Thread(target=tell, args=(worker,)) for worker in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    want = {f"pruned  step {1000 * worker + step:,}" for worker in range(1, 9) for step in range(100)}
    assert set(printed(console).splitlines()) == want


@pytest.fixture
def root_logger():  # type: ignore[no-untyped-def]
    root, ours = logging.getLogger(), logging.getLogger("surefoot")
    before, level = list(root.handlers), ours.level
    yield root
    root.handlers[:] = before
    ours.setLevel(level)


def test_log_records_go_to_the_console_as_single_lines(root_logger: logging.Logger) -> None:
    first, second = plain_console(), plain_console(width=40)
    configure_logging(first)
    configure_logging(second, "INFO")
    assert len([h for h in root_logger.handlers if isinstance(h, ConsoleHandler)]) == 1
    logging.getLogger("surefoot.somewhere").info("long " * 30 + "[end]")
    logging.getLogger("surefoot.somewhere").debug("not shown")
    logging.getLogger("some.library").info("not shown either")
    logging.getLogger("some.library").warning("careful")
    assert printed(first) == ""
    lines = printed(second).splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("long [end]")
    assert lines[1].endswith("warning: careful")
    assert "\x1b" not in printed(second)
