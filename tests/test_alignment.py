"""Chunks of two tokenizations: by hand, and as properties over random Unicode between tokenizers of every kind."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.alignment import Chunks, Tokens, align, one_to_one
from surefoot.data.token_bytes import Spelled, TokenBytes
from tests.helpers.tokenizer_kinds import KINDS, TEXTS

_WORDS = sorted({word for text in TEXTS for word in text.split()})
_HARD = ("日本語", "👨\u200d👩\u200d👧", "e\u0301", "مرحبا", "\u200d", "\ufffd", "  x", "\n", "▁", "##a", "Ġ")
UNICODE = st.text(max_size=24) | st.lists(st.sampled_from(_WORDS + list(_HARD)), max_size=6).map(" ".join)
FAST = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def chunks(first: list[list[int]], second: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    found = align(Tokens.of(first), Tokens.of(second))
    return found.first.tolist(), found.second.tolist(), found.counts.tolist()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # "abcdef" as ab|cde|f and a|b|cdef: the sides agree behind ab and at the end.
        ([2, 5, 6], [1, 2, 6], ([0, 1, 1], [0, 0, 1], [2])),
        # A beginning of sequence on one side belongs to what follows; on both sides it is a chunk.
        ([0, 3, 4], [3, 4], ([0, 0, 1], [0, 1], [2])),
        ([0, 3, 4], [0, 3, 4], ([0, 1, 2], [0, 1, 2], [3])),
        # A token without bytes at the end of one side belongs to the last chunk.
        ([3, 3], [1, 3], ([0, 0], [0, 0], [1])),
        ([3, 3, 3], [3, 3], ([0, 1, 1], [0, 1], [2])),
        # A character of three bytes, split on one side.
        ([1, 2, 3, 4], [3, 4], ([0, 0, 0, 1], [0, 1], [2])),
        # One side was cut: what is beyond has no counterpart.
        ([2, 4, 6], [2, 3], ([0, -1, -1], [0, -1], [1])),
        ([2, 5], [3], ([-1, -1], [-1], [0])),
        ([], [], ([], [], [0])),
        ([0], [], ([-1], [], [0])),
    ],
)
def test_by_hand(first: list[int], second: list[int], expected: tuple[list[int], list[int], list[int]]) -> None:
    assert chunks([first], [second]) == expected


def test_texts_do_not_touch_each_other() -> None:
    first = [[2, 5, 6], [], [0, 3], [4]]
    second = [[1, 2, 6], [0], [3], [1, 4]]
    alone = [chunks([a], [b]) for a, b in zip(first, second, strict=True)]
    together = chunks(first, second)
    for side in range(3):
        assert together[side] == [number for parts in alone for number in parts[side]]


def test_chunks_of_one_token_on_both_sides_are_counted() -> None:
    """Of a|bc and ab|c none is; of one token each, one after the other, all are; none of a text that was cut."""
    first, second = Tokens.of([[1, 3], [2], [2], [2, 4]]), Tokens.of([[2, 3], [2], [2], [1]])
    assert one_to_one(first, second, align(first, second)) == 2


def test_what_is_no_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="1 texts on one side, 2 on the other"):
        chunks([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="fall"):
        chunks([[2, 1]], [[2]])
    assert chunks([[2], [1]], [[2], [1]])[2] == [1, 1]


def assert_chunks_tile(data: bytes, sides: list[list[int]], found: Chunks) -> None:
    """Both sides' chunks are the same bytes of the text, in order and without gap; none could be split."""
    spans = []
    for ends, numbers in zip(sides, (found.first.tolist(), found.second.tolist()), strict=True):
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(int(found.counts)))
        last = dict(zip(numbers, ends, strict=True))
        spans.append([last[number] for number in range(int(found.counts))])
    assert spans[0] == spans[1]
    assert (spans[0][-1] if spans[0] else 0) == len(data)
    for number, (start, end) in enumerate(zip([0, *spans[0]], spans[0], strict=False)):
        inside = [
            {e for e, n in zip(ends, numbers, strict=True) if n == number and start < e < end}
            for ends, numbers in zip(sides, (found.first.tolist(), found.second.tolist()), strict=True)
        ]
        assert not inside[0] & inside[1]


@pytest.mark.parametrize(("first", "second"), list(combinations_with_replacement(KINDS, 2)))
@given(text=UNICODE)
@FAST
def test_between_tokenizers(first: str, second: str, text: str) -> None:
    spelled = [TABLES[name].spell(text) for name in (first, second)]
    for name, side in zip((first, second), spelled, strict=True):
        if side is None:
            ids = KINDS[name]()(text, add_special_tokens=False)["input_ids"]
            assert KINDS[name]().decode(ids) != text  # it cannot give the text back
            assert name in ("wordpiece", "characters") or "▁" in text
    if not all(spelled):
        return
    a, b = (side.ends.tolist() for side in spelled if side is not None)
    found = align(Tokens.of([a]), Tokens.of([b]))
    if not text:
        assert not int(found.counts)
        return
    assert_chunks_tile(text.encode(), [a, b], found)
    if first == second:
        assert found.first.tolist() == found.second.tolist() == list(range(len(a)))


@given(text=UNICODE)
@FAST
def test_byte_spans_of_exact_tokenizers_are_the_bytes_of_their_tokens(text: str) -> None:
    for name in ("byte-level", "unigram"):
        spelled = TABLES[name].spell(text)
        if name == "unigram" and "▁" in text:  # its sign for a space
            assert spelled is None
            continue
        assert isinstance(spelled, Spelled)
        joined = TABLES[name].join(spelled.ids)
        assert joined.removeprefix(b" " if name == "unigram" and not text.startswith(" ") else b"") == text.encode()
        assert (spelled.ends.tolist() or [0])[-1] == len(text.encode())


@given(st.lists(st.lists(st.integers(0, 6), max_size=6).map(sorted), max_size=5), st.data())
@FAST
def test_any_ends(first: list[list[int]], data: st.DataObject) -> None:
    """Numbers rise by at most one, and a text with itself is the identity."""
    second = [data.draw(st.lists(st.integers(0, 6), max_size=6).map(sorted)) for _ in first]
    found = align(Tokens.of(first), Tokens.of(second))
    for numbers, side in ((found.first, first), (found.second, second)):
        start = 0
        for ends, count in zip(side, found.counts.tolist(), strict=True):
            own = numbers[start : start + len(ends)].tolist()
            start += len(ends)
            inside = [n for n in own if n >= 0]
            assert own[: len(inside)] == inside and inside == sorted(inside)
            assert set(inside) == set(range(count))
    same = align(Tokens.of(first), Tokens.of(first))
    assert torch.equal(same.first, torch.cat([torch.arange(len(ends)) for ends in first] or [same.first]))
    assert torch.equal(same.first, same.second)


TABLES = {name: TokenBytes(make()) for name, make in KINDS.items()}
