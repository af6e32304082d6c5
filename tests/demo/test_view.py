"""The view on a terminal and elsewhere, and the closing table, on a run of which everything is known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.checkpoint.lineage import Attempt, write_attempt
from surefoot.demo import closing, task
from surefoot.demo.compare import Comparison
from surefoot.demo.view import DemoView
from surefoot.demo.watch import WatchedRun


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    """Killed in the save of step 4, and resumed from step 2."""
    run = WatchedRun("killed", tmp_path / "killed", 8)
    for name in ("step_2", "tmp_step_4"):
        (run.checkpoints / name).mkdir(parents=True)
    run.kills[4] = True
    write_attempt(run.checkpoints, Attempt.first().resumed(2, None, "abc", number=2))
    run.lines = [{"step": s, "kind": "train", "loss": 1 / s, "timing": {"wall_s": 0.1}} for s in (1, 2)]
    run.lines.append({"step": 2, "kind": "val", "loss": 0.75})
    return run


def test_each_validation_and_each_change_is_one_plain_line(run: WatchedRun) -> None:
    console = Console(file=io.StringIO(), width=60)
    view = DemoView(console, [run])
    assert view.live is None
    for _ in range(2):
        view.draw()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("killed")[1].split() for line in lines] == [
        ["step", "2/8", "10", "steps/s", "loss", "0.7500", "validation", "0.7500"],
        ["goes", "on", "from", "step", "2"],
    ]


def test_a_terminal_shows_what_lies_half_written(run: WatchedRun) -> None:
    console = Console(file=Terminal(), width=100, force_terminal=True, color_system=None)
    view = DemoView(console, [run])
    assert view.live is not None
    with view.live:
        view.draw()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("killed  goes on from step 2", "2/8", "loss 0.7500", "checkpoints  2  4 half-written"):
        assert text in shown


def test_a_fact_that_does_not_hold_is_marked(run: WatchedRun) -> None:
    rows = [task.addition(10, n) for n in range(10, 20)]
    right, wrong = [task.expected_answer(row) for row in rows], [""] * 10
    assert closing.answers(rows, wrong, right)[-1].held
    for before, after in ((right, right), (wrong, wrong), (wrong, [*right[:8], "", ""])):
        assert closing.answers(rows, before, after)[-1].held is False
    assert closing.comparing(Comparison([], 3, 100, 4))[0].held
    assert closing.comparing(Comparison(["clock/clock.json"], 3, 100, 4))[0].held is False
    assert closing.killing(run)[0].held
    run.kills[4] = False
    assert closing.killing(run)[0].held is False
    console = Console(file=io.StringIO(), width=100)
    console.print(closing.table(closing.killing(run)))
    assert "FAILED: step 4 had just been written" in console.file.getvalue()  # type: ignore[attr-defined]
