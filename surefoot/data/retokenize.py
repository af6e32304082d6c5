"""Rows as another tokenizer has them: the same completion behind the same prompt, by its own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.config import DataConfig
from surefoot.data.encode import Encoder
from surefoot.data.rows import BadRow, Prompt
from surefoot.data.token_bytes import END, TokenBytes


@dataclass(frozen=True, slots=True)
class Retold:
    """A row for a teacher.

    Attributes:
        ids: int64 [tokens], of prompt and completion. `mask` float32 [tokens]: 1 on the completion.
        ends: int64 [the teacher's completion tokens]: the byte of the completion behind each. The token that ends the
            turn is one more byte.
        student_ends: int64 [the student's completion tokens]: likewise.
        cut: tokens that the teacher cannot read any more.
    """

    ids: Tensor
    mask: Tensor
    ends: Tensor
    student_ends: Tensor
    cut: int


class Retokenizer:
    """
    Args:
        student: with the tokens that end its turns.
        tokenizer: the teacher's, a Hugging Face fast tokenizer.
        data: of the run; prompts come with their system turns already in place.
        max_length: tokens that the teacher reads; completions are cut there.
    """

    def __init__(self, student: TokenBytes, tokenizer: Any, data: DataConfig, max_length: int) -> None:
        self._encoder = Encoder(
            tokenizer, data.model_copy(update={"system_prompt": None, "fold_system": False}), max_length
        )
        self.student, self.teacher = student, TokenBytes(tokenizer, self._encoder.stop_ids())
        self._max_length = max_length

    def __call__(self, prompt: Prompt, completion: Sequence[int]) -> Retold | str:
        """The row, or in a few words why there is none.

        Args:
            completion: the student's tokens, with the one that ended the turn, if it did.

        Raises:
            ModelError: the prompt is a chat, and the teacher has no chat template.
        """
        if max(completion, default=0) >= len(self.student):
            return "an id that the student's tokenizer lacks"
        data, student_ends = self.student.read(completion)
        ended = data.endswith(END)
        text = _text(data.removesuffix(END), cut=not ended)
        if text is None:
            return "a completion that is no text"
        asked = self._encoder.encode(prompt)
        if isinstance(asked, BadRow):
            return f"a prompt that the teacher's chat template refuses ({asked.reason})"
        prompt_ids = asked[0].ids.tolist()
        if not 0 < len(prompt_ids) < self._max_length:
            return "a prompt without room for a completion in the teacher" if prompt_ids else "a prompt without tokens"
        said = self.teacher.spell(text)
        if said is None:
            return "a text that the teacher's tokenizer does not give back"
        ids, ends = said.ids, said.ends
        if ended and self.teacher.end_ids:
            ids, ends = [*ids, self.teacher.end_ids[-1]], np.append(ends, len(data))
        room = self._max_length - len(prompt_ids)
        if not ids or not completion:
            return "an empty completion"
        mask = [0.0] * len(prompt_ids) + [1.0] * min(len(ids), room)
        return Retold(
            torch.tensor([*prompt_ids, *ids[:room]]),
            torch.tensor(mask),
            torch.from_numpy(ends[:room]),
            torch.from_numpy(student_ends),
            max(len(ids) - room, 0),
        )


def _text(data: bytes, *, cut: bool) -> str | None:
    """`cut`: the beginning of a character at the end is left out."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at_end = error.end == len(data) and "end of data" in error.reason
        return data[: error.start].decode() if cut and at_end else None
