"""Rollouts of several turns: an environment opens each row, and replies until it, or a limit, ends the conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surefoot.data.encode import Encoder
from surefoot.data.prompts import Messages
from surefoot.data.rows import Prompt
from surefoot.errors import ConfigError
from surefoot.rollout.environment_calls import EnvironmentWorkers
from surefoot.rollout.environments import EnvironmentConfig, Message, Row, Step, load_environment
from surefoot.rollout.workers import CallFailed
from surefoot.seeds import derive_seed
from surefoot.types import Completion

_MAX_ENDED = 3  # so many rows that end the environment's process as they are opened are enough
FinishReason = Literal["stop", "length", "turns"]
Sample = Callable[[Sequence[int], int, int], Awaitable[tuple[Completion, str]]]


@dataclass
class Said:
    """What was said behind a prompt, so far.

    Attributes:
        ids: tokens behind the prompt. `own` [tokens]: those that the model sampled. `logprobs` [tokens]: theirs; 0
            elsewhere.
        messages: the same in words.
        finish_reason: "stop": the model, or the environment, has ended it; "length" or "turns": a limit has.
        reward: the environment's; `None` where there is none, or it gave none.
        version: of the weights that sampled it.
        failed_turns: whose tools took longer than their time, and what went wrong first.
    """

    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    version: int = -1
    failed_turns: int = 0
    failure: str = ""

    def sampled(self, completion: Completion, text: str) -> None:
        self.ids += completion.ids
        self.own += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reason, self.version = completion.finish_reason, completion.version

    def observed(self, messages: Sequence[dict[str, Any]], ids: Sequence[int]) -> None:
        self.ids += ids
        self.own += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += messages

    @property
    def text(self) -> str:
        """Of one turn its content, of several all that was said, by whom."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in self.messages)


class Conversations:
    """Lets the model talk with an environment of each rollout's own. An `Opener` of rows as well.

    Args:
        encoder: what the prompts were encoded with.
        seed: the run's.

    Attributes:
        max_tokens: of a rollout, prompt and all.
        tools: that the model may call, described for the chat template.
        reply_role: the environment's.

    Raises:
        ConfigError: there is no such environment, or it does not take its options.
    """

    def __init__(self, config: EnvironmentConfig, encoder: Encoder, *, max_tokens: int, seed: int) -> None:
        self._environment, self._max_turns = load_environment(config)(), config.max_turns
        self._name, self._ended = config.name, 0
        self.tools, self.reply_role = self._environment.tool_schemas, self._environment.reply_role
        self._workers = EnvironmentWorkers(config)
        self._encoder, self.max_tokens, self._seed = encoder, max_tokens, seed

    def rows(self, num_rows: int, name: str) -> list[dict[str, Any]]:
        return self._workers.rows(num_rows, derive_seed(self._seed, "environment", name))

    def open(self, row: dict[str, Any]) -> tuple[Messages, list[dict[str, Any]] | None]:
        try:
            return self._workers.reset(row), self.tools
        except CallFailed as failure:
            self._ended += failure.kind in ("timeout", "died")
            if self._ended < _MAX_ENDED:
                raise
            raise ConfigError(
                f"environment {self._name} could not open {self._ended} rows; the last time {failure}. Each costs as "
                "much time again: mend its reset, or raise environment.timeout_s"
            ) from None

    def close(self) -> None:
        """End the environments' processes. Safe to call twice."""
        self._workers.close()

    async def talk(
        self, id: str, prompt: Prompt, prompt_ids: Sequence[int], stop_ids: Sequence[int], sample: Sample
    ) -> Said:
        """
        Args:
            id: the rollout's.
            sample: given token ids, the number of the turn and how many tokens there is room for, the model's next
                turn and its text.

        Raises:
            CallFailed: the environment raises, takes longer than its time, or ends its process.
        """
        said, taken, row = Said(), list[Message](), {"prompt": prompt.given, **prompt.columns}
        for turn in range(self._max_turns):
            room = self.max_tokens - len(prompt_ids) - len(said.ids)
            said.sampled(*await sample([*prompt_ids, *said.ids], turn, room))
            step = await self._step(id, row, taken, said)
            if step.reward is not None:
                said.reward = (said.reward or 0.0) + step.reward
            if step.done or said.finish_reason == "length":
                return said
            if turn + 1 == self._max_turns:
                break
            chat = [*(prompt.messages or ()), *said.messages]
            end = said.ids[-1] if said.ids and said.ids[-1] in stop_ids else None
            reply = self._encoder.reply_ids(chat, step.observation, prompt.tools, end)
            if len(prompt_ids) + len(said.ids) + len(reply) >= self.max_tokens:
                said.finish_reason = "length"
                return said
            said.observed(step.observation, reply)
        said.finish_reason = "turns"
        return said

    async def _step(self, id: str, row: Row, taken: list[Message], said: Said) -> Step:
        """What the environment says to the last turn, which is then `taken`, unless something is said in its place."""
        message = said.messages[-1]
        try:
            step = await self._workers.step(id, row, taken, message)
        except CallFailed as failure:
            ended = failure.kind in ("timeout", "died")
            instead = self._environment.failed(message, str(failure)) if ended else None
            if instead is None:
                raise
            said.failed_turns += 1
            said.failure = said.failure or str(failure)
            return instead
        taken.append(message)
        return step
