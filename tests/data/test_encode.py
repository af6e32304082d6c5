"""From rows to ids and masks: plain texts, lengths, and the crossing to another process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoded, Encoder, options_as_json, options_from_json
from surefoot.data.prepare import encoding_options
from surefoot.data.rows import Row
from surefoot.errors import ModelError
from tests.helpers import tokenizers as tiny

TOKENIZER = tiny.byte_level(texts=["foo bar foobar foo"], merges=40)


def encoder_for(tokenizer: PreTrainedTokenizerFast, max_length: int = 10_000) -> Encoder:
    return Encoder(encoding_options(DataConfig(train=DatasetConfig(path="x")), tokenizer, max_length))


def encode(tokenizer: PreTrainedTokenizerFast, prompt: str, completion: str, max_length: int = 10_000) -> Encoded:
    return encoder_for(tokenizer, max_length).encode([Row(0, "f:1", prompt=prompt, completion=completion)])


def test_a_plain_pair_is_prompt_completion_and_end() -> None:
    encoded = encode(TOKENIZER, "foo", " bar")
    end = TOKENIZER.eos_token_id
    assert encoded.ids[0].tolist() == [*TOKENIZER("foo").input_ids, *TOKENIZER(" bar").input_ids, end]
    trained = encoded.ids[0][encoded.mask[0]]
    assert trained.tolist() == [*TOKENIZER(" bar").input_ids, end]


def test_a_token_across_the_end_of_the_prompt_belongs_to_the_completion() -> None:
    assert TOKENIZER.tokenize("x foobar")[-1].endswith("foobar")
    encoded = encode(TOKENIZER, "x foo", "bar")
    assert TOKENIZER.decode(encoded.ids[0][encoded.mask[0]]) == " foobar<|im_end|>"
    newlines = tiny.byte_level()
    encoded = encode(newlines, "a\n", "\nb")
    assert newlines.decode(encoded.ids[0][encoded.mask[0]]) == "\n\nb<|im_end|>"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_never_two_beginnings_or_ends(adds_bos: bool) -> None:
    tokenizer = tiny.byte_level(adds_bos=adds_bos)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for prompt, completion in (("a", "b"), ("a", "b<|im_end|>"), ("", "b"), ("", "b<|im_end|>")):
        ids = encode(tokenizer, prompt, completion).ids[0].tolist()
        assert (ids.count(bos), ids.count(eos), ids[-1]) == (int(adds_bos), 1, eos)
    ids = encode(tokenizer, "<s>a", "b").ids[0].tolist()
    assert ids.count(bos) == 1


def test_a_text_trains_all_but_its_first_token() -> None:
    for adds_bos in (False, True):
        tokenizer = tiny.byte_level(adds_bos=adds_bos)
        encoded = encode(tokenizer, "", "the fox")
        assert encoded.mask[0].tolist() == [False] + [True] * (len(encoded.ids[0]) - 1)
        assert encoded.ids[0].tolist() == [*tokenizer("the fox").input_ids, tokenizer.eos_token_id]


def test_gpt2_like_pairs_end_in_their_one_special_token() -> None:
    tokenizer = tiny.gpt2_like()
    encoded = encode(tokenizer, "a", "b")
    assert encoded.ids[0].tolist() == [*tokenizer("ab").input_ids, tokenizer.eos_token_id]
    assert encoded.mask[0].tolist()[-2:] == [True, True]


def test_texts_need_an_end_token() -> None:
    with pytest.raises(ModelError, match="no eos_token"):
        encode(tiny.byte_level(eos=None, pad=None), "a", "b")


def test_rows_are_cut_at_the_right_and_dropped_when_nothing_is_left_to_train() -> None:
    letters = tiny.byte_level(merges=0)
    for prompt, kept, truncated in ((200, 0, 1), (31, 1, 1), (32, 0, 1), (10, 1, 0)):
        encoded = encode(letters, "x" * prompt, "abc", 32)
        assert (len(encoded.ids), encoded.truncated, encoded.longest) == (kept, truncated, prompt + 4)
        assert encoded.dropped == ({} if kept else {"nothing to train within 32 tokens": 1})
        if kept:
            assert len(encoded.ids[0]) == min(32, prompt + 4)
            assert encoded.mask[0].sum() == min(4, 32 - prompt)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=12), st.text(min_size=1, max_size=12))
def test_plain_masks_split_the_text_at_the_prompt(prompt: str, completion: str) -> None:
    """Trained tokens spell the completion; a token across the edge brings part of the prompt, and nothing else does."""
    prompt = f".{prompt}"  # never one token with what follows, so that the first trained token is seen in the mask
    encoded = encode(TOKENIZER, prompt, completion)
    first = int(encoded.mask[0].argmax())
    assert encoded.mask[0][first:].all()
    spelled = TOKENIZER.decode(encoded.ids[0][first:-1])
    context = TOKENIZER.decode(encoded.ids[0][:first])
    if "�" not in context + spelled:
        assert context + spelled == prompt + completion
        assert len(context) <= len(prompt)
        assert len(prompt) < len(context) + max(1, len(TOKENIZER.decode(encoded.ids[0][first : first + 1])))


def rows() -> list[Row]:
    answered: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 9}]
    return [
        Row(0, "f:1", answered, 2),
        Row(1, "f:2", answered[:1], 1),
        Row(2, "f:3", [{"role": "assistant", "content": "\udc00"}], 0),
        Row(3, "f:4", answered * 2, 4),
        Row(4, "f:5", prompt="p", completion="c"),
    ]


def test_frames_carry_everything() -> None:
    for chosen in (rows(), rows()[1:2], []):
        encoded = encoder_for(tiny.byte_level(), 30).encode(chosen)
        again = Encoded.from_frames(*encoded.to_frames())
        assert again.to_frames() == encoded.to_frames()
        assert [ids.tolist() for ids in again.ids] == [ids.tolist() for ids in encoded.ids]
        assert [mask.tolist() for mask in again.mask] == [mask.tolist() for mask in encoded.mask]
        assert (again.rows, again.bad, again.dropped) == (encoded.rows, encoded.bad, encoded.dropped)


def test_options_cross_as_json() -> None:
    options = encoding_options(DataConfig(train=DatasetConfig(path="x"), system_prompt="s"), tiny.byte_level(), 30)
    assert options_from_json(options_as_json(options)) == options


def test_grouping_into_calls_does_not_matter() -> None:
    encoder = encoder_for(tiny.byte_level(), 30)
    single = Encoded()
    for row in rows():
        single.extend(encoder.encode([row]))
    assert single.to_frames() == encoder.encode(rows()).to_frames()
