"""Environments in worker processes: their state from turn to turn, and calls that do not come back."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.rollout.environment_calls import EnvironmentWorkers
from surefoot.rollout.environments import EnvironmentConfig, Message, Step
from surefoot.rollout.workers import CallFailed

SAMPLES = "tests.rollout.environment_samples"
ROW = {"prompt": "hello"}


@contextmanager
def workers(**config: Any) -> Iterator[EnvironmentWorkers]:
    made = EnvironmentWorkers(EnvironmentConfig(**{"name": f"{SAMPLES}.Told", "timeout_s": 2.0, **config}))
    try:
        yield made
    finally:
        made.close()


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def told(made: EnvironmentWorkers, id: str, *texts: str) -> Step:
    """The step after the last text; the others are known to be taken."""
    taken = [said(text) for text in texts[:-1]]
    return asyncio.run(made.step(id, ROW, taken, said(texts[-1])))


def test_an_environment_is_kept_from_turn_to_turn() -> None:
    with workers() as made:
        assert made.reset(ROW) == [{"role": "user", "content": "hello"}]
        first, second = told(made, "r0", "a"), told(made, "r0", "a", "b")
        (process, *words) = first.observation[0]["content"].split()
        assert words == ["a"] and int(process) != os.getpid()
        assert second == Step(({"role": "user", "content": f"{process} a b"},), reward=0.5)


def test_rollouts_of_the_same_words_do_not_share_one() -> None:
    with workers() as made:
        for id in ("r0", "r1", "r2"):
            assert told(made, id, "a").observation[0]["content"].split()[1:] == ["a"]
        for id in ("r2", "r0", "r1"):
            assert told(made, id, "a", "b").observation[0]["content"].split()[1:] == ["a", "b"]


@pytest.mark.parametrize(("text", "kind"), [("hang", "timeout"), ("crash", "died"), ("nan", "ValueError")])
def test_a_call_that_fails_costs_the_others_nothing(text: str, kind: str) -> None:
    """The process is replaced, and the other rollouts' environments are told their turns again."""
    with workers(timeout_s=1.0) as made:
        before = told(made, "r0", "a").observation[0]["content"].split()
        with pytest.raises(CallFailed) as caught:
            told(made, "r0", text)
        assert caught.value.kind == kind
        after = told(made, "r0", "a", "b").observation[0]["content"].split()
        assert after[1:] == ["a", "b"]
        assert (after[0] == before[0]) == (kind == "ValueError")
        assert not _runs(int(before[0])) or kind == "ValueError"


def test_a_row_that_cannot_be_opened_in_time() -> None:
    with workers(timeout_s=0.5) as made, pytest.raises(CallFailed, match=r"longer than 0.5 s and was ended"):
        made.reset({**ROW, "hangs": True})


_EXPECTED = "expected a list of messages, each a dict with role and content"


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("step", "a tuple", r"step gave tuple \(\(\), 1.0, True\); expected a surefoot.rollout.environments.Step"),
        ("step", "nothing", "step gave null; expected a surefoot.rollout.environments.Step"),
        ("observation", "a text", f"step's observation gave string 'go on'; {_EXPECTED}"),
        ("observation", "one message", f"step's observation gave object .*; {_EXPECTED}"),
        ("observation", "no role", f"step's observation gave list .*; {_EXPECTED}"),
        ("observation", "a number", "step's observation gave the content number 5; expected text"),
        ("observation", "half a character", "expected Unicode, found the lone surrogate U"),
        ("reward", "1", "its reward is string '1'; expected a finite number, or None"),
        ("reward", 1e39, "its reward is number 1e"),
        ("reset", "nothing", "reset gave null; expected a list of at least one message"),
        ("reset", "no messages", r"reset gave list \[\]; expected a list of at least one message"),
        ("reset", "a text", "reset gave string 'go on'; expected a list of at least one message"),
    ],
)
def test_what_no_environment_gives_is_named(option: str, given: Any, message: str) -> None:
    with workers(name=f"{SAMPLES}.Odd", options={option: given}) as made, pytest.raises(CallFailed, match=message):
        if option == "reset":
            made.reset(ROW)
        told(made, "r0", "a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("raise", "cannot make its 3 rows: LookupError: no rows today"),
        ("nothing", "cannot make its 3 rows: TypeError: rows gave null; expected a list of rows"),
        ("a set", "cannot make its 3 rows: TypeError: Object of type set"),
    ],
)
def test_rows_that_cannot_be_made(given: str, message: str) -> None:
    with workers(name=f"{SAMPLES}.Odd", options={"rows": given}) as made, pytest.raises(ConfigError, match=message):
        made.rows(3, 0)


def test_a_step_is_the_same_number_for_number() -> None:
    with workers(name="guessing", options={"max_guesses": 7}) as made:
        row = {"prompt": "?", "secret": 3}
        step = asyncio.run(made.step("r0", row, [said("9"), said("1")], said("3")))
        assert step == Step(reward=1 - 2 / 7, done=True) or math.isclose(step.reward or 0, 5 / 7)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with workers() as made:
        processes = {int(told(made, f"r{i}", "a").observation[0]["content"].split()[0]) for i in range(8)}
        assert len(processes) == 2
    assert not any(map(_runs, processes))


def _runs(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
