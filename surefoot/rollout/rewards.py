"""Scores completions by several weighted reward functions: `load_rewards`, then `await rewards.score(rows)`.

Functions run in worker processes (`workers`), those that no name can find in this one. A function that *returns*
what is no reward (a wrong count, a text, a NaN) is wrong itself: an error at once. One that *fails* (raises, takes too
long, ends its process) has its rows tried one by one: those that fail alone abstain and are counted, and too many of
them stop the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from surefoot.errors import ConfigError
from surefoot.rollout.reward_calls import RewardError, RewardFunction, Row, Values, named, score_async
from surefoot.rollout.reward_config import RewardConfig
from surefoot.rollout.reward_functions import Text
from surefoot.rollout.workers import CallFailed, Workers

_log = logging.getLogger(__name__)

__all__ = ["RewardConfig", "RewardError", "Rewards", "Scored", "Scores", "load_rewards"]

WINDOW = 100  # rows over which the share of failures is taken


@dataclass(frozen=True, slots=True)
class Scored:
    """A completion to be scored.

    Attributes:
        id: the row's, for messages.
        prompt, completion: text, or messages.
        columns: the further columns of the prompt's row: JSON values.
        completion_ids: the completion's token ids.
    """

    id: str
    prompt: Text
    completion: Text
    columns: dict[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What `Rewards.score` found, one entry per row in every list.

    Attributes:
        values: each function's own values by its name; None where it abstained.
        total: the weighted sum over those that did not abstain; NaN where all did.
        failures: by name, how many rows abstained because the function failed.
    """

    values: dict[str, Values]
    total: list[float]
    failures: dict[str, int]


Custom: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], float]


def load_rewards(
    rewards: Sequence[RewardConfig | Custom],
    *,
    models: Mapping[str, Callable[..., Any]] | None = None,
    max_reward_failures: float = 0.1,
    num_workers: int = 2,
) -> Rewards:
    """Find every function and start a worker that has them loaded, so that what cannot work shows now.

    Args:
        rewards: sections of the configuration, or functions, alone or with a weight. A function that can be imported
            by its name runs in the workers like any other; one that cannot runs in this process, without a time limit.
        models: for each section with a `model`, that `reward_model.RewardModel`.
        max_reward_failures: the run stops when a function has failed on a greater share of its last 100 rows.
        num_workers: calls at one time; each is a process.

    Raises:
        ConfigError: a function cannot be found, imported or called; two have one name; a package is missing.
    """
    loaded = Rewards(max_reward_failures, num_workers)
    try:
        for reward in rewards:
            loaded.add(reward, models or {})
        if not any(function.weight for function in loaded.functions):
            raise ConfigError("rewards: expected at least one with a weight other than 0, found none")
    except BaseException:
        loaded.close()
        raise
    return loaded


@dataclass
class _Function:
    """A reward as it is called, and how it has been doing."""

    label: str
    weight: float
    per_row: bool
    call: Callable[[Sequence[Row]], Awaitable[Values]]
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))  # true where it failed
    first_cause: str = ""
    seen: set[str] = field(default_factory=set)


