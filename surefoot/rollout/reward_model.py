"""A reward model as a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surefoot.data.encode import Encoder
from surefoot.data.rows import BadRow, Row
from surefoot.rollout.reward_functions import Text
from surefoot.types import BatchRef, DataPlane, Engine, Head


class RewardModel:
    """Scores a completion by the model's number at the last token of prompt and completion, which are encoded as in
    `algorithm: rm`, cut at the length limit.

    Args:
        engine: a scalar one, that reads and writes columns of `plane`.
        encoder: of the reward model's own tokenizer.
    """

    def __init__(self, engine: Engine, plane: DataPlane, encoder: Encoder) -> None:
        self._engine, self._plane, self._encoder = engine, plane, encoder

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """Raises `ValueError` when a row cannot be encoded."""
        return self.score_tokens([self._encode(*texts) for texts in zip(prompts, completions, strict=True)])

    def score_tokens(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One score for each row of token ids."""
        ids = tuple(f"reward_model_g{i}" for i in range(len(rows)))
        ref = BatchRef(ids, ids, tuple(map(len, rows)), (0,) * len(rows), frozenset())
        ref = self._plane.put(ref, {"input_ids": [torch.tensor(row) for row in rows]})
        try:
            ref = self._engine.infer(ref, Head(("scalar",)), {"scalar": "score"})
            return [float(scores[-1]) for scores in self._plane.get(ref, ["score"])["score"]]
        finally:
            self._plane.drop(ref)

    def _encode(self, prompt: Text, completion: Text) -> list[int]:
        if isinstance(prompt, str) and isinstance(completion, str):
            row = Row("", prompt=prompt, completion=completion)
        else:
            said = _messages(completion, "assistant")
            row = Row("", [*_messages(prompt, "user"), *said], len(said))
        found = self._encoder.encode(row)
        if isinstance(found, BadRow) or not found:
            raise ValueError(found.detail if isinstance(found, BadRow) else "there is no assistant turn to score")
        ids: list[int] = found[-1].ids.tolist()
        return ids


def _messages(text: Text, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)
