"""The demo from beginning to end: make a task, train it twice, kill one of the two, compare them, use the result."""

from __future__ import annotations

import json
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
from surefoot.demo.watch import WatchedRun, stop_all
from surefoot.report.text import duration

_NEXT = """\
Next, try
  surefoot ckpt ls {root}/killed  # what is on disk
  surefoot ckpt verify {root}/killed  # every byte against the manifests
  surefoot train {root}/sft.yaml run_dir={root}/again seed=1  # Ctrl-C saves and stops it
  surefoot resume {root}/again  # and this goes on"""
_KILL_IN = range(NUM_STEPS // 2, NUM_STEPS, SAVE_PERIOD)  # the first of these saves that can be caught
_LOOK_S = 0.2
_NEAR_STEPS = 50  # before a save: from here on the watch for it is close


def tell(root: Path, seed: int, console: Console) -> bool:
    """Run the whole demo in `root`. Returns whether every fact is as it was to be.

    Raises:
        SurefootError: the folder cannot be used, or a run failed.
    """
    began_s = time.monotonic()
    with claimed(root) as folder:
        if folder.moved_to:
            _say(console, "Moved aside", f"an earlier demo, to {folder.moved_to}")
        folder.fill(seed)
        rows = task.read_rows(folder.heldout)
        _say(console, "Task", f"sums such as {task.question(rows[0])}?, {len(rows)} held out in both orders")
        _say(console, "Files", f"{folder.train.parent}, {folder.tokenizer} (trained on it), {folder.config}")
        before = _untrained_answers(folder, rows)
        _say(console, "Before training", f"{task.exact_match(before, rows):.1%} of the held-out sums are right")
        straight, killed = (WatchedRun(name, folder.root / name) for name in ("straight", "killed"))
        train_both(folder.config, straight, killed, DemoView(console, (straight, killed), NUM_STEPS), _KILL_IN)
        comparison = compare_runs(straight.run_dir, killed.run_dir, NUM_STEPS)
        after = _trained_answers(killed.checkpoints / f"step_{NUM_STEPS}" / "policy" / "weights", rows)
    facts = [
        *closing.answers(rows, before, after),
        *closing.training(straight),
        *closing.killing(killed),
        *closing.comparing(comparison),
        closing.Fact("time", duration(time.monotonic() - began_s)),
    ]
    console.print(closing.table(facts))
    console.print(_NEXT.format(root=folder.root), soft_wrap=True, highlight=False)
    return all(fact.held is not False for fact in facts)


def _say(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<17}", "bold"), text), soft_wrap=True)


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


def _trained_answers(weights: Path, rows: Sequence[task.Row]) -> list[str]:
    """A checkpoint's weights are a plain Hugging Face folder: nothing of Surefoot is needed to use them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(weights)
    return task.greedy_answers(model, AutoTokenizer.from_pretrained(weights), rows)


def train_both(config: Path, straight: WatchedRun, killed: WatchedRun, view: DemoView, kill_in: Sequence[int]) -> None:
    """Both runs to their end; the second is killed on the way. No process is left, whatever happens here.

    Args:
        kill_in: the saves in which to kill it, by step: the next is tried where a commit was quicker than the kill.
    """
    runs = (straight, killed)
    with ExitStack() as stack:
        if view.live:
            stack.enter_context(view.live)
        stack.callback(stop_all, runs)
        for run in runs:
            _start(view, run, "train", str(config), f"run_dir={json.dumps(str(run.run_dir), ensure_ascii=False)}")
        running = True
        while running:
            running = any(run.running for run in runs)
            for run in runs:
                run.look()
            view.draw()
            left = [step for step in kill_in if step > max(killed.saved(), default=0)]
            if any(killed.kills.values()) or not left or not killed.running or killed.step < left[0] - _NEAR_STEPS:
                time.sleep(_LOOK_S)
            elif killed.wait_for_save(left[0], _LOOK_S):
                _kill(view, killed, left[0])


def _kill(view: DemoView, run: WatchedRun, step: int) -> None:
    if run.kill(step):
        view.event(run, f"SIGKILL while step {step} was being written: half of it is left", "bold red")
    else:
        view.event(run, f"SIGKILL, but step {step} had just been committed. Once more at the next save", "yellow")
    _start(view, run, "resume", str(run.run_dir))


def _start(view: DemoView, run: WatchedRun, *arguments: str) -> None:
    view.event(run, f"surefoot {' '.join(arguments)}", "cyan")
    run.start(*arguments, "logger.progress=plain")
