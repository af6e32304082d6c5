"""Environments and tools that worker processes import by name: nothing heavy here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

from surefoot.rollout.environments import Environment, Message, Step


class Choosy(Environment):
    """Fails on the row whose answer is 5, and on all if told so."""

    def __init__(self, *, broken: bool = False, turns: int = 1) -> None:
        self._broken, self._turns = broken, turns

    def reset(self, row: Any) -> list[Message]:
        self._answer, self._turn = row["answer"], 0
        return self.opening(row)

    def step(self, message: Message) -> Step:
        if self._broken or self._answer == "5":
            raise KeyError(f"no row {self._answer}")
        self._turn += 1
        if self._turn < self._turns:
            return Step(({"role": "user", "content": "again"},), reward=0.25)
        return Step(reward=float(message["content"] == self._answer), done=True)


class OwnRows(Environment):
    """Makes its rows; each answer is worth a half."""

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        return [{"prompt": f"{10 + i}+1="} for i in range(num_rows)]

    def reset(self, row: Any) -> list[Message]:
        return self.opening(row)

    def step(self, message: Message) -> Step:
        return Step(reward=0.5, done=True)


class AsksTwice(Environment):
    """Another sum, whatever was said to the first."""

    def reset(self, row: Any) -> list[Message]:
        self._asked = False
        return self.opening(row)

    def step(self, message: Message) -> Step:
        if self._asked:
            return Step(reward=1.0, done=True)
        self._asked = True
        return Step(({"role": "user", "content": "12+34="},))


class Told(Environment):
    """Counts its turns, says which process it is in, and does what it is told: hang, crash, or give a reward of NaN."""

    def reset(self, row: Any) -> list[Message]:
        self._said: list[str] = []
        if row.get("hangs"):
            time.sleep(600)
        return self.opening(row)

    def step(self, message: Message) -> Step:
        self._said.append(message["content"])
        if message["content"] == "hang":
            while True:
                pass
        if message["content"] == "crash":
            os.abort()
        if message["content"] == "nan":
            return Step(reward=float("nan"))
        return Step(({"role": "user", "content": f"{os.getpid()} {' '.join(self._said)}"},), reward=0.5)


class HangsAtOnce(Environment):
    def reset(self, row: Any) -> list[Message]:
        time.sleep(600)
        return self.opening(row)

    def step(self, message: Message) -> Step:
        return Step(done=True)


class Odd(Environment):
    """Gives what no environment should: by the name of the option, as the rows, the opening or the step."""

    GIVEN: ClassVar[dict[str, Any]] = {
        "nothing": None,
        "a text": "go on",
        "one message": {"role": "user", "content": "go on"},
        "no messages": [],
        "no role": [{"content": "go on"}],
        "a number": [{"role": "user", "content": 5}],
        "half a character": [{"role": "user", "content": "\ud83d"}],
        "a set": [{1, 2}],
        "a tuple": ((), 1.0, True),
    }

    def __init__(self, *, rows: str = "", reset: str = "", step: str = "", observation: str = "", reward: Any = None):
        self._rows, self._reset, self._step, self._reward = rows, reset, step, reward
        self._observation = observation
        if rows == "no environment":
            raise LookupError("no server")

    def rows(self, num_rows: int, seed: int) -> Any:
        if self._rows == "raise":
            raise LookupError("no rows today")
        return self.GIVEN[self._rows]

    def reset(self, row: Any) -> Any:
        return self.GIVEN[self._reset] if self._reset else self.opening(row)

    def step(self, message: Message) -> Any:
        if self._step:
            return self.GIVEN[self._step]
        return Step(self.GIVEN[self._observation] if self._observation else (), self._reward)


def wait(seconds: float, folder: str) -> str:
    """Wait.

    Args:
        seconds: How long.
        folder: Where to note it.
    """
    with (Path(folder) / "calls").open("a") as file:
        file.write(f"{os.getpid()} {seconds}\n")
    time.sleep(seconds)
    return f"waited {seconds:g}"
