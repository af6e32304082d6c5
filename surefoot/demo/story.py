"""The demo from beginning to end: make a task, train it twice, kill one of the two, compare them, use the result."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from surefoot.demo import closing, task
from surefoot.demo.compare import compare_runs
from surefoot.demo.folder import NUM_STEPS, SAVE_PERIOD, DemoFolder, claimed
from surefoot.demo.view import DemoView
from surefoot.demo.watch import Kill, WatchedRun
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
            console.print(f"An earlier demo was there; it is now {folder.moved_to}", style="dim", highlight=False)
        with timeline.phase("data and tokenizer"):
            folder.fill(seed)
            rows = task.read_rows(folder.heldout)
        closing.print_task(console, folder, rows)
        with timeline.phase("untrained model"):
            before = _untrained_answers(folder, rows)
        closing.print_score(console, "Before training", task.exact_match(before, rows))
        with timeline.phase("training, side by side"):
            straight, killed = _train_both(folder, console)
        with timeline.phase("comparison"):
            comparison = compare_runs(straight.run_dir, killed.run_dir, NUM_STEPS)
        with timeline.phase("trained model"):
            after = _answers_of(killed.checkpoints / f"step_{NUM_STEPS}" / "policy" / "weights", rows)
        closing.print_examples(console, rows, before, after)
        closing.print_summary(console, straight, killed, comparison, timeline, rows, before, after)
        failures = closing.failures(killed, comparison, task.exact_match(before, rows), task.exact_match(after, rows))
        closing.print_end(console, folder, failures)
        return not failures


def _untrained_answers(folder: DemoFolder, rows: Sequence[task.Row]) -> list[str]:
    """Of the very weights that both runs begin with."""
    from surefoot.config_file import load_config
    from surefoot.engine import models

    _quiet_libraries()
    config = load_config(folder.config)
    tokenizer = models.load_tokenizer(config.policy)
    loaded = models.load(config.policy, tokenizer=tokenizer, seed=config.seed)
    return task.greedy_answers(loaded.model, tokenizer, rows)


def _answers_of(weights: Path, rows: Sequence[task.Row]) -> list[str]:
    """A checkpoint's weights are a plain Hugging Face folder: nothing of Surefoot is needed to use them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(weights)
    return task.greedy_answers(model, AutoTokenizer.from_pretrained(weights), rows)


def _quiet_libraries() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------------------ training


def _train_both(folder: DemoFolder, console: Console) -> tuple[WatchedRun, WatchedRun]:
    """Both runs to their end; the second is killed on the way. No process is left, whatever happens here."""
    straight, killed = (WatchedRun(name, folder.root / name) for name in ("straight", "killed"))
    runs = (straight, killed)
    closing.print_runs(console, [_arguments(folder, run) for run in runs])
    with ExitStack() as stack:
        view = stack.enter_context(DemoView(console, runs, NUM_STEPS, SAVE_PERIOD))
        for run in runs:
            stack.callback(run.stop)
            run.start(*_arguments(folder, run))
        seen: dict[str, str] = {}
        while any(run.running for run in runs):
            for run in runs:
                run.look()
                _tell_news(view, run, seen)
            view.draw()
            target = _next_target(killed)
            if target is None or not killed.running or killed.step < target - _NEAR_STEPS:
                time.sleep(_LOOK_S)
            elif killed.wait_for_save(target, _LOOK_S):
                _tell_kill(view, killed.kill(target), killed)
                killed.start("resume", str(killed.run_dir), "logger.progress=plain")
        for run in runs:
            run.look()
            _tell_news(view, run, seen)
    return straight, killed


def _arguments(folder: DemoFolder, run: WatchedRun) -> list[str]:
    return ["train", str(folder.config), f"run_dir={run.run_dir}", "logger.progress=plain"]


def _next_target(run: WatchedRun) -> int | None:
    """The step in whose save the run is to be killed; `None` once that has happened, or was tried often enough."""
    if (run.kills and run.kills[-1].in_mid_save) or len(run.kills) == _MAX_KILLS:
        return None
    last = max([*run.saved(), _KILL_FROM_STEP - SAVE_PERIOD])
    return last - last % SAVE_PERIOD + SAVE_PERIOD


def _tell_kill(view: DemoView, kill: Kill, run: WatchedRun) -> None:
    name = signal.Signals.SIGKILL.name
    if not kill.in_mid_save:
        view.event(f"killed    {name} came too late: step {kill.step} was committed already. Once more …", "yellow")
        return
    manifest = "with" if any(path == "manifest.json" for path, _ in kill.files) else "without"
    view.event(f"killed    {name} while step {kill.step} was being written, at step {run.step}", "bold red")
    view.event(f"          tmp_step_{kill.step} is there, {manifest} its manifest: {_files_text(kill)}", "red")
    view.event("          starting: surefoot resume " + str(run.run_dir), "magenta")


def _files_text(kill: Kill) -> str:
    shown = ", ".join(f"{path} ({size(num_bytes)})" for path, num_bytes in kill.files[-2:])
    return f"{len(kill.files)} files, the last {shown}" if kill.files else "no file yet"


def _tell_news(view: DemoView, run: WatchedRun, seen: dict[str, str]) -> None:
    """A line when a run begins to train, and when it ends."""
    status = run.status
    if seen.get(run.name) in (status, None) and status == "starting":
        seen[run.name] = status
    if seen.get(run.name) == status:
        return
    seen[run.name] = status
    if status == "training" and run.kills:
        ignored = f", tmp_step_{run.kills[-1].step} is not used" if run.kills[-1].in_mid_save else ""
        view.event(
            f"{run.name:<10}goes on from step {run.resumed_from}, the newest checkpoint that verifies{ignored}",
            "magenta",
        )
    elif status in ("training", "ended"):
        view.event(f"{run.name:<10}{'trains' if status == 'training' else f'has ended at step {run.step}'}")
