"""An environment's calls, each with a time limit that really ends it: they run in worker processes, as rewards do.

All turns of a rollout go to one process, which keeps the environment between them. Where it is not there (another
rollout's call took too long, so that the process was ended) it is made anew, and told the earlier turns again.
"""

from __future__ import annotations

import asyncio
import json
import numbers
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from surefoot.data.rows import RowError, check_plain, describe
from surefoot.errors import ConfigError
from surefoot.rollout.environments import Environment, EnvironmentConfig, Message, Row, Step, environment_maker
from surefoot.rollout.reward_calls import GREATEST
from surefoot.rollout.workers import CallFailed, Workers

_NUM_WORKERS = 2
_KEPT = 4096  # environments that a process keeps; rollouts that a limit ended leave theirs behind


class EnvironmentWorkers:
    """The side of the training process. Workers start with the first call, and end with `close` or with this process.

    All methods raise `ConfigError` when the environment cannot be had, and, but for `rows`, `CallFailed` when the call
    raises, gives what it should not, takes longer than its time, or ends its process.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._name = config.name
        self._spec = json.dumps(["environment_calls", config.model_dump(mode="json")])
        self._timeout_s = config.timeout_s
        self._lanes = [(Workers(), ThreadPoolExecutor(1, "environments")) for _ in range(_NUM_WORKERS)]

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        """Raises `ConfigError` when the call fails."""
        try:
            return list(self._lanes[0][0].call(self._spec, {"num_rows": num_rows, "seed": seed}, self._timeout_s))
        except CallFailed as error:
            found = f"environment {self._name} cannot make its {num_rows} rows: {error}\n{error.details}"
            raise ConfigError(found.rstrip()) from None

    def reset(self, row: Row) -> list[Message]:
        return list(self._lanes[0][0].call(self._spec, {"row": row}, self._timeout_s))

    async def step(self, id: str, row: Row, taken: Sequence[Message], message: Message) -> Step:
        """
        Args:
            id: the rollout's.
            taken: the model's earlier turns, without those whose call failed.
        """
        workers, thread = self._lanes[zlib.crc32(id.encode()) % len(self._lanes)]
        given = {"id": id, "row": row, "taken": list(taken), "message": message}
        limit = self._timeout_s * (1 + len(taken))  # earlier turns may have to be told again
        run = asyncio.get_running_loop().run_in_executor
        observation, reward, done = await run(thread, workers.call, self._spec, given, limit)
        return Step(tuple(observation), reward, done)

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for workers, thread in self._lanes:
            workers.close()
            thread.shutdown(cancel_futures=True)


# --------------------------------------------------------------------------------------------------------- the worker


def calls(values: Mapping[str, Any]) -> Callable[[Any], Any]:
    """What a worker does: rows, the messages that open one, or the step after a turn as (observation, reward, done)."""
    make = environment_maker(EnvironmentConfig.model_validate(values))
    kept: OrderedDict[str, Environment] = OrderedDict()

    def call(given: Any) -> Any:
        if "num_rows" in given:
            return _rows(make().rows(given["num_rows"], given["seed"]))
        if "message" not in given:
            return _messages(make().reset(given["row"]), "reset", at_least=1)
        told = [given["id"], given["row"], given["taken"]]
        environment = kept.pop(json.dumps(told), None) or _told_again(make(), given["row"], given["taken"])
        step = environment.step(given["message"])
        if not isinstance(step, Step):
            raise TypeError(f"step gave {describe(step)}; expected a surefoot.rollout.environments.Step")
        answer = _messages(step.observation, "step's observation"), _checked(step.reward), bool(step.done)
        if not step.done:
            kept[json.dumps([*told[:2], [*given["taken"], given["message"]]])] = environment
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        return answer

    return call


def _told_again(environment: Environment, row: Row, taken: Sequence[Message]) -> Environment:
    environment.reset(row)
    for message in taken:
        environment.step(message)
    return environment


def _rows(given: Any) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise TypeError(f"rows gave {describe(given)}; expected a list of rows")
    return list(given)


def _messages(given: Any, what: str, *, at_least: int = 0) -> list[Message]:
    """Raises `TypeError` or `ValueError` when these are no messages that a chat template could render."""
    of_messages = isinstance(given, list | tuple) and len(given) >= at_least
    if not of_messages or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in given):
        some = "at least one message" if at_least else "messages"
        raise TypeError(f"{what} gave {describe(given)}; expected a list of {some}, each a dict with role and content")
    for each in given:
        if not isinstance(each.get("content", ""), str | list | None):
            raise TypeError(f"{what} gave the content {describe(each['content'])}; expected text")
    try:
        check_plain("message", what, list(given))
    except RowError as error:
        raise ValueError(error.detail) from None
    return list(given)


def _checked(reward: Any) -> float | None:
    if getattr(reward, "ndim", None) == 0:  # a NumPy number or a tensor
        reward = reward.item()
    is_number = isinstance(reward, numbers.Real)
    if reward is not None and not (is_number and abs(reward) <= GREATEST):
        expected = f"expected a finite number, or None, and no number beyond {GREATEST:.1e}"
        raise ValueError(f"its reward is {describe(reward)}; {expected}")
    return None if reward is None else float(reward)
