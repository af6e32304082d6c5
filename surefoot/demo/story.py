"""The demo from beginning to end: make a task, train it twice, kill one of the two, compare them, use the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from surefoot.demo import closing, task
from surefoot.demo.compare import compare_runs
from surefoot.demo.folder import NUM_STEPS, SAVE_PERIOD, DemoFolder, claimed
from surefoot.demo.view import DemoView
from surefoot.demo.watch import Kill, WatchedRun, stop_all
from surefoot.report.text import size
from surefoot.report.timeline import Timeline

_KILL_FROM_STEP = NUM_STEPS // 2
_MAX_KILLS = 5
_LOOK_S = 0.1
_NEAR_STEPS = 20  # before a save: from here on the watch for it is close


def tell(root: Path, seed: int, console: Console) -> bool:
    """Run the whole demo in `root`.

    Returns:
        Whether the model learnt what it could not do before, and the killed run equals the other bit for bit.

    Raises:
        SurefootError: the folder cannot be used, or a run failed.
    """
    timeline = Timeline(time.perf_counter)
    with claimed(root) as folder:
        if folder.moved_to:
            _say(console, "Moved aside", f"an earlier demo, to {folder.moved_to}")
        with timeline.phase("data and tokenizer"):
            folder.fill(seed)
            rows = task.read_rows(folder.heldout)
        _say(console, "Task", f"sums such as {task.question(rows[0])}?, {len(rows)} held out in both orders")
        _say(console, "Files", f"{folder.train.parent}, {folder.tokenizer} (trained on it), {folder.config}")
        with timeline.phase("untrained model"):
            before = _untrained_answers(folder, rows)
        _say(console, "Before training", f"{task.exact_match(before, rows):.1%} of the held-out sums are right")
        with timeline.phase("training side by side"):
            straight, killed = _train_both(folder, console)
        with timeline.phase("comparison"):
            comparison = compare_runs(straight.run_dir, killed.run_dir, NUM_STEPS)
        with timeline.phase("trained model"):
            after = _answers_of(killed.checkpoints / f"step_{NUM_STEPS}" / "policy" / "weights", rows)
    result = closing.Result(rows, before, after, straight, killed, comparison, timeline.totals)
    console.print(closing.examples(result))
    console.print(closing.summary(result))
    failures = result.failures()
    for failure in failures:
        console.print(Text(f"FAILED: {failure}", "bold red"), soft_wrap=True)
    if not failures:
        closing.print_next(console, root)
    return not failures


def _untrained_answers(folder: DemoFolder, rows: Sequence[task.Row]) -> list[str]:
    """Of the very weights that both runs begin with."""
    import torch
    from transformers.utils import logging

    from surefoot.config_file import load_config
    from surefoot.engine import models

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = load_config(folder.config)
    tokenizer = models.load_tokenizer(config.policy)
    loaded = models.load(config.policy, tokenizer=tokenizer, seed=config.seed)
    return task.greedy_answers(loaded.model, tokenizer, rows)


def _answers_of(weights: Path, rows: Sequence[task.Row]) -> list[str]:
    """A checkpoint's weights are a plain Hugging Face folder: nothing of Surefoot is needed to use them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(weights)
    return task.greedy_answers(model, AutoTokenizer.from_pretrained(weights), rows)


# ------------------------------------------------------------------------------------------------------------ training


def _train_both(folder: DemoFolder, console: Console) -> tuple[WatchedRun, WatchedRun]:
    """Both runs to their end; the second is killed on the way. No process is left, whatever happens here."""
    straight, killed = runs = tuple(WatchedRun(name, folder.root / name) for name in ("straight", "killed"))
    with ExitStack() as stack:
        view = stack.enter_context(DemoView(console, runs, NUM_STEPS))
        stack.callback(stop_all, runs)
        for run in runs:
            _start(view, run, "train", str(folder.config), f"run_dir={run.run_dir}")
        while any(run.running for run in runs):
            _look(view, runs)
            target = _next_target(killed)
            if target is None or not killed.running or killed.step < target - _NEAR_STEPS:
                time.sleep(_LOOK_S)
            elif killed.wait_for_save(target, _LOOK_S):
                _tell_kill(view, killed, killed.kill(target))
                _start(view, killed, "resume", str(killed.run_dir))
        _look(view, runs)
    return straight, killed


def _start(view: DemoView, run: WatchedRun, *arguments: str) -> None:
    view.event(run, f"surefoot {' '.join(arguments)}", "cyan")
    run.start(*arguments, "logger.progress=plain")


def _look(view: DemoView, runs: Sequence[WatchedRun]) -> None:
    for run in runs:
        changed = run.look()
        if changed and run.status == "training" and run.kills:
            view.event(run, f"goes on from step {run.resumed_from}, the newest checkpoint that verifies")
        if changed and run.status == "ended":
            view.event(run, f"has ended at step {run.step:,}")
    view.draw()


def _next_target(run: WatchedRun) -> int | None:
    """The step in whose save the run is to be killed; `None` once that has happened, or was tried often enough."""
    if (run.kills and run.kills[-1].in_mid_save) or len(run.kills) == _MAX_KILLS:
        return None
    return max([_KILL_FROM_STEP, *(step + SAVE_PERIOD for step in run.saved())])


def _tell_kill(view: DemoView, run: WatchedRun, kill: Kill) -> None:
    if not kill.in_mid_save:
        view.event(run, f"SIGKILL, but step {kill.step} had just been committed. Once more at the next save", "yellow")
        return
    manifest = "with" if "manifest.json" in dict(kill.files) else "without"
    last = "".join(f", the last is {path} ({size(num_bytes)})" for path, num_bytes in kill.files[-1:])
    view.event(run, f"SIGKILL while step {kill.step} was being written", "bold red")
    view.event(run, f"tmp_step_{kill.step} is there {manifest} its manifest: {len(kill.files)} files{last}", "red")


def _say(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<17}", "bold"), text), soft_wrap=True)
