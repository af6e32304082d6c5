"""The demo from beginning to end: make a task, learn from bad teachers, then learn past them, twice, with one of the
two runs killed on the way; compare them; with `--all`, go on with further methods."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from surefoot.demo import closing, measure, task
from surefoot.demo.closing import Fact, Outcome
from surefoot.demo.compare import compare_runs
from surefoot.demo.folder import DemoFolder, claimed
from surefoot.demo.measure import Heldout
from surefoot.demo.recipe import weights
from surefoot.demo.stages import FURTHER, GRPO, RM, SFT, WRONG_SHARE, Stage
from surefoot.demo.training import LOOK_S, start, train
from surefoot.demo.view import DemoView, say
from surefoot.demo.watch import WatchedRun
from surefoot.report.text import duration

_NEXT = """\
Next, try
  surefoot ckpt ls {root}/killed  # what is on disk
  surefoot ckpt verify {root}/killed  # every byte against the manifests
  surefoot train {root}/grpo.yaml run_dir={root}/again seed=1  # Ctrl-C saves and stops it
  surefoot resume {root}/again  # and this goes on"""
_NEXT_OF_ALL = f"""\
  surefoot score {{root}}/rm/checkpoints/step_{RM.recipe.num_steps} {{root}}/data/slips_heldout.jsonl  # no easy pairs
  surefoot train {{root}}/dpo.yaml run_dir={{root}}/dpo_again policy.optimizer.lr=1e-4  # so can each run be had anew"""
_NUM_EXAMPLES, _NUM_ANSWERS = 3, 6


def tell(root: Path, seed: int, console: Console, *, further_stages: bool = False) -> bool:
    """Run the whole demo in `root`. Returns whether every fact and every number is as it was to be.

    Raises:
        SurefootError: the folder cannot be used, or a run failed.
    """
    began_s = time.monotonic()
    with claimed(root) as folder:
        if folder.moved_to:
            say(console, "Moved aside", f"an earlier demo, to {folder.moved_to}")
        heldout = folder.fill(seed)
        say(console, "Task", f"sums such as {task.question(heldout.rows[0])}?, {len(heldout.rows)} held out")
        say(console, "Files", f"{folder.data}, {folder.tokenizer} (trained on it), {folder.root}/*.yaml")
        outcomes = side_by_side((SFT,), folder, heldout, console)
        facts, found = twice(folder, heldout, console)
        outcomes += found
        facts.append(Fact("time", duration(time.monotonic() - began_s)))
        console.print(closing.table(facts), closing.outcomes(outcomes))
        if further_stages:
            for stages in FURTHER:
                outcomes += side_by_side(stages, folder, heldout, console)
            console.print(closing.outcomes(outcomes))
            say(console, "Time in all", duration(time.monotonic() - began_s))
    for idea in (_NEXT, _NEXT_OF_ALL) if further_stages else (_NEXT,):
        console.print(idea.format(root=folder.root), soft_wrap=True, highlight=False)
    return all(fact.held is not False for fact in facts) and all(outcome.held for outcome in outcomes)


def side_by_side(stages: Sequence[Stage], folder: DemoFolder, heldout: Heldout, console: Console) -> list[Outcome]:
    """Measure, train and measure again."""
    root, recipes = folder.root, [stage.recipe for stage in stages]
    for stage in stages:
        say(console, stage.recipe.name, f"{stage.about}: {stage.recipe.config(root)}")
    before = [stage.measure(*measure.first_model(stage.recipe.config(root), stage.kind), heldout) for stage in stages]
    runs = [WatchedRun(recipe.name, root / recipe.name, recipe.num_steps) for recipe in recipes]
    commands = {run: [str(recipe.config(root))] for run, recipe in zip(runs, recipes, strict=True)}
    train(commands, DemoView(console, runs))
    after = [stage.measure(*measure.last_model(stage.recipe.weights(root), stage.kind), heldout) for stage in stages]
    outcomes = []
    for stage, old, new, run in zip(stages, before, after, runs, strict=True):
        outcomes += stage.outcomes(old, new, run)
    for outcome in outcomes:
        say(console, outcome.stage, f"{outcome.what}: {' -> '.join(filter(None, (outcome.before, outcome.after)))}")
    return outcomes


def twice(folder: DemoFolder, heldout: Heldout, console: Console) -> tuple[list[Fact], list[Outcome]]:
    """GRPO twice from the SFT model, one of the two runs killed on the way."""
    recipe, rows = GRPO.recipe, heldout.rows
    config = recipe.config(folder.root)
    say(console, recipe.name, f"{GRPO.about}: {config}")
    straight, killed = (WatchedRun(name, folder.root / name, recipe.num_steps) for name in ("straight", "killed"))
    kill_in = range(recipe.num_steps // 2, recipe.num_steps, recipe.period)
    first = measure.first_model(config)
    train_both(config, straight, killed, DemoView(console, (straight, killed)), kill_in)
    last = measure.last_model(weights(killed.run_dir, recipe.num_steps))
    facts = [
        Fact("teachers", f"{1 - WRONG_SHARE:.0%} of the demonstrations were right"),
        *closing.answers(rows[:_NUM_EXAMPLES], *(_several(*model, heldout) for model in (first, last))),
        *closing.training(straight),
        *closing.killing(killed),
        *closing.comparing(compare_runs(straight.run_dir, killed.run_dir, recipe.num_steps)),
    ]
    return facts, GRPO.outcomes(GRPO.measure(*first, heldout), GRPO.measure(*last, heldout), straight)


def _several(model: object, tokenizer: object, heldout: Heldout) -> list[list[str]]:
    """Sampled answers to each of the first held-out rows."""
    rows = [row for row in heldout.rows[:_NUM_EXAMPLES] for _ in range(_NUM_ANSWERS)]
    said = task.sampled_answers(model, tokenizer, rows, heldout.seed)
    return [said[at : at + _NUM_ANSWERS] for at in range(0, len(said), _NUM_ANSWERS)]


def train_both(config: Path, straight: WatchedRun, killed: WatchedRun, view: DemoView, kill_in: range) -> None:
    """Both runs to their end; the second is killed on the way. No process is left, whatever happens here.

    Args:
        kill_in: the saves in which to kill it, by step: the next is tried where a commit was quicker than the kill.
    """

    def wait() -> None:
        left = [step for step in kill_in if step > max(killed.saved(), default=0)]
        if any(killed.kills.values()) or not left or not killed.running or killed.step < left[0] - kill_in.step:
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
