"""Rollouts of which some are not the student's: those prompts are answered by the data set, or by another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.data.encode import Encoder
from surefoot.data.rows import BadRow, Prompt, Row, chat_text
from surefoot.errors import DataError
from surefoot.rollout.config import RolloutAlgorithmConfig
from surefoot.rollout.conversations import Said
from surefoot.rollout.rollouts import Request, Rollout
from surefoot.rollout.source import Group, RolloutSource, rows_of
from surefoot.seeds import derive_seed
from surefoot.types import BatchRef, Column, Kit, Metric, Poll


class MixedSource(RolloutSource):
    """Which prompts the policy answers is drawn for each, from (seed, group) alone.

    Args:
        policy_fraction: the share of prompts that it answers.
        others: models that were lent to the rollouts, with the weights that each prompt's is drawn by; none: the
            data set's column `answer`.

    Attributes:
        answers: the data set's, to any prompts.

    Raises:
        DataError: a prompt has no answer.
    """

    def __init__(
        self, kit: Kit, config: RolloutAlgorithmConfig, *, policy_fraction: float, others: Sequence[tuple[str, float]]
    ) -> None:
        super().__init__(kit, config)
        self._seed, self._fraction, self._others = kit.config.seed, policy_fraction, list(others)
        self.answers = Answers(kit)
        if not others and policy_fraction < 1:
            require_answers(kit.train_data.prompts)

    def _answered(self, requests: Sequence[Request], version: int, poll: Poll) -> list[Rollout]:
        by_model: dict[str, list[Request]] = {}
        for request in requests:
            by_model.setdefault(self._model(request.group), []).append(request)
        found: dict[str, Rollout] = {}
        for model, asked in by_model.items():
            if model:
                answers = self._rollouts.sample(asked, self._rollouts.sampling, poll, model)
            else:
                answers = self.answers(asked)
            for rollout in answers:
                rollout.said.version = version
                found[rollout.request.id] = rollout
        return [found[request.id] for request in requests if request.id in found]

    def _rows(self, rollouts: Sequence[Rollout]) -> tuple[BatchRef, dict[str, Column]]:
        return rows_with_chats(rollouts)

    def _judged(self, groups: Sequence[Group]) -> dict[str, Metric]:
        """Of the policy's own answers: what the data set's are worth, or another model's, says nothing about it."""
        own = [group for group in groups if self._model(group.name) == "policy"]
        return super()._judged(own) if own else {}

    def _shown(self, ref: BatchRef) -> dict[str, Any]:
        return {**super()._shown(ref), "answered_by": [self._model(group) or "dataset" for group in ref.groups]}

    def _model(self, group: str) -> str:
        """Empty: the data set."""
        if self._drawn("policy", group) < self._fraction:
            return "policy"
        total, place = sum(weight for _, weight in self._others), self._drawn("other", group)
        for name, weight in self._others:
            place -= weight / total
            if place < 0:
                return name
        return self._others[-1][0] if self._others else ""

    def _drawn(self, purpose: str, group: str) -> float:
        """In [0, 1)."""
        return derive_seed(self._seed, "mixture", purpose, group) / 2**63


class Answers:
    """Prompts with the answers of their column `answer`, as training on the two would have them."""

    def __init__(self, kit: Kit) -> None:
        self._encoder = Encoder(kit.tokenizer, kit.config.data, kit.config.policy.max_total_sequence_length)

    def __call__(self, requests: Sequence[Request]) -> list[Rollout]:
        """Raises `DataError` when an answer cannot be rendered."""
        return [_answered(request, self._encoder) for request in requests]


def _answered(request: Request, encoder: Encoder) -> Rollout:
    prompt, text = request.prompt, request.prompt.columns["answer"]
    if prompt.messages is None:
        row = Row(prompt.where, prompt=str(prompt.given), completion=text)
    else:
        asked = [{"role": "user", "content": prompt.given}] if isinstance(prompt.given, str) else prompt.given
        row = Row(prompt.where, [*asked, {"role": "assistant", "content": text}], 1, prompt.tools)
    found = encoder.encode(row)
    if isinstance(found, BadRow) or not found:
        raise DataError(f"{prompt.where}: its answer cannot be trained on: {found or 'the template hides it'}")
    ids, own = found[-1].ids.tolist(), found[-1].mask.tolist()
    first = own.index(True) if True in own else len(ids)
    said = Said(ids[first:], own[first:], [0.0] * (len(ids) - first), [{"role": "assistant", "content": text}])
    said.finish_reason = "length" if found[-1].length > len(ids) else "stop"
    return Rollout(replace(request, prompt_ids=ids[:first]), said)


def rows_with_chats(rollouts: Sequence[Rollout]) -> tuple[BatchRef, dict[str, Column]]:
    """As `rows_of`, with the column `chat`, which a teacher with another tokenizer reads: `chat_text` of each."""
    ref, columns = rows_of(rollouts)
    return ref, columns | {"chat": [chat_text(each.request.prompt, each.said.messages) for each in rollouts]}


def require_answers(prompts: Sequence[Prompt]) -> None:
    """Raises `DataError` when a prompt has no answer."""
    without = [prompt.where for prompt in prompts if not has_answer(prompt)]
    if without:
        raise DataError(
            f"{without[0]} has no text as its `answer`, nor have {len(without) - 1} others, and the data set is to "
            "answer prompts: `columns: {answer: their_name}` maps another name"
        )


def has_answer(prompt: Prompt) -> bool:
    answer = prompt.columns.get("answer")
    return isinstance(answer, str) and bool(answer)
