"""The tasks of reasoning-gym, by name: one question, one answer, the task's own score."""

from __future__ import annotations

import json
from typing import Any

from surefoot.errors import ConfigError
from surefoot.rollout import reward_functions
from surefoot.rollout.environments import Environment, Message, Row, Step
from surefoot.seeds import derive_seed


class ReasoningGym(Environment):
    """Needs the extra `math`.

    Args:
        task: its name, such as chain_sum.
        system_prompt: what opens each chat, for example how to mark the answer: `<answer>…</answer>`.
        settings: of the task, such as {max_terms: 3}, for rows that are made here.
    """

    reply_role = None

    def __init__(self, *, task: str, system_prompt: str | None = None, settings: dict[str, Any] | None = None) -> None:
        reward_functions.gym_task(task)
        self._task, self._system_prompt, self._settings = task, system_prompt, settings or {}

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        gym = reward_functions.extra("reasoning_gym", "reasoning-gym")
        seed = derive_seed(seed, "reasoning_gym") % 2**32
        try:
            entries = gym.create_dataset(self._task, size=num_rows, seed=seed, **self._settings)
        except (TypeError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym's {self._task} does not take settings {self._settings}: {error}"
            ) from None
        given = [{"prompt": e["question"], "answer": e["answer"], "metadata": e["metadata"]} for e in entries]
        rows: list[dict[str, Any]] = json.loads(json.dumps(given, default=str))
        return rows

    def reset(self, row: Row) -> list[Message]:
        self._row = row
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, *self.opening(row)]

    def step(self, message: Message) -> Step:
        row = self._row
        score = reward_functions.reasoning_gym(
            message["content"],
            row["answer"],
            row.get("metadata"),
            reward_functions.whole_text(row["prompt"]),
            task=self._task,
        )
        return Step(reward=score, done=True)
