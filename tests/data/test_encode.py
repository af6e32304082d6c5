"""From rows to ids and masks: plain texts, and rows that are too long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoded, Encoder
from surefoot.data.rows import BadRow, Row
from surefoot.errors import ModelError
from tests.helpers import tokenizers as tiny

TOKENIZER = tiny.byte_level(texts=["foo bar foobar foo"], merges=40)


def encoder_for(tokenizer: PreTrainedTokenizerFast, max_length: int = 10_000) -> Encoder:
    return Encoder(tokenizer, DataConfig(train=DatasetConfig(path="x")), max_length)


def encode(tokenizer: PreTrainedTokenizerFast, prompt: str, completion: str, max_length: int = 10_000) -> Encoded:
    outcome = encoder_for(tokenizer, max_length).encode(Row("f:1", prompt=prompt, completion=completion))
    assert isinstance(outcome, list)
    (encoded,) = outcome
    return encoded


def test_a_plain_pair_is_prompt_completion_and_end() -> None:
    encoded = encode(TOKENIZER, "foo", " bar")
    end = TOKENIZER.eos_token_id
    assert encoded.ids.tolist() == [*TOKENIZER("foo").input_ids, *TOKENIZER(" bar").input_ids, end]
    trained = encoded.ids[encoded.mask]
    assert trained.tolist() == [*TOKENIZER(" bar").input_ids, end]


def test_a_token_across_the_end_of_the_prompt_belongs_to_the_completion() -> None:
    assert TOKENIZER.tokenize("x foobar")[-1].endswith("foobar")
    encoded = encode(TOKENIZER, "x foo", "bar")
    assert TOKENIZER.decode(encoded.ids[encoded.mask]) == " foobar<|im_end|>"
    newlines = tiny.byte_level()
    encoded = encode(newlines, "a\n", "\nb")
    assert newlines.decode(encoded.ids[encoded.mask]) == "\n\nb<|im_end|>"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_never_two_beginnings_or_ends(adds_bos: bool) -> None:
    tokenizer = tiny.byte_level(adds_bos=adds_bos)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for prompt, completion in (("a", "b"), ("a", "b<|im_end|>"), ("", "b"), ("", "b<|im_end|>")):
        ids = encode(tokenizer, prompt, completion).ids.tolist()
        assert (ids.count(bos), ids.count(eos), ids[-1]) == (int(adds_bos), 1, eos)
    ids = encode(tokenizer, "<s>a", "b").ids.tolist()
    assert ids.count(bos) == 1


def test_a_text_trains_all_but_its_first_token() -> None:
    for adds_bos in (False, True):
        tokenizer = tiny.byte_level(adds_bos=adds_bos)
        encoded = encode(tokenizer, "", "the fox")
        assert encoded.mask.tolist() == [False] + [True] * (len(encoded.ids) - 1)
        assert encoded.ids.tolist() == [*tokenizer("the fox").input_ids, tokenizer.eos_token_id]


def test_gpt2_like_pairs_end_in_their_one_special_token() -> None:
    tokenizer = tiny.gpt2_like()
    encoded = encode(tokenizer, "a", "b")
    assert encoded.ids.tolist() == [*tokenizer("ab").input_ids, tokenizer.eos_token_id]
    assert encoded.mask.tolist()[-2:] == [True, True]


def test_texts_need_an_end_token() -> None:
    with pytest.raises(ModelError, match="no eos_token"):
        encode(tiny.byte_level(eos=None, pad=None), "a", "b")


def test_rows_are_cut_at_the_right() -> None:
    letters = tiny.byte_level(merges=0)
    for prompt, trained in ((200, 0), (31, 1), (32, 0), (10, 4)):
        encoded = encode(letters, "x" * prompt, "abc", 32)
        assert encoded.length == prompt + 4
        assert len(encoded.ids) == len(encoded.mask) == min(32, prompt + 4)
        assert encoded.mask.sum() == trained


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_plain_masks_split_the_text_at_the_prompt(prompt: str, completion: str) -> None:
    """Trained tokens spell the completion; a token across the edge brings part of the prompt, and nothing else does."""
    prompt = f".{prompt}"  # never one token with what follows, so that the first trained token is seen in the mask
    encoded = encode(TOKENIZER, prompt, completion)
    first = int(encoded.mask.argmax())
    assert encoded.mask[first:].all()
    spelled = TOKENIZER.decode(encoded.ids[first:-1])
    context = TOKENIZER.decode(encoded.ids[:first])
    if "�" not in context + spelled:
        assert context + spelled == prompt + completion
        assert len(context) <= len(prompt)
        assert len(prompt) < len(context) + max(1, len(TOKENIZER.decode(encoded.ids[first : first + 1])))


def test_a_bad_row_stays_as_it_is() -> None:
    bad = BadRow("f:1", "reason", "detail")
    assert encoder_for(TOKENIZER).encode(bad) is bad
