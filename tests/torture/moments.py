"""A real run is killed, or has its power cut, at random moments, again and again until it is done."""

from __future__ import annotations

import itertools
import os
import random
import signal
from pathlib import Path

from surefoot.checkpoint import storage
from tests.helpers import mounts
from tests.helpers.fork_server import ForkServer
from tests.torture.real_runs import (
    STEPS,
    Progress,
    Reference,
    Tally,
    assert_nothing_lost,
    attempt,
    fresh,
    start_or_resume,
    turning,
)

OPERATIONS = 500  # of a whole run, at least
MOST_PER_RUN = 6  # then a run may end; else a slow machine would never get there


def kill(
    server: ForkServer,
    reference: Reference,
    folder: Path,
    count: int,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Tally:
    """`count` SIGKILLs at random moments; a kill may hit a start or a resume too."""
    tally, rng = Tally("kills"), random.Random(seed)
    started = in_starts = in_saves = 0
    run_dir, events = folder / "run", folder / "events"
    words = (server, reference.file, run_dir, events, folder / "log")
    while tally.done + len(tally.failures) < count:
        started += 1
        fresh(folder)
        with tally.judging(f"seed {seed}, run {started}"):
            for _ in range(min(MOST_PER_RUN, count - tally.done)):
                child = attempt(*words)
                reference.wait_at_random(rng, child, events)
                child.signal(signal.SIGKILL)
                if (status := child.wait()) == 0:
                    break
                assert status == -signal.SIGKILL, child.log[-4000:]
                tally.done += 1
                in_starts += not turning(events).exists()
                in_saves += any((run_dir / "checkpoints").glob("tmp_step_*"))
                progress(tally.done)
                assert_nothing_lost(run_dir, events)
            child = attempt(*words)
            assert child.wait() == 0, child.log[-4000:]
            reference.assert_equals_straight(run_dir)
    tally.notes = f"{started} runs, {in_starts} kills in a start or resume, {in_saves} in the middle of a save"
    return tally


def cut_power(
    server: ForkServer,
    reference: Reference,
    folder: Path,
    count: int,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Tally:
    """`count` power cuts, on a file system of its own that is mounted again after each: at random moments, before
    random storage operations, and right after commits."""
    tally, rng = Tally("power cuts"), random.Random(seed)
    fresh(folder)
    image, events, log = folder / "image", folder / "events", folder / "log"
    started = in_saves = 0
    with mounts.ext4(image, folder / "disk", size=128 * mounts.MIB) as disk:
        while tally.done + len(tally.failures) < count:
            started += 1
            run_dir = fresh(disk / "parent") / "run"
            events.unlink(missing_ok=True)
            words = (reference.file, run_dir, events)
            with tally.judging(f"seed {seed}, run {started}"):
                for _ in range(min(MOST_PER_RUN, count - tally.done)):
                    kind = rng.choice(("time", "operation", "commit"))
                    if kind == "time":
                        child = attempt(server, *words, log)
                        reference.wait_at_random(rng, child, events)
                        mounts.cut_power(disk)
                        child.signal(signal.SIGKILL)
                    else:
                        number = rng.randrange(OPERATIONS) if kind == "operation" else rng.randrange(STEPS // 2)
                        child = server.start(cut_at, *words, str(disk), kind, number, log=log)
                    child.wait()
                    mounts.unmount(disk)
                    mounts.mount_image(image, disk)
                    tally.done += 1
                    in_saves += any((run_dir / "checkpoints").glob("tmp_step_*"))
                    progress(tally.done)
                    assert_nothing_lost(run_dir, events)
                child = attempt(server, *words, log)
                assert child.wait() == 0, child.log[-4000:]
                reference.assert_equals_straight(run_dir)
    tally.notes = f"{started} runs, {in_saves} cuts in the middle of a save"
    return tally


def cut_at(file: str, run_dir: str, events: str, disk: str, kind: str, number: int) -> int:
    """In a child: the power goes before storage operation `number` of this attempt, or right after so many commits."""
    operations, commits = itertools.count(), itertools.count()

    def cut() -> None:
        mounts.cut_power(Path(disk))
        os.kill(os.getpid(), signal.SIGKILL)

    def before_operation(name: str, path: str) -> None:
        if kind == "operation" and next(operations) == number:
            cut()

    def after_commit() -> None:
        if kind == "commit" and next(commits) == number:
            cut()

    storage.observers.append(before_operation)
    return start_or_resume(file, run_dir, events, after_commit)