class Rewards:
    """Made by `load_rewards`; its worker processes end with `close`, or with this process, however that ends."""

    def __init__(self, max_reward_failures: float, num_workers: int) -> None:
        self.functions: list[_Function] = []
        self._max_failures = max_reward_failures
        self._checks: list[Callable[[Sequence[Row]], list[str]]] = []
        self._needed: dict[str, None] = {}
        self._workers = Workers()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="rewards")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.label for function in self.functions)

    def check(self, rows: Sequence[Scored]) -> None:
        """See, without calling any, whether the functions in workers find the columns that they need in such rows.
        From here on a row may lack these columns, as others of the same call may: they are None. Raises `RewardError`
        when a function does not find one."""
        for check in self._checks:
            self._needed |= dict.fromkeys(check([plain(row) for row in rows]))

    async def score(self, rows: Sequence[Scored]) -> Scores:
        """Raises `RewardError` when a function returns what is no reward, or has failed on too many rows."""
        given: list[Row] = [{**row, "columns": {**self._needed, **row["columns"]}} for row in map(plain, rows)]
        found = await asyncio.gather(*(self._score(function, given) for function in self.functions))
        values = dict(zip(self.names, (values for values, _ in found), strict=True))
        failures = dict(zip(self.names, (failed for _, failed in found), strict=True))
        weights = [function.weight for function in self.functions]
        return Scores(values, [_weighted(weights, row) for row in zip(*values.values(), strict=True)], failures)

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self._workers.close()
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- loading

    def add(self, reward: RewardConfig | Custom, models: Mapping[str, Callable[..., Any]]) -> None:
        """Raises `ConfigError` as `load_rewards` does."""
        here: Callable[..., Any] | None = None
        if not isinstance(reward, RewardConfig):
            function, weight = reward if isinstance(reward, tuple) else (reward, 1.0)
            path = _path_of(function)
            here = None if path else function
            name = getattr(function, "__name__", type(function).__name__).strip("<>")
            reward = RewardConfig(function=path or f"python.{name}", weight=weight)
        label = reward.shown_as
        if label in self.names:
            raise ConfigError(f"rewards: two are called {label}; give one of them another name with label")
        if reward.model is not None:
            here = models.get(reward.model)
            if here is None:
                raise ConfigError(f"reward {label}: the reward model {reward.model} has not been loaded")
        elif here is not None:
            _log.warning("reward %s has no name to import it by: it runs in this process, without a time limit", label)
        try:
            call = self._in_worker(reward) if here is None else _in_process(reward, here)
        except ConfigError as error:
            raise ConfigError(f"reward {label}: {error}") from None
        except CallFailed as error:
            raise ConfigError(f"reward {label} cannot be loaded: {error}\n{error.details}".rstrip()) from None
        self.functions.append(_Function(label, reward.weight, reward.per_row, call))

    def _in_worker(self, reward: RewardConfig) -> Callable[[Sequence[Row]], Awaitable[Values]]:
        spec = json.dumps(["reward_calls", spec_of(reward)])
        self._workers.call(spec, None, reward.timeout_s)
        self._checks.append(lambda rows: self._workers.call(spec, {"rows": rows}, reward.timeout_s))

        async def call(rows: Sequence[Row]) -> Values:
            run = asyncio.get_running_loop().run_in_executor
            try:
                return list(await run(self._threads, self._workers.call, spec, rows, reward.timeout_s))
            except TypeError as error:
                raise RewardError(f"reward {reward.shown_as}: the rows hold what is no JSON value: {error}") from None

        return call

    # ------------------------------------------------------------------------------------------------------- scoring

    async def _score(self, function: _Function, rows: Sequence[Row]) -> tuple[Values, int]:
        """The values, and on how many rows the function failed."""
        if not rows:
            return [], 0
        try:
            values = await function.call(rows)
            function.recent.extend([False] * len(rows))
            return values, 0
        except CallFailed as error:
            failure = error
        if len(rows) > 1 and function.per_row:
            _log.warning("reward %s failed on %d rows: %s; trying each alone", function.label, len(rows), failure)
            found = [await self._score(function, [row]) for row in rows]
            return [value for values, _ in found for value in values], sum(failed for _, failed in found)
        self._count_failure(function, rows, failure)
        return [None] * len(rows), len(rows)

    def _count_failure(self, function: _Function, rows: Sequence[Row], failure: CallFailed) -> None:
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        cause = f"{named(rows[0])}{more}: {failure}"
        function.first_cause = function.first_cause or cause
        if failure.kind not in function.seen:
            function.seen.add(failure.kind)
            _log.warning("reward %s failed on %s. It abstains there.\n%s", function.label, cause, failure.details)
        function.recent.extend([True] * len(rows))
        if sum(function.recent) / WINDOW > self._max_failures:
            raise RewardError(
                f"reward {function.label} failed on {sum(function.recent)} of its last {WINDOW} rows, more than "
                f"max_reward_failures ({self._max_failures:g}) allows. First on {function.first_cause}"
            )


def _in_process(reward: RewardConfig, function: Callable[..., Any]) -> Callable[[Sequence[Row]], Awaitable[Values]]:
    ready = RewardFunction.of(reward.shown_as, function, spec_of(reward))

    async def call(rows: Sequence[Row]) -> Values:
        try:
            return await score_async(ready, rows)
        except RewardError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise CallFailed(kind, f"{kind}: {error}", traceback.format_exc()) from error

    return call


def spec_of(reward: RewardConfig) -> dict[str, Any]:
    """What `reward_calls` needs to know of a reward, as JSON values."""
    known = reward.model_dump(mode="json", include={"name", "function", "style", "columns", "arguments"})
    return {**known, "label": reward.shown_as, "options": reward.options}


def plain(row: Scored) -> Row:
    """A row as JSON values."""
    ids = None if row.completion_ids is None else list(row.completion_ids)
    texts = {"id": row.id, "prompt": row.prompt, "completion": row.completion}
    return {**texts, "completion_ids": ids, "columns": row.columns}


def _weighted(weights: Sequence[float], values: Sequence[float | None]) -> float:
    parts = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None and weight]
    return sum(parts) if parts else math.nan


def _path_of(function: Callable[..., Any]) -> str | None:
    """The dotted path by which another process finds this very function; None where there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(str(module)), name, None) is not function:
        return None
    return f"{module}.{name}"
