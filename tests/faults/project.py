"""A tiny real run to be broken, and the straight run that it must equal in the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surefoot import loop
from surefoot.checkpoint import storage, verify_checkpoint
from surefoot.errors import SaveFailed
from surefoot.run import Run
from tests.helpers import runs

STEPS = 6  # saved at 2, 4 and 6
ONE_CASE = "dpo-mpo"  # for what does not depend on the case: it has a frozen model, and running state


def in_every_case(name: str, first: Any, *others: Any) -> pytest.MarkDecorator:
    """Parametrizes a test that takes `every_project`: the first value for every case, the others for one."""
    pairs = [(case, first) for case in runs.CASES] + [(ONE_CASE, other) for other in others]
    return pytest.mark.parametrize(("every_project", name), pairs, indirect=["every_project"])


@dataclass(frozen=True)
class Project:
    """Attributes:
    file: the configuration.
    straight: `run_dir` of a run that nothing disturbed.
    """

    file: Path
    straight: Path

    @classmethod
    def made(cls, folder: Path, case: str) -> Project:
        """Made once; found again when asked for a second time."""
        home = folder / case
        if not home.exists():
            home.mkdir()
            runs.trained(runs.write_project(home, case=case), f"max_num_steps={STEPS}")
        return cls(home / "config.yaml", home / "run")

    def start(self, run_dir: Path, *overrides: str) -> Run:
        return joined(runs.started(self.file, f"run_dir={run_dir}", f"max_num_steps={STEPS}", *overrides))

    def finished_copy(self, run_dir: Path) -> Path:
        """The straight run's folder, to be tampered with. Returns its checkpoints."""
        shutil.copytree(self.straight, run_dir)
        return run_dir / "checkpoints"

    def assert_goes_on(self, run_dir: Path, from_step: int, *overrides: str, **options: Any) -> None:
        """A resume begins at `from_step`, and the run then ends as the straight one, bit for bit."""
        run = joined(runs.resumed(run_dir, *overrides, **options))
        assert run.clock.step == from_step
        loop.train(run)
        self.assert_equals_straight(run_dir, run.checkpoints.checkpoint_dir)

    def assert_equals_straight(self, run_dir: Path, checkpoints: Path | None = None) -> None:
        last = (checkpoints or run_dir / "checkpoints") / f"step_{STEPS}"
        assert runs.state_bytes(last) == runs.state_bytes(self.straight / "checkpoints" / last.name)
        assert runs.metric_lines(run_dir) == runs.metric_lines(self.straight)
        assert_all_sound(last.parent)


def joined(run: Run) -> Run:
    """The background writer has ended when the next step begins: so it is certain where a failure shows."""
    manager: Any = run.checkpoints
    offer = manager.offer

    def offer_and_wait(*args: Any, **kwargs: Any) -> None:
        offer(*args, **kwargs)
        manager.wait_for_finalization()

    manager.offer = offer_and_wait
    return run


def before_offer(run: Run, step: int, act: Callable[[], Any]) -> None:
    """Do something to the world when the loop has done this step, just before it offers the save."""
    manager: Any = run.checkpoints
    offer = manager.offer

    def act_and_offer(at: int, *args: Any, **kwargs: Any) -> None:
        if at == step:
            act()
        offer(at, *args, **kwargs)

    manager.offer = act_and_offer


def trained_steps(run: Run) -> list[int]:
    """The step in which each call of an engine's `train` was made, filled while the run turns."""
    calls: list[int] = []
    engines: Any = run.kit.engines.values()
    for engine in engines:
        train = engine.train

        def counted(*args: Any, train: Callable[..., Any] = train, **kwargs: Any) -> Any:
            calls.append(run.clock.step + 1)
            return train(*args, **kwargs)

        engine.train = counted
    return calls


def fails(run: Run, after: int, save: int) -> SaveFailed:
    """Turn the loop; it must stop after exactly `after` steps because the save of step `save` failed, with every
    checkpoint before it sound."""
    calls = trained_steps(run)
    with pytest.raises(SaveFailed) as caught:
        loop.train(run)
    failure = caught.value
    assert run.clock.step == after
    assert sorted(set(calls)) == list(range(1, after + 1))
    assert failure.step == save
    assert f"step {save}" in str(failure)
    assert isinstance(failure.__cause__, BaseException)
    return failure


def train_lines(run_dir: Path) -> int:
    return sum(line["kind"] == "train" for line in runs.metric_lines(run_dir))


def assert_all_sound(checkpoints: Path) -> None:
    """Every directory that has a checkpoint's name is one."""
    for path in checkpoints.glob("step_*"):
        if path.name.removeprefix("step_").isdigit():
            assert verify_checkpoint(path).sound, verify_checkpoint(path)


@contextmanager
def observing(observer: Callable[[str, str], None]) -> Iterator[None]:
    """Call `observer` with the name and path of each storage operation, before it."""
    storage.observers.append(observer)
    try:
        yield
    finally:
        storage.observers.remove(observer)


def plant_writer(run: Run, step: int, writer: Callable[[Any], None]) -> None:
    """Let the algorithm's part of the checkpoint of `step` be written by `writer`."""
    part: Any = run.algorithm
    snapshot = part.snapshot

    def planted() -> Callable[[Any], None]:
        return writer if run.clock.step == step else snapshot()

    part.snapshot = planted
