"""Samples completions and scores them, in training and in validation alike: the one place where `asyncio` lives."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from surefoot.data.rows import Prompt
from surefoot.errors import RolloutError, StaleWeights
from surefoot.rollout.conversations import Conversations, Said
from surefoot.rollout.reward_calls import GREATEST, RewardError
from surefoot.rollout.rewards import WINDOW, Rewards, Scored, Scores
from surefoot.rollout.workers import CallFailed
from surefoot.types import Completion, Generator, Poll, Sampling

_log = logging.getLogger(__name__)

_POLL_PERIOD_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. Its randomness follows from the run's seed, `group` and `index`."""

    group: str
    index: int
    prompt: Prompt
    prompt_ids: Sequence[int]

    @property
    def id(self) -> str:
        return f"{self.group}_g{self.index}"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished request."""

    request: Request
    said: Said

    @property
    def truncated(self) -> bool:
        return self.said.finish_reason != "stop"


class Rollouts:
    """Runs requests through a generator, all of a call at once, and what comes of them through the rewards.

    Args:
        tokenizer: of the model that is sampled from.
        rewards: none where nothing is to be scored.
        conversations: where an environment replies to the model.
        max_failures: the share of the last rollouts that may have failed in the environment.

    Attributes:
        sampling: as in training.
        live: yields the version of the weights that the generator has been given last; waited for.
    """

    def __init__(
        self,
        tokenizer: Any,
        rewards: Rewards | None,
        conversations: Conversations | None,
        *,
        seed: int,
        max_failures: float,
    ) -> None:
        self._tokenizer, self._rewards, self._conversations = tokenizer, rewards, conversations
        self._seed, self._max_failures = seed, max_failures
        self._runner = asyncio.Runner()
        self._generators: dict[str, Generator] = {}
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # true where a rollout failed
        self._seen: set[str] = set()
        self._first_cause = ""
        self.sampling = Sampling(max_new_tokens=1)
        self.live: Future[int] | None = None

    def connect(self, generator: Generator, sampling: Sampling) -> None:
        """What samples, and how it does in training. Both are there once the model is loaded."""
        self._generators["policy"], self.sampling = generator, sampling

    def lend(self, name: str, generator: Generator) -> None:
        """Another model to sample from, which does not change: `sample` names it."""
        self._generators[name] = generator

    @property
    def weights(self) -> dict[str, float]:
        """Of each reward in a row's whole reward, by name."""
        functions = self._rewards.functions if self._rewards is not None else []
        found = {function.label: function.weight for function in functions}
        return found | ({"environment": 1.0} if self._conversations is not None else {})

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, poll: Poll, model: str = "policy"
    ) -> list[Rollout]:
        """The requests' rollouts, in order, all made with the weights that are `live`; or by a `model` that was lent.
        One that fails in its environment is logged and left out.

        Raises:
            StaleWeights: a completion was sampled with other weights.
            RolloutError: too many failed.
            Exception: whatever the generator raised first, once all other requests are cancelled.
        """
        version = self._live_version(poll) if model == "policy" else self._generators[model].version
        found = self._run(_all([self._rollout(request, sampling, model) for request in requests]), poll)
        done = [rollout for rollout in found if isinstance(rollout, Rollout)]
        self._check_failures([each for each in found if not isinstance(each, Rollout)], done)
        for rollout in done:
            if rollout.said.version != (version := rollout.said.version if version is None else version):
                raise StaleWeights(
                    f"rollout {rollout.request.id} was sampled with version {rollout.said.version} of the weights, "
                    f"expected {version}: the generator did not get the newest ones"
                )
        return done

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Whether the reward functions find their columns among those of these prompts. Raises `RewardError`."""
        if self._rewards is not None:
            columns = {name: value for prompt in reversed(prompts) for name, value in prompt.columns.items()}
            self._rewards.check([Scored("any", prompts[0].given, "", columns, ())])

    def score(self, rollouts: Sequence[Rollout], poll: Poll) -> Scores:
        """An environment's own reward is called "environment".

        Raises:
            RewardError: as `Rewards.score` does, or a row's whole reward is no float32.
        """
        scores = Scores({}, [math.nan] * len(rollouts), {})
        if self._rewards is not None:
            scores = self._run(self._rewards.score([_scored(rollout) for rollout in rollouts]), poll)
        if self._conversations is not None:
            own = [rollout.said.reward for rollout in rollouts]
            total = [_sum(whole, part) for whole, part in zip(scores.total, own, strict=True)]
            scores = Scores({**scores.values, "environment": own}, total, scores.failures)
        for rollout, whole in zip(rollouts, scores.total, strict=True):
            if abs(whole) > GREATEST:
                raise RewardError(
                    f"the rewards of rollout {rollout.request.id}, each by its weight ({self.weights}), add up to "
                    f"{whole:.3g}; expected at most {GREATEST:.1e}: lower the weights, or return smaller rewards"
                )
        return scores

    def close(self) -> None:
        """End the generators, all processes of rewards and environments, and the event loop. Safe to call twice."""
        for generator in self._generators.values():
            generator.close()
        if self._rewards is not None:
            self._rewards.close()
        if self._conversations is not None:
            self._conversations.close()
        self._runner.close()

    # ------------------------------------------------------------------------------------------------------- sampling

    def _live_version(self, poll: Poll) -> int | None:
        while self.live is not None and not self.live.done():
            poll()
            wait([self.live], timeout=_POLL_PERIOD_S)
        return None if self.live is None else self.live.result()

    def _run(self, work: Coroutine[Any, Any, T], poll: Poll) -> T:
        return self._runner.run(_polled(work, poll))

    async def _rollout(self, request: Request, sampling: Sampling, model: str) -> Rollout | _Failed:
        async def sample(ids: Sequence[int], turn: int, room: int) -> tuple[Completion, str]:
            completion = await self._generate(request, ids, turn, sampling, room, model)
            return completion, self._text(completion, sampling)

        if self._conversations is None:
            said = Said()
            said.sampled(*await sample(request.prompt_ids, 0, sampling.max_new_tokens))
            return Rollout(request, said)
        try:
            prompt, ids = request.prompt, request.prompt_ids
            said = await self._conversations.talk(request.id, prompt, ids, sampling.stop_ids, sample)
        except _GeneratorFailed as failure:
            raise failure.error from None
        except CallFailed as error:
            return _Failed(request, error)
        except Exception as error:  # the template's, for what was said
            kind = type(error).__name__
            return _Failed(request, CallFailed(kind, f"{kind}: {error}", traceback.format_exc()))
        return Rollout(request, said)

    async def _generate(
        self, request: Request, ids: Sequence[int], turn: int, sampling: Sampling, room: int, model: str
    ) -> Completion:
        try:
            return await self._generators[model].generate(
                ids,
                seed=self._seed,
                group=f"{request.group}_t{turn}" if turn else request.group,
                index=request.index,
                sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
                session=request.id,
            )
        except Exception as error:
            error.add_note(f"while rollout {request.id} was sampled, turn {turn + 1}")
            raise (error if self._conversations is None else _GeneratorFailed(error)) from None

    def _text(self, completion: Completion, sampling: Sampling) -> str:
        """Without the token that ended the turn. Other special tokens stay: in an answer they are wrong."""
        ids = completion.ids[:-1] if completion.ids[-1:] and completion.ids[-1] in sampling.stop_ids else completion.ids
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _check_failures(self, failed: Sequence[_Failed], done: Sequence[Rollout]) -> None:
        """The first of each kind is logged with its traceback, the others with a line. A turn that was told of an error
        in its tools' place counts as well."""
        told = [rollout for rollout in done if rollout.said.failed_turns]
        self._recent.extend([True] * (len(failed) + len(told)) + [False] * (len(done) - len(told)))
        for each in failed:
            trace = "" if each.error.kind in self._seen else each.error.details
            self._seen.add(each.error.kind)
            self._first_cause = self._first_cause or f"{each.request.id}: {each.error}"
            _log.warning("%s", f"rollout {each.request.id} failed: {each.error}\n{trace}".rstrip())
        for rollout in told:
            name, failure = rollout.request.id, rollout.said.failure
            self._first_cause = self._first_cause or f"{name}: {failure}"
            _log.warning("rollout %s: a tool failed, and the model is told: %s", name, failure)
        wrong, total = len(failed) + len(told), len(failed) + len(done)
        if wrong and (not done or sum(self._recent) > self._max_failures * WINDOW):
            raise RolloutError(
                f"{wrong} of {total} rollouts failed in their environment, and {sum(self._recent)} of the "
                f"last {WINDOW}, where max_reward_failures ({self._max_failures:g}) is the share that may. The first "
                f"was {self._first_cause}"
            )


@dataclass(frozen=True, slots=True)
class _Failed:
    request: Request
    error: CallFailed


class _GeneratorFailed(Exception):
    """Tells a generator's error, which ends the run, from an environment's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """As `gather`, and nothing goes on once one has failed."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _polled(work: Coroutine[Any, Any, T], poll: Poll) -> T:
    """Its result, with `poll` called meanwhile; what that raises ends the work."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            poll()
            await asyncio.wait([task], timeout=_POLL_PERIOD_S)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _sum(*values: float | None) -> float:
    """Of those that are there; NaN where none is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) if known else math.nan


def _scored(rollout: Rollout) -> Scored:
    """As TRL has it: a text is answered by a text, a chat by messages. Token ids are the model's own."""
    request, said = rollout.request, rollout.said
    own = [i for i, sampled in zip(said.ids, said.own, strict=True) if sampled]
    given = request.prompt.given
    if isinstance(given, str) and len(said.messages) == 1:
        return Scored(request.id, given, said.text, request.prompt.columns, own)
    return Scored(request.id, request.prompt.messages or given, said.messages, request.prompt.columns, own)
