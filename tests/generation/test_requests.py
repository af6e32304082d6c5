"""When a completion ends, and stop texts that span tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surefoot.errors import ConfigError, NonFiniteError
from surefoot.generation.requests import Request, Texts, make_request
from surefoot.types import Sampling
from tests.helpers import tokenizers


def request(sampling: Sampling, tokenizer: Any = None, **options: Any) -> Request:
    given = {"seed": 1, "group": "e0_d0", "index": 0, "vocabulary": 600, "max_length": 500, **options}
    return make_request([1], sampling, texts=Texts(tokenizer), **given)


def run(made: Request, ids: list[int]) -> tuple[int, str]:
    """How many of the ids are taken, and why no more."""
    for count, token in enumerate(ids, start=1):
        if made.add(token, -1.0, version=4):
            done = made.future.result(timeout=0)
            assert done.ids == tuple(ids[:count])
            assert (len(done.logprobs), done.version) == (count, 4)
            return count, done.finish_reason
    assert not made.future.done()
    return len(ids), ""


def test_a_stop_id_ends_it_as_its_last_token() -> None:
    assert run(request(Sampling(10, stop_ids=(7, 9))), [5, 6, 9, 7]) == (3, "stop")
    assert run(request(Sampling(3, stop_ids=(9,))), [5, 6, 9]) == (3, "stop")  # and not "length"
    assert run(request(Sampling(3)), [5, 6, 9, 5]) == (3, "length")


def test_the_longest_sequence_ends_it() -> None:
    assert run(request(Sampling(10), max_length=5), [5, 6, 7, 8, 9]) == (4, "length")


TOKENIZERS = {
    "bytes": tokenizers.byte_level(),
    "sentence pieces": tokenizers.with_prefix_space(),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "stop", "upto"),
    [
        ("it is fox. it is so", ("fox",), "it is fox"),
        ("what is it? it is the end, and more", ("the end",), "what is it? it is the end"),
        ("a b c d", ("b c", "d"), "a b c"),
        ("over and over", ("nowhere",), "over and over"),
        ("one two ", ("two ",), "one two "),
    ],
)
def test_a_stop_text_ends_it_with_the_token_that_completes_it(
    kind: str, text: str, stop: tuple[str, ...], upto: str
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    count, reason = run(request(Sampling(400, stop=stop), tokenizer), ids)
    so_far, before = tokenizer.decode(ids[:count]), tokenizer.decode(ids[: count - 1])
    if upto == text and not any(end in text for end in stop):
        assert (count, reason) == (len(ids), "")
        return
    assert reason == "stop"
    assert any(end in so_far for end in stop) and not any(end in before for end in stop)


def test_a_stop_text_ends_it_within_a_long_completion() -> None:
    """Only the end is decoded again, and the text may begin in the middle of a token."""
    tokenizer = tokenizers.byte_level()
    ids = tokenizer.encode("the lazy dog jumps. " * 20 + "STOP and on", add_special_tokens=False)
    count, reason = run(request(Sampling(400, stop=("zy dogSTOP", "STOP")), tokenizer), ids)
    assert reason == "stop"
    assert tokenizer.decode(ids[:count]).endswith("STOP")


def test_a_character_of_several_bytes_can_be_a_stop_text() -> None:
    tokenizer = tokenizers.byte_level()
    ids = tokenizer.encode("fin → ende → mehr", add_special_tokens=False)
    count, reason = run(request(Sampling(400, stop=("→",)), tokenizer), ids)
    assert (reason, tokenizer.decode(ids[:count])) == ("stop", "fin →")


def test_a_special_token_can_be_a_stop_text() -> None:
    tokenizer = tokenizers.byte_level()
    ids = [*tokenizer.encode("so", add_special_tokens=False), 2, 5]
    assert run(request(Sampling(9, stop=("<|im_end|>",)), tokenizer), ids) == (len(ids) - 1, "stop")


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        request(Sampling(3, stop=("x",)))


def test_a_log_prob_that_is_no_number_is_an_error() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteError, match="after 1 tokens"):
            request(Sampling(3)).add(5, bad, version=0)


def test_the_random_numbers_follow_from_seed_group_and_index_alone() -> None:
    def first(**options: Any) -> list[float]:
        made = request(Sampling(3), **options)
        return [made.uniform() for _ in range(3)]

    assert first() == first(max_length=9)
    others = [first(seed=2), first(group="e0_d1"), first(index=1)]
    assert all(other != first() for other in others)
    assert len({tuple(numbers) for numbers in others}) == 3


def test_everyone_gets_an_error_of_his_own() -> None:
    """Whoever waits may add a note to it."""
    error, pair = NonFiniteError("oh"), [request(Sampling(3)), request(Sampling(3))]
    for made in pair:
        made.fail(error)
    found = [made.future.exception(timeout=0) for made in pair]
    assert [type(each) for each in found] == [NonFiniteError] * 2
    assert found[0] is not found[1]
