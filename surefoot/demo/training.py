"""Training processes side by side, started, looked at and drawn until they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from surefoot.demo.view import DemoView
from surefoot.demo.watch import WatchedRun, stop_all

LOOK_S = 0.2


def train(
    runs: Mapping[WatchedRun, Sequence[str]], view: DemoView, wait: Callable[[], None] = lambda: time.sleep(LOOK_S)
) -> None:
    """All runs to their end. No process is left, whatever happens here.

    Args:
        runs: with what `surefoot train` is told: the configuration, and changes to it.
        wait: called after each look at them.

    Raises:
        SurefootError: a run failed.
    """
    with ExitStack() as stack:
        if view.live:
            stack.enter_context(view.live)
        stack.callback(stop_all, list(runs))
        for run, arguments in runs.items():
            start(view, run, "train", *arguments)
        running = True
        while running:
            running = any(run.running for run in runs)
            for run in runs:
                run.look()
            view.draw()
            wait()


def start(view: DemoView, run: WatchedRun, *arguments: str) -> None:
    view.event(run, f"surefoot {' '.join(arguments)}", "cyan")
    run.start(*arguments, "logger.progress=plain")
