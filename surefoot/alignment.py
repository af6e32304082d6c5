"""One text, tokenized twice: which tokens of the one side are which of the other.

Both sides are compared by the bytes at which their tokens end. A *chunk* is the shortest run of tokens on both sides
that begin and end at the same bytes: it closes wherever both sides have a token that ends at one byte. Characters that
several tokens share, joiners and accents need no care: their bytes are what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ends: TypeAlias = Sequence[int] | Tensor | npt.NDArray[np.int64]  # of one text


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where the tokens of several texts end, text after text.

    Attributes:
        ends: int64 [tokens]: the byte of its text behind each token's last one. Never falls within a text. A token that
            stands for no bytes (a beginning of sequence) ends where the one before it does.
        offsets: int64 [texts + 1]: text i has the tokens from `offsets[i]` to `offsets[i + 1]`.
    """

    ends: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, texts: Sequence[Ends]) -> Tokens:
        """From one sequence of ends for each text."""
        parts = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
        lengths = torch.tensor([0, *map(len, parts)])
        return cls(torch.cat([*parts, lengths[:0]]), lengths.cumsum(0))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunk of each token.

    Attributes:
        first, second: int64 [tokens]: of that side, the chunk's number, from 0 in each text; -1 where it is in none.
        counts: int64 [texts]: chunks of each text.
    """

    first: Tensor
    second: Tensor
    counts: Tensor


def align(first: Tokens, second: Tokens) -> Chunks:
    """The chunks of each text, none of which could be split further.

    A token without bytes is paired with one at the same place on the other side, so that a text aligned with itself
    gives one chunk per token. Where the other side has none, it is part of the chunk that follows, and at the end of
    the text of the last one. Where one side ends earlier than the other (it was cut), what has no counterpart is in no
    chunk; chunks then reach as far as both sides do.

    >>> chunks = align(Tokens.of([[2, 5, 6]]), Tokens.of([[1, 2, 6]]))
    >>> chunks.first.tolist(), chunks.second.tolist()
    ([0, 1, 1], [0, 0, 1])

    Raises:
        ValueError: the two have another number of texts, or ends that fall.
    """
    if len(first.offsets) != len(second.offsets):
        raise ValueError(f"{len(first.offsets) - 1} texts on one side, {len(second.offsets) - 1} on the other")
    sides = (first, second)
    texts = [_text_of(side) for side in sides]
    widest = 1 + max((int(side.ends.max()) for side in sides if len(side.ends)), default=0)
    places = [text * widest + side.ends for text, side in zip(texts, sides, strict=True)]
    ordinals = [_ordinals(place) for place in places]
    deepest = 1 + max((int(ordinal.max()) for ordinal in ordinals if len(ordinal)), default=0)
    keys = [place * deepest + ordinal for place, ordinal in zip(places, ordinals, strict=True)]
    closing = [_in(keys[0], keys[1]), _in(keys[1], keys[0])]
    counts = torch.zeros(len(first.offsets) - 1, dtype=torch.int64).index_add_(0, texts[0], closing[0].long())
    last = places[0][closing[0]]  # of each chunk, where it ends; then of each text's last one
    last = torch.where(counts > 0, last[(counts.cumsum(0) - 1).clamp(min=0)], -1) if len(last) else counts - 1
    numbers = [_numbers(*side, counts, last) for side in zip(closing, texts, places, strict=True)]
    return Chunks(numbers[0], numbers[1], counts)


def one_to_one(first: Tokens, second: Tokens, chunks: Chunks) -> int:
    """How many of the chunks of `align(first, second)` are one token on both sides."""
    most = int(chunks.counts.sum()) + 1
    sizes = [numbers.bincount(minlength=most)[1:] for numbers in _through(first, second, chunks)]
    return int(((sizes[0] == 1) & (sizes[1] == 1)).sum())


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The chunks of rows of several texts each.

    Attributes:
        first, second: of each row int64 [its tokens]: of that side, the chunk of each token, by numbers that rise from
            row to row; 0: in none.
        num_chunks: of all rows. `one_to_one`: how many of these are one token on both sides.
    """

    first: Sequence[Tensor]
    second: Sequence[Tensor]
    num_chunks: int
    one_to_one: int


def align_rows(rows: Sequence[Sequence[tuple[Ends, Ends]]]) -> RowChunks:
    """Rows of texts, each by the ends of its tokens on both sides. No chunk reaches from one text into the next.

    >>> align_rows([[([2, 3], [1, 2, 3]), ([1, 2], [2])]]).first[0].tolist()
    [1, 2, 3, 3]
    """
    first, second = (Tokens.of([text[side] for row in rows for text in row]) for side in (0, 1))
    chunks = align(first, second)
    lengths = [[sum(len(text[side]) for text in row) for row in rows] for side in (0, 1)]
    numbers = zip(_through(first, second, chunks), lengths, strict=True)
    ours, theirs = (torch.split(number, split) for number, split in numbers)
    return RowChunks(ours, theirs, int(chunks.counts.sum()), one_to_one(first, second, chunks))


def _through(first: Tokens, second: Tokens, chunks: Chunks) -> list[Tensor]:
    """Of both sides, int64 [tokens]: the chunk of each, numbered through all texts from 1 on; 0: in none."""
    before = chunks.counts.cumsum(0) - chunks.counts
    sides = ((first, chunks.first), (second, chunks.second))
    return [torch.where(numbers < 0, 0, numbers + 1 + before[_text_of(side)]) for side, numbers in sides]


def _text_of(side: Tokens) -> Tensor:
    """int64 [tokens]: the text that each belongs to."""
    text = torch.repeat_interleave(torch.arange(len(side.offsets) - 1), side.offsets.diff())
    if len(side.ends) > 1 and bool(((side.ends.diff() < 0) & (text.diff() == 0)).any()):
        raise ValueError("the ends of a text's tokens fall")
    return text


def _ordinals(places: Tensor) -> Tensor:
    """int64 [tokens]: of the tokens that end at one place, which this is."""
    return torch.arange(len(places)) - torch.searchsorted(places, places)


def _in(keys: Tensor, others: Tensor) -> Tensor:
    """bool [keys]; both rise strictly."""
    if not len(others):
        return torch.zeros(len(keys), dtype=torch.bool)
    at = torch.searchsorted(others, keys).clamp(max=len(others) - 1)
    return others[at] == keys


def _numbers(closes: Tensor, text: Tensor, place: Tensor, counts: Tensor, last: Tensor) -> Tensor:
    """Chunk numbers: those closed before, in this text. A tail without bytes belongs to the last chunk."""
    number = closes.cumsum(0) - closes.long() - (counts.cumsum(0) - counts)[text]
    in_tail = torch.where(place == last[text], counts[text] - 1, -1)
    return torch.where(number < counts[text], number, in_tail)
