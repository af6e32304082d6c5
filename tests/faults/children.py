"""What the child processes of the signal tests do: real runs that come to a certain point and wait there to be hit."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot import build, loop, stop
from surefoot.checkpoint import storage
from surefoot.cli import main
from surefoot.run import Run
from tests.helpers import runs
from tests.helpers.fork_server import forked


def run(file: str, run_dir: str, hold_at: str, meeting: str, *overrides: str) -> int:
    """Start or resume, and hold at a point until the file `<meeting>/go` is there; `<meeting>/here` says so.

    Args:
        hold_at: "train", "batch", "validate", "save", "last save" or "nothing".
    """
    here, go = Path(meeting) / "here", Path(meeting) / "go"

    def meet() -> None:
        here.touch()
        while not go.exists():
            time.sleep(0.002)

    if (Path(run_dir) / "config.yaml").exists():
        made = runs.resumed(Path(run_dir), *overrides)
    else:
        made = runs.started(Path(file), f"run_dir={run_dir}", *overrides)
    if hold_at != "nothing":
        _HOLDS[hold_at](made, meet)
    outcome = loop.train(made)
    print(outcome)  # noqa: T201 - into the child's log
    return outcome.exit_code


def _in_training(made: Run, meet: Callable[[], None]) -> None:
    """In step 3, the save of step 2 being done."""

    def meet_when_saved() -> None:
        made.checkpoints.wait_for_finalization()
        meet()

    engine: Any = made.kit.engines["policy"]
    engine.train = _meeting_when(engine.train, meet_when_saved, lambda: made.clock.step == 2)


def _waiting_for_a_batch(made: Run, meet: Callable[[], None]) -> None:
    """A source whose third batch never comes: it waits and polls, as one does that waits for rollouts."""
    source: Any = made.source
    take = source.take

    def wait(clock: Any, poll: Callable[[], None]) -> Any:
        if clock.step != 2:
            return take(clock, poll)
        meet()
        while True:
            poll()
            time.sleep(0.002)

    source.take = wait


def _in_validation(made: Run, meet: Callable[[], None]) -> None:
    algorithm: Any = made.algorithm
    algorithm.evaluate = _meeting_when(algorithm.evaluate, meet, lambda: made.clock.step == 4)


def _in_a_background_save(made: Run, meet: Callable[[], None]) -> None:
    """The writer of step 2 is held while the loop trains on."""
    storage.observers.append(_once("tmp_step_2/policy/optimizer", meet))


def _in_the_last_save(made: Run, meet: Callable[[], None]) -> None:
    """A first signal comes in step 3; then the writer of the save that it asks for is held."""
    engine: Any = made.kit.engines["policy"]
    train = engine.train

    def hit(*args: Any) -> Any:
        if made.clock.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train(*args)

    engine.train = hit
    storage.observers.append(_once("tmp_step_3/policy/optimizer", meet))


_HOLDS: dict[str, Callable[[Run, Callable[[], None]], None]] = {
    "train": _in_training,
    "batch": _waiting_for_a_batch,
    "validate": _in_validation,
    "save": _in_a_background_save,
    "last save": _in_the_last_save,
}


def _meeting_when(call: Callable[..., Any], meet: Callable[[], None], now: Callable[[], bool]) -> Callable[..., Any]:
    met: list[bool] = []

    def wrapped(*args: Any) -> Any:
        if now() and not met:
            met.append(True)
            meet()
        return call(*args)

    return wrapped


def _once(ending: str, meet: Callable[[], None]) -> Callable[[str, str], None]:
    met: list[bool] = []

    def observer(name: str, path: str) -> None:
        if path.endswith(ending) and threading.current_thread() is not threading.main_thread() and not met:
            met.append(True)
            meet()

    return observer


def command_line(*words: str) -> int:
    """`surefoot …`, as the shell would run it."""
    sys.argv = ["surefoot", *words]
    main()
    return 0


def command_line_near_its_deadline(*words: str) -> int:
    """The same; when step 3 has been trained, an hour passes at once."""
    stop.PROCESS_STARTED_S = time.monotonic()
    start = build.start

    def late(*args: Any, **kwargs: Any) -> Run:
        made = start(*args, **kwargs)
        manager: Any = made.checkpoints
        offer = manager.offer

        def wait_an_hour(step: int, *more: Any) -> None:
            if step == 3:
                stop.PROCESS_STARTED_S -= 3600
            offer(step, *more)

        manager.offer = wait_an_hour
        return made

    build.start = late
    return command_line(*words)


def hold_while_tokenizing(file: str, run_dir: str, meeting: str) -> int:
    """Start a run with two tokenizing workers, and hold when the first answer has come."""
    from surefoot.data import workers

    pools: Any = workers._Pool
    receive = pools.receive

    def received(pool: Any) -> Any:
        answer = receive(pool)
        (Path(meeting) / "pids").write_text(" ".join(str(worker.pid) for worker in pool._all))
        (Path(meeting) / "here").touch()
        time.sleep(600)
        return answer

    pools.receive = received
    runs.started(Path(file), f"run_dir={run_dir}", "data.num_workers=2")
    return 0


def kill_a_start_everywhere(file: str, folder: str) -> int:
    """Kill a start before each storage operation that it makes before its first step; then start again, or resume
    where there is a run already. Only children of this child run torch."""
    for index in range(1000):
        run_dir = Path(folder) / f"run_{index}"
        status = forked(functools.partial(_start_and_die, file, run_dir, index))
        if status == 0:  # it came through: there is no operation `index`
            assert index > 3
            return 0
        assert status == -9, status
        again = forked(functools.partial(_start_again, file, run_dir))
        left = sorted(path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*"))
        assert again == 0, f"after a kill before operation {index}: {left}"
    return 1


def _start_and_die(file: str, run_dir: Path, index: int) -> None:
    numbers = itertools.count()

    def die(name: str, path: str) -> None:
        if next(numbers) == index:
            os.kill(os.getpid(), signal.SIGKILL)

    storage.observers.append(die)
    runs.started(Path(file), f"run_dir={run_dir}").checkpoints.shutdown()


def _start_again(file: str, run_dir: Path) -> None:
    begun = (run_dir / "config.yaml").exists()
    made = runs.resumed(run_dir) if begun else runs.started(Path(file), f"run_dir={run_dir}")
    assert made.clock.step == 0
    made.checkpoints.shutdown()
