"""Rows as another tokenizer has them: the same turns in the same chat, by its own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from surefoot.config import DataConfig
from surefoot.data.encode import Encoder
from surefoot.data.rows import BadRow, Prompt, RowError, chat_of
from surefoot.data.token_bytes import END, Ends, Spelled, TokenBytes


@dataclass(frozen=True, slots=True)
class Retold:
    """A row for a teacher.

    Attributes:
        ids: int64 [tokens], of the whole chat. `mask` float32 [tokens]: 1 on the student's own turns.
        turns: of each of these, int64 [the student's tokens] and [the teacher's tokens]: the byte of the turn behind
            each. The token that ends a turn is one more byte.
        cut: tokens that the teacher cannot read any more.
    """

    ids: Tensor
    mask: Tensor
    turns: list[tuple[Ends, Ends]]
    cut: int = 0


def same_tokens(ids: Tensor, mask: Tensor) -> Retold:
    """For a teacher with the student's tokenizer: the row itself, each token a byte, whatever it stands for."""
    places = np.arange(int((mask != 0).sum()))
    return Retold(ids, mask, [(places, places)])


class Retokenizer:
    """
    Args:
        student: with the tokens that end its turns.
        tokenizer: the teacher's, a Hugging Face fast tokenizer.
        data: of the run; prompts come with their system turns already in place.
        max_length: tokens that the teacher reads; rows are cut there.
    """

    def __init__(self, student: TokenBytes, tokenizer: Any, data: DataConfig, max_length: int) -> None:
        self._encoder = Encoder(
            tokenizer, data.model_copy(update={"system_prompt": None, "fold_system": False}), max_length
        )
        self.student, self.teacher = student, TokenBytes(tokenizer, self._encoder.stop_ids())
        self._max_length = max_length
        self.template = xxhash.xxh3_128_hexdigest(str(tokenizer.chat_template).encode())  # its fingerprint

    def __call__(self, chat: str, ids: Tensor, mask: Tensor) -> Retold:
        """A row made as the student's was: what the student has sampled stands as it is, and around its turns is what
        the teacher's template puts there.

        Args:
            chat: from `surefoot.data.rows.chat_text`.
            ids, mask: [tokens], the student's row; not 0 on its own turns, with the tokens that ended them.

        Raises:
            RowError: the teacher cannot read this chat, or it has no text.
            ModelError: it is a chat, and the teacher has no chat template.
        """
        prompt, said = chat_of(chat)
        answers = [i for i, message in enumerate(said) if message["role"] == "assistant"]
        told, own, turns = self.prompt_ids(prompt), list[bool](), list[tuple[Ends, Ends]]()
        for number, turn in enumerate(_turns(ids, mask, several=len(answers) > 1)):
            if number:
                before, now = answers[number - 1], answers[number]
                end = told[-1] if told[-1] in self.teacher.end_ids else None
                asked = [*(prompt.messages or ()), *said[: before + 1]]
                told += self._encoder.reply_ids(asked, said[before + 1 : now], prompt.tools, end)
            student_ends, spelled = self._spelled(turn)
            room = max(self._max_length - len(told), 0)
            turns.append((student_ends, spelled.ends[:room]))
            own += [False] * (len(told) - len(own)) + [True] * len(spelled.ids)
            told += spelled.ids
        if not any(own):
            raise RowError("empty completion", "the completion is empty")
        kept = slice(self._max_length)
        return Retold(torch.tensor(told[kept]), torch.tensor(own[kept]).float(), turns, len(told) - len(told[kept]))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Raises as a call does."""
        found = self._encoder.encode(prompt)
        if isinstance(found, BadRow):
            raise RowError(found.reason, found.detail)
        ids: list[int] = found[0].ids.tolist()
        if not 0 < len(ids) < self._max_length:
            room = f"the prompt has {len(ids)} of the teacher's tokens, which reads {self._max_length}"
            raise RowError("prompt without room", f"{room}: expected at least one, and room for an answer")
        return ids

    def _spelled(self, turn: Sequence[int]) -> tuple[Ends, Spelled]:
        """Where the student's tokens of a turn end, and the teacher's tokens of it."""
        data, ends = self.student.read(turn)
        ended = data.endswith(END)
        text = _text(data.removesuffix(END), cut=not ended)
        if text is None:
            raise RowError("completion that is no text", "the student has written bytes that are no text")
        spelled = self.teacher.spell(text)
        if spelled is None:
            raise RowError("text not given back", f"the teacher's tokenizer does not give back {text[:60]!r}")
        if ended and self.teacher.end_ids:
            spelled = Spelled([*spelled.ids, self.teacher.end_ids[-1]], np.append(spelled.ends, len(data)))
        return ends, spelled


def _turns(ids: Tensor, mask: Tensor, *, several: bool) -> list[list[int]]:
    """The student's own tokens; of several turns, those of each, for something else is between them."""
    places = mask.nonzero()[:, 0]
    borders = (places.diff() > 1).nonzero()[:, 0] + 1 if several else places[:0]
    return [ids[at].tolist() for at in torch.tensor_split(places, borders) if len(at)]


def _text(data: bytes, *, cut: bool) -> str | None:
    """`cut`: the beginning of a character at the end is left out."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at_end = error.end == len(data) and "end of data" in error.reason
        return data[: error.start].decode() if cut and at_end else None
