"""From checked rows to token ids and loss masks. Plain data in, plain arrays out, so that any process can do it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from surefoot.data.chat import ChatTemplate, Span, with_system
from surefoot.data.rows import BadRow, Checked, Preference, Prompt, Row, RowError
from surefoot.errors import ModelError

if TYPE_CHECKING:
    from surefoot.config import DataConfig

Tokens = tuple[list[int], list[bool]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A token sequence, cut at the length limit; a prompt never is.

    Attributes:
        ids: int32 [tokens].
        mask: bool [tokens], true where the token is trained; never the first: nothing predicts it.
        length: tokens before cutting.
        margin: of the pair that it belongs to, where that has one.
        prompt: the row, its chat as it was rendered, where it is one to answer.
        source: the row's.
    """

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    length: int
    margin: float | None = None
    prompt: Prompt | None = None
    source: str = ""


Outcome = BadRow | list[Encoded]


def num_ids(tokenizer: Any) -> int:
    """The tokenizer's highest id and one more: ids beyond pad a model's vocabulary."""
    return int(max(tokenizer.get_vocab().values(), default=-1)) + 1


class Encoder:
    """Encodes rows with a Hugging Face fast tokenizer and its `chat_template`. Can be sent to another process.

    Args:
        max_length: tokens of a row; what is beyond is cut off at the right.

    Raises:
        ModelError: the tokenizer is not a fast one, or the chat template is broken.
    """

    def __init__(self, tokenizer: Any, data: DataConfig, max_length: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            found = type(tokenizer).__name__
            raise ModelError(f"{found}: expected a fast tokenizer (one with a tokenizer.json), found a slow one")
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._max_length = max_length
        self._last_only = data.train_on == "last_assistant"
        self._system_prompt, self._fold_system = data.system_prompt, data.fold_system
        special = dict(tokenizer.special_tokens_map)
        texts = {name: text for name, text in special.items() if isinstance(text, str)}
        self._bos, self._eos = (
            self._tokenizer.token_to_id(texts[name]) if name in texts else None for name in ("bos_token", "eos_token")
        )
        with_special = self._tokenizer.encode("a", add_special_tokens=True).ids
        self._adds_bos = self._bos is not None and with_special[:1] == [self._bos] != self._ids("a")[:1]
        self._chat: ChatTemplate | None = None
        if tokenizer.chat_template is not None:
            added = self._tokenizer.get_added_tokens_decoder().values()
            control = {token.content for token in added if token.special} | set(texts.values())
            self._chat = ChatTemplate(tokenizer.chat_template, special, sorted(control))

    def encode(self, row: Checked) -> Outcome:
        """The row's sequences: none without an assistant turn to train, several where the chat template rewrites
        earlier turns; or why it cannot be used. A row that is bad already stays as it is. Of preferences: chosen,
        rejected, and so on for each pair. Of prompts: the one that is given to a generator.

        Raises:
            ModelError: the tokenizer has no chat template for chats, or no end-of-sequence token for texts.
        """
        if isinstance(row, BadRow):
            return row
        try:
            if isinstance(row, Preference):
                return self._pairs(row)
            if isinstance(row, Prompt):
                return [self._prompt(row)]
            found = [self._text(row)] if row.messages is None else self._chat_texts(row, row.messages)
        except RowError as error:
            return error.at(row.where)
        return [replace(self._cut(ids, mask), source=row.source) for ids, mask in found]

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """What a generator is given for the next assistant turn: the ids before the first trained one."""
        chat = with_system(messages, self._system_prompt, self._fold_system)
        return self._with_bos(self._ids(self._template.prompt(chat, tools)))

    def reply_ids(
        self, chat: Sequence[dict[str, Any]], reply: Sequence[dict[str, Any]], tools: Any, end: int | None
    ) -> list[int]:
        """What follows a turn that the model has sampled: the rest of that turn, the reply to it and the next
        generation prompt. What was sampled is not looked at again.

        Args:
            chat: as it was rendered, the model's turn at its end.
            end: the token that the model has ended its turn with, if it has.

        Raises:
            RowError: the template refuses the chat, or does not show the model's turn.
        """
        text = self._template.after_answer([*chat, *reply], len(chat) - 1, tools)
        ended = None if end is None else self._tokenizer.id_to_token(end)
        return self._ids(text.removeprefix(ended or ""))

    def stop_ids(self) -> tuple[int, ...]:
        """What ends a turn of the model: the end of sequence, and the token that the template puts behind answers."""
        found = [] if self._eos is None else [self._eos]
        if self._chat is not None:
            chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            with suppress(RowError):  # a template may refuse this one chat
                ids = self._ids(self._chat.trained_texts(chat, None, 1, last_only=True)[0][0])
                found += [i for i in ids[-1:] if i in self._tokenizer.get_added_tokens_decoder()]
        return tuple(dict.fromkeys(found))

    @property
    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise ModelError("the tokenizer has no chat template; set tokenizer.chat_template to a file or Jinja text")
        return self._chat

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Exactly one beginning-of-sequence token, whether the template writes it or the tokenizer adds it."""
        if self._adds_bos and self._bos is not None and ids[:1] != [self._bos]:
            return [self._bos, *ids]
        return ids

    def _chat_texts(self, row: Row, messages: list[dict[str, Any]]) -> list[Tokens]:
        chat = with_system(messages, self._system_prompt, self._fold_system)
        texts = self._template.trained_texts(chat, row.tools, row.answers, last_only=self._last_only)
        return [self._chat_text(text, spans) for text, spans in texts]

    def _chat_text(self, text: str, spans: list[Span]) -> Tokens:
        """The mask from real token edges: the ids of the text up to each edge must be the beginning of its ids."""
        if not text:
            return [], []
        edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
        ids = self._ids(text)
        beginnings = [[], *(self._ids(text[:edge]) for edge in edges[1:-1]), ids]
        if any(ids[: len(beginning)] != beginning for beginning in beginnings):
            ids, beginnings = self._cut_at_edges(text, ids, edges)
        at = dict(zip(edges, map(len, beginnings), strict=True))
        mask = [False] * len(ids)
        for start, end in spans:
            mask[at[start] : at[end]] = [True] * (at[end] - at[start])
        with_bos = self._with_bos(ids)
        return with_bos, [False] * (len(with_bos) - len(ids)) + mask

    def _cut_at_edges(self, text: str, ids: list[int], edges: list[int]) -> tuple[list[int], list[list[int]]]:
        """A token lies across an edge, or the tokens before it depend on what follows: cut the text there, as
        generation does, where the prompt is tokenized alone. The pieces must still spell the same text."""
        beginnings = list(accumulate((self._ids(text[a:b]) for a, b in pairwise(edges)), initial=[]))
        decode = self._tokenizer.decode
        if decode(beginnings[-1], skip_special_tokens=False) != decode(ids, skip_special_tokens=False):
            around = text[max(edges[1] - 15, 0) : edges[1] + 15]
            raise RowError(
                "no token edge at an answer",
                f"no token edge lies where an answer begins or ends, and to cut there changes the text: {around!r}",
            )
        return beginnings[-1], beginnings

    def _text(self, row: Row) -> Tokens:
        """A token that lies across the end of the prompt counts as the completion's. One end-of-sequence token ends it,
        whether the text, the tokenizer or nobody wrote one."""
        if self._eos is None:
            raise ModelError("the tokenizer has no eos_token, so a model would never learn to stop: set one")
        encoding = self._tokenizer.encode(row.prompt + row.completion, add_special_tokens=True)
        ids, ends = encoding.ids, [end for _, end in encoding.offsets]
        if self._adds_bos and ids[:2] == [self._bos, self._bos]:
            ids, ends = ids[1:], ends[1:]
        first = next((i for i, end in enumerate(ends) if end > len(row.prompt)), len(ids))
        while len(ids) > first and ids[-1] == self._eos:
            ids.pop()
        ids.append(self._eos)
        return ids, [i >= first for i in range(len(ids))]

    def _prompt(self, row: Prompt) -> Encoded:
        """Of a text, the tokens without the end of sequence that a tokenizer may put behind it."""
        if row.messages is None:
            ids = self._with_bos(self._tokenizer.encode(str(row.given), add_special_tokens=True).ids)
            while ids and ids[-1] == self._eos:
                ids.pop()
        else:
            ids = self.prompt_ids(row.messages, row.tools)
            row = replace(row, messages=with_system(row.messages, self._system_prompt, self._fold_system))
        return Encoded(np.array(ids, np.int32), np.zeros(len(ids), np.bool_), len(ids), prompt=row, source=row.source)

    def _pairs(self, row: Preference) -> list[Encoded]:
        """The sides of a pair begin with the same tokens, the prompt's. Of a chat these are what a generator is given,
        whatever the answer. In joined texts, a token across the end of the prompt on one side may be several on the
        other, so both are trained from the first token on that is not the prompt's, or not the same, on either."""
        sides = [self._side(answer) for answer in row.answers]
        found: list[Encoded] = []
        for pair in row.pairs:
            both = [sides[i] for i in pair]
            if row.answers[0].messages is None:
                token_by_token = zip(zip(*both[0], strict=True), zip(*both[1], strict=True), strict=False)
                start = next(i for i, (x, y) in enumerate(token_by_token) if x != y or x[1])
                both = [(ids, [i >= start for i in range(len(ids))]) for ids, _ in both]
            found += [self._cut(ids, mask, row.margin) for ids, mask in both]
        return found

    def _side(self, row: Row) -> Tokens:
        texts = [self._text(row)] if row.messages is None else self._chat_texts(row, row.messages)
        if len(texts) != 1:
            raise RowError(
                "answer of several texts",
                f"the chat template rewrites earlier turns, so that an answer of several turns becomes {len(texts)} "
                "texts, which cannot be one side of a pair; `train_on: last_assistant` trains the last turn alone",
            )
        return texts[0]

    def _cut(self, ids: list[int], mask: list[bool], margin: float | None = None) -> Encoded:
        kept = np.array(ids[: self._max_length], np.int32)
        trained = np.array(mask[: self._max_length], np.bool_)
        trained[:1] = False
        return Encoded(kept, trained, len(ids), margin)
