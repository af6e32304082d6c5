"""The view on a terminal and elsewhere, and the closing table, on a run of which everything is known."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.console import Console

from surefoot.checkpoint.lineage import Attempt, write_attempt
from surefoot.demo import closing, task
from surefoot.demo.compare import Comparison
from surefoot.demo.view import DemoView
from surefoot.demo.watch import WatchedRun
from surefoot.report.completions import Completions


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
    timing = {"wall_s": 0.1, "step_s": 0.1, "train_s": 0.075, "rollout_s": 0.025}
    run.lines = [{"step": s, "kind": "train", "loss": 1 / s, "timing": timing} for s in (1, 2)]
    run.lines.append({"step": 2, "kind": "val", "loss": 0.75})
    return run


def sampled(run: WatchedRun) -> None:
    """Let it be one that samples."""
    for line in run.lines:
        line["reward"] = line["step"] / 4
    del run.lines[-1]["loss"]  # a validation's
    texts = ["57", "67", "67", "5"]
    rewards, advantages = torch.tensor([1.0, 0, 0, 0]), torch.tensor([1.5, -0.5, -0.5, -0.5])
    columns = {"group": ["a"] * 4, "prompt": ["30+27="] * 4, "completion": texts}
    Completions(run.run_dir / "completions").write(2, {**columns, "reward": rewards, "advantage": advantages})


def test_each_validation_and_each_change_is_one_plain_line(run: WatchedRun) -> None:
    console = Console(file=io.StringIO(), width=60)
    view = DemoView(console, [run])
    assert view.live is None
    for _ in range(2):
        view.draw()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("killed")[1].split() for line in lines] == [
        ["step", "2/8", "10.0", "steps/s", "loss", "0.5000", "validation", "0.7500"],
        ["goes", "on", "from", "step", "2"],
    ]


def test_a_terminal_shows_what_lies_half_written(run: WatchedRun) -> None:
    console = Console(file=Terminal(), width=100, force_terminal=True, color_system=None)
    view = DemoView(console, [run])
    assert view.live is not None
    with view.live:
        view.draw()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("killed  goes on from step 2", "2/8", "loss 0.5000", "checkpoints  2  4 half-written"):
        assert text in shown
    assert "rollout 25%  train 75%" in shown


def test_a_run_that_samples_shows_rewards_and_what_some_completions_are_worth(run: WatchedRun) -> None:
    sampled(run)
    told = ["30+27=57   1×  reward 1  advantage +1.50", "30+27=67   2×  reward 0  advantage -0.50"]
    plain, terminal = (
        Console(file=file, width=100, force_terminal=isinstance(file, Terminal), color_system=None)
        for file in (io.StringIO(), Terminal())
    )
    for console in (plain, terminal):
        view = DemoView(console, [run])
        with view.live or nullcontext():
            view.draw()
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for text in ("reward 0.5000", "held out 0.5000", *told):
            assert text in shown


def test_completions_that_are_judged_by_a_teacher_alone_are_shown_too(run: WatchedRun) -> None:
    """Without an advantage, and without what the data set has answered."""
    columns = {"group": ["a", "b"], "prompt": ["1+1=", "2+2="], "completion": ["2", "5"]}
    rewards = {"reward": torch.tensor([float("nan"), 0.0]), "answered_by": ["dataset", "policy"]}
    Completions(run.run_dir / "completions").write(run.step, {**columns, **rewards})
    console = Console(file=io.StringIO(), width=100)
    DemoView(console, [run]).draw()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2+2=5    1×  reward 0\n" in shown
    assert "1+1=" not in shown


def test_the_closing_facts_of_a_run(run: WatchedRun) -> None:
    sampled(run)
    run.lines[1]["timing"] = {**run.lines[0]["timing"], "save_s": 0.01, "save_background_s": 0.2}
    assert dict(fact[:2] for fact in closing.training(run)) == {
        "reward": "0.25 -> 0.50 in 2 steps",
        "speed": "10.0 steps/s on one thread, in each run",
        "time goes to": "rollout 24%, reward 0%, log-probs 0%, train 71%, sync 0%, save 5%, other 0%",
        "saves": "held training up for 10 ms at most, and took 200 ms meanwhile",
    }
    assert closing.answers([task.addition(30, 27)], [["57", ""]], [["57", "57"]]) == [("30+27=", "57 - -> 57 57", None)]


def test_a_fact_that_does_not_hold_is_marked(run: WatchedRun) -> None:
    assert closing.comparing(Comparison([], 3, 100, 4))[0].held
    assert closing.comparing(Comparison(["clock/clock.json"], 3, 100, 4))[0].held is False
    assert closing.killing(run)[0].held
    run.kills[4] = False
    assert closing.killing(run)[0].held is False
    console = Console(file=io.StringIO(), width=100)
    console.print(closing.table(closing.killing(run)))
    assert "FAILED: step 4 had just been written" in console.file.getvalue()  # type: ignore[attr-defined]
