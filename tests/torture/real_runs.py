"""A tiny real run to be tortured: what its processes do, and what must hold whenever one of them is gone."""

from __future__ import annotations

import os
import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot import loop
from surefoot.checkpoint import commit, verify_checkpoint
from surefoot.checkpoint.commit import step_of
from surefoot.run import Run
from tests.helpers import runs
from tests.helpers.fork_server import Child, ForkServer, wait_for

STEPS = 8
SETTINGS = (f"max_num_steps={STEPS}", "checkpointing.save_period=1", "checkpointing.keep_top_k=2")

Progress = Callable[[int], None]


@dataclass
class Tally:
    """What was done, and what went wrong: each failure with the seed and the place, to be repeated."""

    name: str
    done: int = 0
    failures: list[str] = field(default_factory=list)
    notes: str = ""

    @contextmanager
    def judging(self, what: str) -> Iterator[None]:
        """A check that fails, or an error of any kind, is a failure of what was tried."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{self.name}, {what}: {''.join(traceback.format_exception(error)[-2:]).strip()}")


@dataclass(frozen=True)
class Reference:
    """Attributes:
    file: the configuration.
    straight: `run_dir` of the run that nothing disturbed.
    seconds, turning_s: that it took, from its start and from its loop's start.
    """

    case: str
    file: Path
    straight: Path
    seconds: float
    turning_s: float

    @classmethod
    def made(cls, server: ForkServer, folder: Path, case: str) -> Reference:
        folder.mkdir(parents=True)
        file = runs.write_project(folder, case=case)
        for name in ("first", "run"):  # the first one pages in what all later ones share
            started_s = time.monotonic()
            events = folder / f"{name}.events"
            child = attempt(server, file, folder / name, events, folder / "log")
            wait_for(turning(events), child)
            turning_s = time.monotonic()
            assert child.wait() == 0, child.log
        ended_s = time.monotonic()
        return cls(case, file, folder / "run", ended_s - started_s, ended_s - turning_s)

    def wait_at_random(self, rng: random.Random, child: Child, events: Path) -> None:
        """Until some moment of the child's attempt: mostly in its loop, else anywhere from its start on."""
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0, self.seconds))
        else:
            wait_for(turning(events), child)
            time.sleep(rng.uniform(0, self.turning_s))

    def assert_equals_straight(self, run_dir: Path, may_stay: tuple[str, ...] = ()) -> None:
        """Weights, optimizer, position and metrics, bit for bit; and nothing but `may_stay` is left lying about."""
        ours, theirs = (folder / "checkpoints" / f"step_{STEPS}" for folder in (run_dir, self.straight))
        states = runs.state_bytes(ours), runs.state_bytes(theirs)
        assert states[0], f"{ours} is not there"
        assert states[0].keys() == states[1].keys(), "other files than the straight run"
        wrong = [name for name in states[0] if states[0][name] != states[1][name]]
        assert not wrong, f"not what the straight run has: {wrong}"
        assert runs.metric_lines(run_dir) == runs.metric_lines(self.straight), "other metrics than the straight run"
        assert_all_sound(run_dir)
        left = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(("tmp_", ".swap"))]
        left += [path.name for path in (run_dir / "checkpoints").glob(".trash/*")]
        assert set(left) <= set(may_stay), f"left lying about: {left}"


def assert_all_sound(run_dir: Path) -> list[int]:
    """Every directory with a checkpoint's name verifies. Returns their steps."""
    steps = []
    for path in sorted((run_dir / "checkpoints").glob("step_*")):
        result = verify_checkpoint(path)
        assert result.sound, f"{path}: {result.problems}"
        assert step_of(path.name) is not None, path
        steps.append(step_of(path.name) or 0)
    return steps


def assert_nothing_lost(run_dir: Path, events: Path) -> None:
    """What was reported as saved is there: the newest such step, or a newer one."""
    steps = assert_all_sound(run_dir)
    reported = reported_steps(events)
    if reported:
        assert max(steps, default=0) >= reported[-1], f"step {reported[-1]} was committed; there is {steps}"


def reported_steps(events: Path) -> list[int]:
    """The steps on record as committed, in their order. A kill may have cut off the last line."""
    lines = events.read_text().splitlines(keepends=True) if events.exists() else []
    return [int(line) for line in lines if line.endswith("\n")]


def turning(events: Path) -> Path:
    """The file that says that the last attempt has come to its loop."""
    return events.with_suffix(".turning")


def attempt(server: ForkServer, file: Path, run_dir: Path, events: Path, log: Path) -> Child:
    turning(events).unlink(missing_ok=True)
    return server.start(start_or_resume, file, run_dir, events, log=log)


# ---------------------------------------------------------------------------------------------------------- in children


def start_or_resume(file: str, run_dir: str, events: str, after_commit: Callable[[], None] = lambda: None) -> int:
    """One attempt, as a user would make it. Each committed step is put on record outside the run's file system, and
    what the attempt goes on from is checked against that record."""
    reported = reported_steps(Path(events))
    if (Path(run_dir) / "config.yaml").exists():
        run = runs.resumed(Path(run_dir))
    else:
        run = runs.started(Path(file), f"run_dir={run_dir}", *SETTINGS)
    assert run.clock.step >= max(reported, default=0), f"goes on from {run.clock.step}, {reported} were committed"
    record(Path(events), after_commit)
    turning(Path(events)).touch()
    finish(run)
    return 0


def record(events: Path, after_commit: Callable[[], None]) -> None:
    """A step is on record when its commit has returned: from then on nothing may take it away."""
    file = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    real = commit.commit

    def recorded(temporary: Path, final: Path, retire: Callable[[Path], None]) -> None:
        real(temporary, final, retire)
        os.write(file, f"{step_of(final.name)}\n".encode())
        after_commit()

    commit.commit = recorded


def finish(run: Run) -> None:
    """Turn the loop to its end. A run that was killed after its last save has nothing left to do."""
    if run.clock.step == run.limits.max_num_steps:
        run.checkpoints.shutdown()
    else:
        loop.train(run)


def fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def sampled(items: list[Any], count: int | None, seed: int) -> list[Any]:
    """All of them, or so many, in their order."""
    if count is None or count >= len(items):
        return items
    return [items[i] for i in sorted(random.Random(seed).sample(range(len(items)), count))]
