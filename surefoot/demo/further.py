"""The second part of `surefoot demo --all`: further methods on the same task, two runs side by side at most."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from surefoot.demo import measure, task
from surefoot.demo.closing import Outcome
from surefoot.demo.folder import DemoFolder
from surefoot.demo.measure import Heldout
from surefoot.demo.stages import RM, STAGES, WRONG_SHARE, Stage
from surefoot.demo.training import train
from surefoot.demo.view import DemoView, say
from surefoot.demo.watch import WatchedRun

NEXT = f"""\
  surefoot score {{root}}/rm/checkpoints/step_{RM.recipe.num_steps} {{root}}/data/slips_heldout.jsonl  # no easy pairs
  surefoot train {{root}}/dpo.yaml run_dir={{root}}/dpo_again policy.optimizer.lr=1e-4  # so can each run be had anew"""


def tell(folder: DemoFolder, seed: int, console: Console) -> list[Outcome]:
    """Run all stages. Raises `SurefootError` when a run failed."""
    heldout = fill(folder, seed)
    outcomes = []
    for stages in STAGES:
        for stage in stages:
            say(console, stage.recipe.name, f"{stage.about}: {stage.recipe.config(folder.root)}")
        found = side_by_side(stages, folder, heldout, console)
        for outcome in found:
            say(console, outcome.stage, f"{outcome.what}: {' -> '.join(filter(None, outcome[2:4]))}")
        outcomes += found
    return outcomes


def fill(folder: DemoFolder, seed: int) -> Heldout:
    """Write what the stages read: demonstrations that are mostly wrong, preferences of two kinds, configurations."""
    train_rows, rows = task.read_rows(folder.train), task.read_rows(folder.heldout)
    task.write_demonstrations(train_rows, folder.data / "demonstrations.jsonl", seed, WRONG_SHARE)
    for name, wrong in (("guesses", task.guess), ("slips", task.slip)):
        task.write_preferences(train_rows, folder.data / f"{name}.jsonl", seed, wrong)
        task.write_preferences(rows, folder.data / f"{name}_heldout.jsonl", seed, wrong)
    for stage in (stage for stages in STAGES for stage in stages):
        stage.recipe.write(folder.root, seed)
    guesses, slips = (task.read_rows(folder.data / f"{name}_heldout.jsonl") for name in ("guesses", "slips"))
    return Heldout(rows, guesses, slips, seed)


def side_by_side(stages: Sequence[Stage], folder: DemoFolder, heldout: Heldout, console: Console) -> list[Outcome]:
    """Measure, train and measure again. `fill` has written what the stages read, but for each other's weights."""
    root, recipes = folder.root, [stage.recipe for stage in stages]
    before = [stage.measure(*measure.first_model(stage.recipe.config(root), stage.kind), heldout) for stage in stages]
    runs = [WatchedRun(recipe.name, root / recipe.name, recipe.num_steps) for recipe in recipes]
    commands = {run: [str(recipe.config(root))] for run, recipe in zip(runs, recipes, strict=True)}
    train(commands, DemoView(console, runs))
    after = [stage.measure(*measure.last_model(stage.recipe.weights(root), stage.kind), heldout) for stage in stages]
    return [
        outcome
        for stage, old, new, run in zip(stages, before, after, runs, strict=True)
        for outcome in stage.outcomes(old, new, run)
    ]
