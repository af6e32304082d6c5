"""The demo from beginning to end: make a task, train it twice, kill one of the two, compare them, use the result; with
`--all`, go on with further methods."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from surefoot.demo import closing, further, measure, task
from surefoot.demo.compare import compare_runs
from surefoot.demo.folder import DemoFolder, claimed
from surefoot.demo.recipe import SFT, weights
from surefoot.demo.training import LOOK_S, start, train
from surefoot.demo.view import DemoView, say
from surefoot.demo.watch import WatchedRun
from surefoot.report.text import duration

_NEXT = """\
Next, try
  surefoot ckpt ls {root}/killed  # what is on disk
  surefoot ckpt verify {root}/killed  # every byte against the manifests
  surefoot train {root}/sft.yaml run_dir={root}/again seed=1  # Ctrl-C saves and stops it
  surefoot resume {root}/again  # and this goes on"""
_KILL_IN = range(SFT.num_steps // 2, SFT.num_steps, SFT.period)  # the first of these saves that can be caught
_NEAR_STEPS = 50  # before a save: from here on the watch for it is close


def tell(root: Path, seed: int, console: Console, *, further_stages: bool = False) -> bool:
    """Run the whole demo in `root`. Returns whether every fact is as it was to be.

    Raises:
        SurefootError: the folder cannot be used, or a run failed.
    """
    began_s = time.monotonic()
    with claimed(root) as folder:
        if folder.moved_to:
            say(console, "Moved aside", f"an earlier demo, to {folder.moved_to}")
        facts = _twice(folder, seed, console)
        facts.append(closing.Fact("time", duration(time.monotonic() - began_s)))
        console.print(closing.table(facts))
        held = all(fact.held is not False for fact in facts)
        if further_stages:
            outcomes = further.tell(folder, seed, console)
            console.print(closing.outcomes(outcomes))
            say(console, "Time in all", duration(time.monotonic() - began_s))
            held = held and all(outcome.held for outcome in outcomes)
    ideas = (_NEXT, further.NEXT) if further_stages else (_NEXT,)
    for idea in ideas:
        console.print(idea.format(root=folder.root), soft_wrap=True, highlight=False)
    return held


def _twice(folder: DemoFolder, seed: int, console: Console) -> list[closing.Fact]:
    """The same run twice, once killed on the way."""
    folder.fill(seed)
    rows = task.read_rows(folder.heldout)
    say(console, "Task", f"sums such as {task.question(rows[0])}?, {len(rows)} held out in both orders")
    say(console, "Files", f"{folder.train.parent}, {folder.tokenizer} (trained on it), {folder.config}")
    before = task.greedy_answers(*measure.first_model(folder.config), rows)
    say(console, "Before training", f"{task.exact_match(before, rows):.1%} of the held-out sums are right")
    straight, killed = (WatchedRun(name, folder.root / name, SFT.num_steps) for name in ("straight", "killed"))
    train_both(folder.config, straight, killed, DemoView(console, (straight, killed)), _KILL_IN)
    comparison = compare_runs(straight.run_dir, killed.run_dir, SFT.num_steps)
    after = task.greedy_answers(*measure.last_model(weights(killed.run_dir, SFT.num_steps)), rows)
    return [
        *closing.answers(rows, before, after),
        *closing.training(straight),
        *closing.killing(killed),
        *closing.comparing(comparison),
    ]


def train_both(config: Path, straight: WatchedRun, killed: WatchedRun, view: DemoView, kill_in: Sequence[int]) -> None:
    """Both runs to their end; the second is killed on the way. No process is left, whatever happens here.

    Args:
        kill_in: the saves in which to kill it, by step: the next is tried where a commit was quicker than the kill.
    """

    def wait() -> None:
        left = [step for step in kill_in if step > max(killed.saved(), default=0)]
        if any(killed.kills.values()) or not left or not killed.running or killed.step < left[0] - _NEAR_STEPS:
            time.sleep(LOOK_S)
        elif killed.wait_for_save(left[0], LOOK_S):
            _kill(view, killed, left[0])

    places = {run: json.dumps(str(run.run_dir), ensure_ascii=False) for run in (straight, killed)}
    train({run: (str(config), f"run_dir={place}") for run, place in places.items()}, view, wait)


def _kill(view: DemoView, run: WatchedRun, step: int) -> None:
    if run.kill(step):
        view.event(run, f"SIGKILL while step {step} was being written: half of it is left", "bold red")
    else:
        view.event(run, f"SIGKILL, but step {step} had just been committed. Once more at the next save", "yellow")
    start(view, run, "resume", str(run.run_dir))
