"""An environment's calls, each with a time limit that really ends it: they run in worker processes, as rewards do.

All turns of a rollout go to one process, which keeps the environment between them. Where it is not there (another
rollout's call took too long, so that the process was ended) it is made anew, and told the earlier turns again.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from surefoot.rollout.environments import Environment, EnvironmentConfig, Message, Row, Step, environment_maker
from surefoot.rollout.workers import Workers

_NUM_WORKERS = 2
_KEPT = 4096  # environments that a process keeps; rollouts that a limit ended leave theirs behind


class EnvironmentWorkers:
    """The side of the training process. Workers start with the first call, and end with `close` or with this process.

    All methods raise `CallFailed` when the call raises, takes longer than its time, or ends its process, and
    `ConfigError` when the environment cannot be had.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._spec = json.dumps(["environment_calls", config.model_dump(mode="json")])
        self._timeout_s = config.timeout_s
        self._lanes = [(Workers(), ThreadPoolExecutor(1, "environments")) for _ in range(_NUM_WORKERS)]

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        return list(self._lanes[0][0].call(self._spec, {"num_rows": num_rows, "seed": seed}, self._timeout_s))

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
            return make().rows(given["num_rows"], given["seed"])
        if "message" not in given:
            return make().reset(given["row"])
        told = [given["id"], given["row"], given["taken"]]
        environment = kept.pop(json.dumps(told), None) or _told_again(make(), given["row"], given["taken"])
        step = environment.step(given["message"])
        answer = list(step.observation), _checked(step.reward), bool(step.done)
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


def _checked(reward: float | None) -> float | None:
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}; expected a finite number, or None")
    return None if reward is None else float(reward)
