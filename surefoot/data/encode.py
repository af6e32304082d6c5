"""From checked rows to token ids and loss masks. Plain data in, plain arrays out, so that any process can do it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from surefoot.data.chat import ChatTemplate, Span, with_system
from surefoot.data.rows import BadRow, Row, RowError
from surefoot.errors import ModelError

NO_ANSWER = "no assistant turn to train"


@dataclass(frozen=True)
class EncodingOptions:
    """All that decides the tokens of a row, as plain data.

    Attributes:
        tokenizer: the fast tokenizer's JSON.
        special_tokens: texts by name (`bos_token`, `eos_token`, …), which templates read.
        chat_template: Jinja text, several by name, or `None`.
        last_answer_only: of a chat's assistant turns only the last is trained.
        max_length: tokens of a row; what is beyond is cut off at the right.
    """

    tokenizer: str
    special_tokens: dict[str, Any]
    chat_template: str | dict[str, str] | None
    last_answer_only: bool
    system_prompt: str | None
    fold_system: bool
    max_length: int


@dataclass
class Encoded:
    """The token sequences of some rows, in file order, and what became of the other rows.

    Attributes:
        rows: for each sequence the index of its row.
        lengths: for each sequence its tokens.
        ids, mask: one array per sequence: int32, and bool, true where the token is trained.
        dropped: rows without anything to train, by reason.
        bad: rows that cannot be used.
        truncated: sequences that were cut, those dropped for it included.
        longest: tokens of the longest sequence before cutting.
        split: chats that became several sequences.
    """

    rows: list[int] = field(default_factory=list)
    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    mask: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[BadRow] = field(default_factory=list)
    truncated: int = 0
    longest: int = 0
    split: int = 0

    def extend(self, other: Encoded) -> None:
        self.rows += other.rows
        self.ids += other.ids
        self.mask += other.mask
        self.dropped.update(other.dropped)
        self.bad += other.bad
        self.truncated += other.truncated
        self.longest = max(self.longest, other.longest)
        self.split += other.split

    def to_frames(self) -> tuple[bytes, bytes, bytes]:
        """As a JSON header and the bytes of the two joined arrays, for a pipe."""
        header = {
            "rows": self.rows,
            "lengths": [len(ids) for ids in self.ids],
            "dropped": self.dropped,
            "bad": [asdict(bad) for bad in self.bad],
            "counts": [self.truncated, self.longest, self.split],
        }
        empty = np.zeros(0, np.int32)
        ids, mask = np.concatenate([empty, *self.ids]), np.concatenate([empty.astype(np.bool_), *self.mask])
        return json.dumps(header).encode(), ids.tobytes(), mask.tobytes()

    @classmethod
    def from_frames(cls, header: bytes, ids: bytes, mask: bytes) -> Encoded:
        read = json.loads(header)
        cuts = np.cumsum(read["lengths"])[:-1]
        some = bool(read["lengths"])
        return cls(
            read["rows"],
            np.split(np.frombuffer(ids, np.int32), cuts) if some else [],
            np.split(np.frombuffer(mask, np.bool_), cuts) if some else [],
            Counter(read["dropped"]),
            [BadRow(**bad) for bad in read["bad"]],
            *read["counts"],
        )


@dataclass(frozen=True, slots=True)
class _Text:
    """A rendered text. `spans` are its trained parts; `None`: everything from the character `prompt` on."""

    row: Row
    text: str
    spans: list[Span] | None
    prompt: int = 0

    @property
    def edges(self) -> list[int]:
        return sorted({edge for span in self.spans or () for edge in span} - {0, len(self.text)})


class Encoder:
    """Encodes rows under fixed options.

    Raises:
        ModelError: the tokenizer has no end-of-sequence token, which texts need; or the chat template is broken.
    """

    def __init__(self, options: EncodingOptions) -> None:
        self._options = options
        self._tokenizer = Tokenizer.from_str(options.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        texts = {name: text for name, text in options.special_tokens.items() if isinstance(text, str)}
        self.bos, self.eos = (self._id(texts.get(name)) for name in ("bos_token", "eos_token"))
        self._adds_bos = self.bos is not None and self._first("a", True) == self.bos != self._first("a", False)
        self._chat: ChatTemplate | None = None
        if options.chat_template is not None:
            added = self._tokenizer.get_added_tokens_decoder().values()
            control = {token.content for token in added if token.special} | set(texts.values())
            self._chat = ChatTemplate(options.chat_template, options.special_tokens, sorted(control))

    def encode(self, rows: Sequence[Row]) -> Encoded:
        """The sequences of these rows, in order. The result does not depend on how rows are grouped into calls."""
        out = Encoded()
        texts: list[_Text] = []
        for row in rows:
            try:
                found = self._texts(row)
            except RowError as error:
                out.bad.append(BadRow(row.index, row.where, error.reason, error.detail))
                continue
            texts += found
            out.split += len(found) > 1
            if not found:
                out.dropped[NO_ANSWER] += 1
        for text, tokens in self._tokenized(texts):
            if isinstance(tokens, RowError):
                out.bad.append(BadRow(text.row.index, text.row.where, tokens.reason, tokens.detail))
            else:
                self._add(out, text.row.index, *tokens)
        return out

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """What a generator is given for the next assistant turn: the ids before the first trained one."""
        chat = with_system(messages, self._options.system_prompt, self._options.fold_system)
        return self._with_bos(self._ids(self._template.render(chat, tools, prompt=True)))

    @property
    def _template(self) -> ChatTemplate:
        if self._chat is None:
            raise ModelError("the tokenizer has no chat template; set tokenizer.chat_template to a file or Jinja text")
        return self._chat

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    def _first(self, text: str, special: bool) -> int | None:
        ids = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids[0] if ids else None

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _texts(self, row: Row) -> list[_Text]:
        if row.messages is None:
            return [_Text(row, row.prompt + row.completion, None, len(row.prompt))]
        chat = with_system(row.messages, self._options.system_prompt, self._options.fold_system)
        last_only = self._options.last_answer_only
        texts = self._template.trained_texts(chat, row.tools, row.answers, last_only=last_only)
        return [_Text(row, text, spans) for text, spans in texts]

    def _tokenized(self, texts: list[_Text]) -> Iterator[tuple[_Text, tuple[list[int], list[bool]] | RowError]]:
        """Tokenizes all texts in one go. For a chat, the beginnings up to each edge of a span are tokenized as well."""
        chats = [part for t in texts if t.spans is not None for part in (t.text, *(t.text[:e] for e in t.edges))]
        chat_ids = iter(self._tokenizer.encode_batch_fast(chats, add_special_tokens=False))
        joined = [t.text for t in texts if t.spans is None]
        encodings = iter(self._tokenizer.encode_batch(joined, add_special_tokens=True))
        for text in texts:
            if text.spans is None:
                yield text, self._plain(text, next(encodings))
                continue
            ids = next(chat_ids).ids
            beginnings = [next(chat_ids).ids for _ in text.edges]
            try:
                yield text, self._chat_tokens(text, ids, beginnings)
            except RowError as error:
                yield text, error

    def _chat_tokens(self, text: _Text, ids: list[int], beginnings: list[list[int]]) -> tuple[list[int], list[bool]]:
        """The mask from real token edges: the ids of each beginning must be the beginning of the ids."""
        counts = [len(beginning) for beginning in beginnings]
        if any(ids[:count] != beginning for count, beginning in zip(counts, beginnings, strict=True)):
            ids, counts = self._cut_at_edges(text, ids)
        at = {0: 0, len(text.text): len(ids), **dict(zip(text.edges, counts, strict=True))}
        mask = [False] * len(ids)
        for start, end in text.spans or ():
            mask[at[start] : at[end]] = [True] * (at[end] - at[start])
        with_bos = self._with_bos(ids)
        return with_bos, [False] * (len(with_bos) - len(ids)) + mask

    def _cut_at_edges(self, text: _Text, ids: list[int]) -> tuple[list[int], list[int]]:
        """A token lies across an edge, or the tokens before it depend on what follows: cut the text there, as
        generation does, where the prompt is tokenized alone. The pieces must still spell the same text."""
        cuts = [0, *text.edges, len(text.text)]
        pieces = [self._ids(text.text[a:b]) for a, b in pairwise(cuts)]
        joined = [token for piece in pieces for token in piece]
        decode = self._tokenizer.decode
        if decode(joined, skip_special_tokens=False) != decode(ids, skip_special_tokens=False):
            around = text.text[max(text.edges[0] - 15, 0) : text.edges[0] + 15]
            raise RowError(
                "no token edge at an answer",
                f"no token edge lies where an answer begins or ends, and to cut there changes the text: {around!r}",
            )
        return joined, [int(count) for count in np.cumsum([len(piece) for piece in pieces])[:-1]]

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Exactly one beginning-of-sequence token, whether the template writes it or the tokenizer adds it."""
        if self._adds_bos and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def _plain(self, text: _Text, encoding: Any) -> tuple[list[int], list[bool]]:
        """A token that lies across the end of the prompt counts as the completion's. One end-of-sequence token ends it,
        whether the text, the tokenizer or nobody wrote one."""
        if self.eos is None:
            raise ModelError("the tokenizer has no eos_token, so a model would never learn to stop: set one")
        ids, ends = list(encoding.ids), [end for _, end in encoding.offsets]
        if self._adds_bos and ids[:2] == [self.bos, self.bos]:
            ids, ends = ids[1:], ends[1:]
        first = next((i for i, end in enumerate(ends) if end > text.prompt), len(ids))
        while len(ids) > first and ids[-1] == self.eos:
            ids.pop()
        ids.append(self.eos)
        return ids, [i >= first for i in range(len(ids))]

    def _add(self, out: Encoded, row: int, ids: list[int], mask: list[bool]) -> None:
        limit = self._options.max_length
        mask[0:1] = [False] * len(mask[0:1])  # nothing predicts the first token
        out.longest = max(out.longest, len(ids))
        out.truncated += len(ids) > limit
        if not any(mask[:limit]):
            cut = any(mask)
            out.dropped[f"nothing to train within {limit} tokens" if cut else "nothing to train"] += 1
            return
        out.rows.append(row)
        out.ids.append(np.array(ids[:limit], np.int32))
        out.mask.append(np.array(mask[:limit], np.bool_))


def options_as_json(options: EncodingOptions) -> bytes:
    return json.dumps(asdict(options)).encode()


def options_from_json(text: bytes) -> EncodingOptions:
    values: Mapping[str, Any] = json.loads(text)
    return EncodingOptions(**values)
