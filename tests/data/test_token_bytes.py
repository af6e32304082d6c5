"""The bytes of single tokens, and the map between two vocabularies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.token_bytes import END, TokenBytes
from surefoot.data.vocabularies import map_vocabulary
from tests.helpers.tokenizer_kinds import KINDS, characters, unigram, word_piece
from tests.helpers.tokenizers import byte_level, with_prefix_space


def test_byte_level_tokens_are_exact_within_a_character() -> None:
    tokens = TokenBytes(byte_level(merges=0))
    spelled = tokens.spell("é日")
    assert spelled is not None
    assert [tokens.table[i] for i in spelled.ids] == [b"\xc3", b"\xa9", b"\xe6", b"\x97", b"\xa5"]
    assert spelled.ends.tolist() == [1, 2, 3, 4, 5]
    assert {tokens.table[i] for i in range(3, 259)} == {bytes([b]) for b in range(256)}


def test_byte_fallback_and_the_space_before_a_text() -> None:
    tokens = TokenBytes(unigram())
    spelled = tokens.spell("fox \N{SNOWMAN}")
    assert spelled is not None
    assert [tokens.table[i] for i in spelled.ids] == [b" fox", b" ", b"\xe2", b"\x98", b"\x83"]
    assert spelled.ends.tolist() == [3, 4, 5, 6, 7]  # the first token's space is not the text's


def test_offsets_where_tokens_drop_spaces() -> None:
    spelled = TokenBytes(word_piece()).spell("fox, in May")
    assert spelled is not None
    assert spelled.ends.tolist() == [3, 4, 7, 11]
    assert TokenBytes(word_piece()).spell("fox  in") is None


@pytest.mark.parametrize("name", KINDS)
def test_empty_blank_and_broken_texts(name: str) -> None:
    tokens = TokenBytes(KINDS[name]())
    empty, surrogate = tokens.spell_all(["", "the \ud800"])
    assert empty is not None and empty.ids == [] and empty.ends.tolist() == []
    assert surrogate is None
    blank = tokens.spell(" ")
    assert blank is None if name == "wordpiece" else blank is not None and blank.ends.tolist()[-1] == 1


def test_special_tokens_are_their_names_and_ends_are_one_byte() -> None:
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain, ending = TokenBytes(tokenizer), TokenBytes(tokenizer, [end])
    assert plain.table[end] == b"<|im_end|>"
    assert ending.join([*(ids := ending.spell("fox").ids), end]) == b"fox" + END  # type: ignore[union-attr]
    assert ending.ends([*ids, end]).tolist()[-1] == 4


def test_a_vocabulary_with_itself_is_the_identity() -> None:
    for name, make in KINDS.items():
        tokens = TokenBytes(make(), [make().eos_token_id])
        found = map_vocabulary(tokens, tokens)
        assert found.same[0].tolist() == found.same[1].tolist(), name
        for row, column, weight in zip(
            found.rows.tolist(), found.columns.tolist(), found.weights.tolist(), strict=True
        ):
            if row in found.same[0].tolist():
                assert (row, weight) == (column, 1.0)


def test_same_bytes_in_other_vocabularies() -> None:
    """SentencePiece's "▁fox" and the byte-level "Ġfox" are one: a space and fox."""
    ours, theirs = unigram(), byte_level(texts=["the fox"] * 3, merges=10)
    end = (ours.eos_token_id, theirs.convert_tokens_to_ids("<|im_end|>"))
    found = map_vocabulary(TokenBytes(ours, end[:1]), TokenBytes(theirs, end[1:]))
    pairs = dict(found.same.t().tolist())
    assert pairs[ours.convert_tokens_to_ids("▁fox")] == theirs.convert_tokens_to_ids("Ġfox")
    assert pairs[end[0]] == end[1]
    assert ours.bos_token_id not in found.rows.tolist()
    letter = ours.convert_tokens_to_ids("x")  # not the byte 0x78, which is written for no text
    assert pairs[letter] == theirs.convert_tokens_to_ids("x")
    assert ours.convert_tokens_to_ids("<0x78>") not in pairs
    assert found.mapped_share == found.same.shape[1] / len(ours)


def test_other_tokens_are_spread_over_those_that_write_them() -> None:
    ours, theirs = byte_level(texts=["abcd"] * 3, merges=3), byte_level(texts=["abab"] * 3, merges=1)
    found = map_vocabulary(TokenBytes(ours), TokenBytes(theirs))
    whole = ours.convert_tokens_to_ids("abcd")
    at = [i for i, row in enumerate(found.rows.tolist()) if row == whole]
    assert theirs.convert_ids_to_tokens([int(found.columns[i]) for i in at]) == ["ab", "c", "d"]
    assert found.weights[at].tolist() == pytest.approx([1 / 3] * 3)


def test_parts_of_characters_are_written_byte_by_byte_or_not_at_all() -> None:
    ours = byte_level(texts=["日"] * 9, merges=1)  # a token of two bytes out of three
    part = len(ours) - 1
    assert len(TokenBytes(ours).table[part]) == 2
    exact = map_vocabulary(TokenBytes(ours), TokenBytes(unigram()))
    pieces = [exact.columns[i] for i, row in enumerate(exact.rows.tolist()) if row == part]
    assert [TokenBytes(unigram()).table[int(i)] for i in pieces] == [bytes([b]) for b in TokenBytes(ours).table[part]]
    assert part not in map_vocabulary(TokenBytes(ours), TokenBytes(characters())).rows.tolist()


def test_the_space_before_a_text_is_no_part_of_a_token() -> None:
    theirs = with_prefix_space()
    ours = byte_level(texts=[".?"] * 3, merges=1)
    found = map_vocabulary(TokenBytes(ours), TokenBytes(theirs))
    written = found.columns[found.rows == len(ours) - 1].tolist()
    assert theirs.convert_ids_to_tokens(written) == list(ours.convert_ids_to_tokens(len(ours) - 1))


@given(st.text(max_size=12))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_every_row_of_the_matrix_is_a_distribution(text: str) -> None:
    ours = byte_level(texts=[text + "ab", "ab" + text], merges=8)
    found = map_vocabulary(TokenBytes(ours), TokenBytes(unigram()))
    sums: dict[int, float] = {}
    for row, weight in zip(found.rows.tolist(), found.weights.tolist(), strict=True):
        sums[row] = sums.get(row, 0.0) + weight
    assert all(total == pytest.approx(1.0) for total in sums.values())
    assert len(sums) == len(ours) - 3  # all but the special tokens
