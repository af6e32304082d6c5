"""Preferences: what a row may look like, what both sides share, and what is dropped."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.encode import Encoded, Encoder
from surefoot.data.pairs import PairChecker, Ranking, looks_like_pairs
from surefoot.data.prepare import Dataset, prepare
from surefoot.data.rows import BadRow, Preference
from surefoot.errors import ConfigError, DataError
from tests.helpers import tokenizers as tiny

Rows = list[dict[str, Any]]
PAIR = {"prompt": "what is 2 + 3", "chosen": "5", "rejected": "6"}
GSM8K = Path(os.environ.get("SUREFOOT_GSM8K_PREFERENCES", "shared/data/gsm8k/preferences.jsonl"))
# Each begins in a way that some tokenizer joins with what stands before it.
ANSWERS = ["5", "6", "\n5", "\n\nfive", " five", "  x", "🙂 yes", "é", "yes", ".", "</think>"]
PROMPTS = ["what is 2 + 3?", "an answer: ", "a\n", "the qui", "is 🙂", "is é", "is 2"]
TOKENIZERS = {
    "byte-level": tiny.byte_level(texts=["foo bar foobar foo", "a\n\nb : 5 five", "the quick fox"]),
    "byte-level with bos": tiny.byte_level(adds_bos=True, chat_template=tiny.WITH_BOS),
    "gpt2-like": tiny.gpt2_like(),
    "prefix space": tiny.with_prefix_space(),
    "prefix space with bos": tiny.with_prefix_space(adds_bos=True),
    "words": tiny.words(["yes", "5", "five", "what", "is", "2", "+"]),
    "brackets": tiny.byte_level(chat_template=tiny.BRACKETS),
    "marked": tiny.byte_level(chat_template=tiny.CHATML_MARKED),
    "no generation prompt": tiny.byte_level(chat_template=tiny.CHATML_NO_PROMPT),
}


def chat(*turns: str) -> Rows:
    """ "u: hi" becomes a user turn that says hi."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[3:]} for turn in turns]


def check(row: Any, *, as_chat: bool = True, ranking: Ranking = "best_worst", **columns: str) -> Preference:
    checked = PairChecker(columns, as_chat=as_chat, ranking=ranking).check("f:1", row)
    assert isinstance(checked, Preference), checked
    return checked


def refused(row: Any, *, as_chat: bool = True, **columns: str) -> BadRow:
    checked = PairChecker(columns, as_chat=as_chat, ranking="best_worst").check("f:1", row)
    assert isinstance(checked, BadRow), checked
    return checked


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Any = None, max_length: int = 400, **options: Any) -> Dataset:
    data = {key: options.pop(key) for key in list(options) if key in DataConfig.model_fields}
    source = DatasetConfig(path=str(path), **options)
    return prepare(source, DataConfig(train=source, **data), tokenizer or tiny.byte_level(), max_length, pairs=True)


def trained(dataset: Dataset, tokenizer: Any = None) -> list[str]:
    tokenizer = tokenizer or tiny.byte_level()
    return [tokenizer.decode(dataset.ids(i)[dataset.loss_mask(i) > 0]) for i in range(len(dataset))]


# ---------------------------------------------------------------------------------------------------------------- rows


def test_prompts_and_answers_may_be_texts_or_messages() -> None:
    for prompt in ("q", chat("u: q")):
        for chosen in ("x", chat("a: x")):
            for rejected in ("y", chat("a: y")):
                row = check({"prompt": prompt, "chosen": chosen, "rejected": rejected})
                assert [answer.messages for answer in row.answers] == [chat("u: q", "a: x"), chat("u: q", "a: y")]
                assert [answer.answers for answer in row.answers] == [1, 1]
                assert (row.pairs, row.margin) == ([(0, 1)], None)
    plain = check(PAIR, as_chat=False)
    assert [(a.messages, a.prompt, a.completion) for a in plain.answers] == [
        (None, "what is 2 + 3", "5"),
        (None, "what is 2 + 3", "6"),
    ]


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        # no prompt by itself: what both share, up to the answer
        ({}, ["u: q"], (["a: x"], ["a: y"])),
        ({"prompt": None}, ["s: s", "u: q"], (["a: x"], ["a: y"])),
        ({}, ["u: q", "a: b", "u: c"], (["a: x"], ["a: y", "u: z", "a: w"])),
        ({}, ["s: s"], (["a: x"], ["a: y"])),
        # a prompt and the same inside
        ({"prompt": "q"}, ["u: q"], (["a: x"], ["a: y"])),
        ({"prompt": "q"}, ["s: s", "u: q"], (["a: x"], ["a: y"])),
        ({"prompt": chat("s: s", "u: q")}, ["s: s", "u: q"], (["a: x"], ["a: y"])),
        ({"prompt": "q"}, ["u: q"], (["a: b", "u: c", "a: x"], ["a: b", "u: c", "a: y"])),
        ({"prompt": "q"}, ["u: q"], (["a: x"], ["a: x"])),
        # an answer that begins as the other ends
        ({}, ["u: q"], (["a: x"], ["a: x", "u: q", "a: y"])),
    ],
)
def test_the_prompt_may_be_inside_both_sides(row: Any, prompt: list[str], answers: tuple[list[str], list[str]]) -> None:
    chosen, rejected = (chat(*prompt, *answer) for answer in answers)
    checked = check({**row, "chosen": chosen, "rejected": rejected})
    assert [answer.messages for answer in checked.answers] == [chosen, rejected]
    assert [answer.answers for answer in checked.answers] == [len(answer) for answer in answers]


def test_texts_with_the_prompt_inside() -> None:
    row = {"prompt": "Q: x\nA:", "chosen": "Q: x\nA: 5", "rejected": "Q: x\nA: 6"}
    for as_chat in (True, False):
        for answer, text in zip(check(row, as_chat=as_chat).answers, (" 5", " 6"), strict=True):
            said = (answer.prompt, answer.completion) if answer.messages is None else None
            assert said == ("Q: x\nA:", text) or answer.messages == chat("u: Q: x\nA:", f"a: {text}")
    both = check({"chosen": row["chosen"], "rejected": row["rejected"]}, as_chat=False).answers
    assert [(answer.prompt, answer.completion) for answer in both] == [("Q: x\nA: ", "5"), ("Q: x\nA: ", "6")]
    checker = PairChecker({}, as_chat=False, ranking="best_worst")
    assert isinstance(checker.check("f:1", row), Preference)
    bad = checker.check("f:2", {**row, "rejected": "6"})
    assert isinstance(bad, BadRow)
    assert "expected answers that begin with string 'Q: x\\nA:', as those before begin with theirs" in bad.detail
    checker = PairChecker({}, as_chat=False, ranking="best_worst")
    greetings = [("Good day", "Hi there"), ("Hi!", "Hi there")]
    rows = [checker.check("f:1", {"prompt": "Hi", "chosen": c, "rejected": r}) for c, r in greetings]
    assert [[a.completion for a in row.answers] for row in rows if isinstance(row, Preference)] == [
        *map(list, greetings)
    ]
    # An answer that merely begins like the prompt keeps its beginning when the other does not, or ends there.
    for chosen, rejected in (("no way", "yes"), ("no", "no way")):
        answers = check({"prompt": "no", "chosen": chosen, "rejected": rejected}, as_chat=False).answers
        assert [answer.completion for answer in answers] == [chosen, rejected]


def test_ranked_answers() -> None:
    ranked = [{"rank": rank, "completion": chat(f"a: {text}")} for rank, text in ((2, "c"), (0, "a"), (1.5, "b"))]
    row = {"context": chat("u: q"), "completions": ranked}
    best_worst, every = check(row), check(row, ranking="all_pairs")
    assert [answer.messages for answer in every.answers] == [chat("u: q", f"a: {text}") for text in "cab"]
    assert best_worst.pairs == [(1, 0)]
    assert every.pairs == [(1, 2), (1, 0), (2, 0)]
    texts = check({"context": "q", "completions": [{"rank": 1, "completion": "x"}, {"rank": 0, "completion": "y"}]})
    assert texts.pairs == [(1, 0)]
    assert texts.answers[1].messages == chat("u: q", "a: y")


def test_tied_ranks_are_never_compared() -> None:
    def pairs(ranking: Ranking, *ranks: float) -> list[tuple[int, int]]:
        completions = [{"rank": rank, "completion": str(i)} for i, rank in enumerate(ranks)]
        return check({"context": "q", "completions": completions}, ranking=ranking).pairs

    assert pairs("best_worst", 0, 0, 1, 1) == [(0, 2)]
    assert pairs("all_pairs", 0, 0, 1) == [(0, 2), (1, 2)]
    assert pairs("best_worst", 1, 1, 1) == pairs("all_pairs", 1, 1) == []


def test_columns_are_mapped() -> None:
    row = check({"q": "q", "good": "x", "bad": "y", "by": 2}, prompt="q", chosen="good", rejected="bad", margin="by")
    assert row.answers[1].messages == chat("u: q", "a: y")
    assert row.margin == 2.0
    assert refused({"q": "q", "good": "x"}, prompt="q", chosen="good").detail.startswith(
        "missing key 'rejected', found"
    )
    with pytest.raises(ConfigError, match="found 'completion', expected our names"):
        check(PAIR, completion="x")


@pytest.mark.parametrize(
    ("row", "reason", "problem"),
    [
        (
            5,
            "not an object",
            "expected an object with `prompt`, `chosen` and `rejected`, or `context` and `completions`",
        ),
        ({"prompt": "q"}, "missing key", "maps other names"),
        ({"prompt": "q", "chosen": "x"}, "missing key", "missing key 'rejected', found the keys 'prompt', 'chosen'"),
        (
            {"prompt": "q", "completion": "x", "label": True},
            "missing key",
            "binary feedback (one answer with a `label`)",
        ),
        ({**PAIR, "rejected": None}, "wrong type in rejected", "field 'rejected': expected a string or a list of mess"),
        ({**PAIR, "rejected": ""}, "empty rejected", "field 'rejected': expected text, found an empty string"),
        ({**PAIR, "chosen": []}, "empty chosen", "field 'chosen': expected at least one message, found an empty list"),
        ({**PAIR, "chosen": {"value": 5}}, "wrong type in chosen", "found object {'value': 5}"),
        ({**PAIR, "chosen": chat("a: ")}, "empty chosen", "field 'chosen'[0].content: expected text"),
        ({**PAIR, "chosen": "half \ud83d"}, "lone surrogate in chosen", "U+D83D"),
        ({**PAIR, "prompt": ""}, "empty prompt", "field 'prompt': expected text, found an empty string"),
        ({**PAIR, "prompt": []}, "empty prompt", "field 'prompt': expected at least one message"),
        ({**PAIR, "prompt": 5}, "wrong type in prompt", "expected a string or a list of messages, found number 5"),
        (
            {"chosen": "x", "rejected": "y"},
            "missing key",
            "missing key 'prompt'; texts that have the prompt inside need",
        ),
        (
            {"chosen": chat("a: x"), "rejected": chat("a: y")},
            "no answer to a prompt",
            "there is no `prompt`: expected it",
        ),
        ({"chosen": chat("s: x"), "rejected": chat("s: x")}, "no answer to a prompt", "found the turns system"),
        ({**PAIR, "chosen": chat("s: x")}, "no answer to a prompt", "field 'chosen': expected an assistant turn"),
        (
            {"prompt": "other", "chosen": chat("u: q", "a: x"), "rejected": chat("u: q", "a: y")},
            "no answer to a prompt",
            "or the turns of `prompt` and then an assistant turn, found the turns user, assistant",
        ),
        (
            {"chosen": chat("u: p", "a: x"), "rejected": chat("u: q", "a: y")},
            "no answer to a prompt",
            "the same turns before every assistant's answer",
        ),
        ({**PAIR, "margin": "big"}, "wrong type in margin", "field 'margin': expected a number, found string 'big'"),
        ({**PAIR, "margin": math.nan}, "wrong type in margin", "found number nan"),
        ({**PAIR, "margin": 10**400}, "wrong type in margin", "expected a number"),
        ({**PAIR, "margin": True}, "wrong type in margin", "found boolean True"),
        ({"completions": []}, "missing key", "missing key 'context'"),
        ({"context": "q", "completions": "x"}, "wrong type in completions", "expected a list of objects, found string"),
        ({"context": "q", "completions": ["x"]}, "wrong type in completions", "'completions'[0]: expected an object"),
        (
            {"context": "q", "completions": [{"completion": "x"}]},
            "wrong type in rank",
            "(the lowest is the best), found",
        ),
        ({"context": "q", "completions": [{"rank": "1"}]}, "wrong type in rank", "found string '1'"),
        (
            {"context": "q", "completions": [{"rank": 1, "completion": "x"}]},
            "fewer than two completions",
            "field 'completions': expected two or more, found 1",
        ),
        (
            {"context": "q", "completions": [{"rank": 1, "completion": "x"}, {"rank": 2}]},
            "wrong type in completion",
            "field 'completions'[1].completion: expected a string or a list of messages, found null",
        ),
        (
            {"context": "", "completions": [{"rank": 1, "completion": "x"}, {"rank": 2, "completion": "y"}]},
            "empty context",
            "field 'context': expected text",
        ),
    ],
)
def test_every_bad_row(row: Any, reason: str, problem: str) -> None:
    bad = refused(row)
    assert bad.reason == reason
    assert problem in bad.detail


def test_answers_without_a_common_beginning_need_a_prompt() -> None:
    bad = refused({"question": "q", "chosen": "x", "rejected": "y"}, as_chat=False)
    assert "missing key 'prompt', and the answers share no beginning that could be one" in bad.detail
    assert "`columns: {prompt: their_name}`" in bad.detail


def test_a_margin_is_on_every_row_or_on_none() -> None:
    for first, second, problem in ((1, None, "a number, found null"), (None, "x", "no margin, as on the rows before")):
        checker = PairChecker({}, as_chat=True, ranking="best_worst")
        assert isinstance(checker.check("f:1", {**PAIR, "margin": first}), Preference)
        bad = checker.check("f:2", {**PAIR, "margin": second})
        assert isinstance(bad, BadRow)
        assert problem in bad.detail


def test_what_looks_like_pairs(tmp_path: Path) -> None:
    ranked = {"context": "q", "completions": []}
    binary = {"prompt": "q", "completion": "a", "label": False}
    for row in (PAIR, ranked, binary, {"chosen": [], "rejected": []}):
        assert looks_like_pairs(DatasetConfig(path=str(write(tmp_path, ["no object", row]))))
    for row in ({"prompt": "q", "completion": "a"}, {"text": "a", "label": True}, {"messages": [], "context": ""}):
        assert not looks_like_pairs(DatasetConfig(path=str(write(tmp_path, [row]))))
    mapped = DatasetConfig(path=str(write(tmp_path, [{"good": "x", "bad": "y"}])), columns={"chosen": "good"})
    assert looks_like_pairs(mapped)
    assert not looks_like_pairs(DatasetConfig(path=str(write(tmp_path, []))))


# -------------------------------------------------------------------------------------------------------------- tokens


def encode(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], max_length: int = 10_000) -> Any:
    """The two sides, or the bad row."""
    as_chat = tokenizer.chat_template is not None and row.pop("as_chat", True)
    checked = PairChecker({}, as_chat=as_chat, ranking="best_worst").check("f:1", row)
    return Encoder(tokenizer, DataConfig(train=DatasetConfig(path="x")), max_length).encode(checked)


def assert_shares_the_prompt(chosen: Encoded, rejected: Encoded) -> int:
    """Both sides begin with the same tokens, none of them trained, and all that follows is. Returns how many."""
    starts = {int(side.mask.argmax()) for side in (chosen, rejected)}
    (start,) = starts
    assert chosen.ids[:start].tolist() == rejected.ids[:start].tolist()
    assert chosen.mask[start:].all()
    assert rejected.mask[start:].all()
    return start


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("as_chat", [True, False])
def test_both_sides_share_the_prompts_tokens(name: str, as_chat: bool) -> None:
    tokenizer = TOKENIZERS[name]
    if as_chat and tokenizer.chat_template is None:
        return
    encoder, used = Encoder(tokenizer, DataConfig(train=DatasetConfig(path="x")), 10_000), 0
    for prompt in PROMPTS:
        for chosen in ANSWERS:
            for rejected in ANSWERS:
                row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "as_chat": as_chat}
                found = encode(tokenizer, row)
                if isinstance(found, BadRow):
                    assert found.reason == "no token edge at an answer"
                    continue
                used += 1
                start = assert_shares_the_prompt(*found)
                if as_chat:
                    given = encoder.prompt_ids(chat(f"u: {prompt}"))
                    assert found[0].ids[: len(given)].tolist() == given
                    assert start == len(given) or name == "no generation prompt"
                else:
                    assert len(tokenizer(prompt).input_ids) - start in (0, 1)  # the last may go on into an answer
                    for side, text in zip(found, (chosen, rejected), strict=True):
                        assert side.ids.tolist() == [*tokenizer(prompt + text).input_ids, tokenizer.eos_token_id]
    assert used > len(PROMPTS) * len(ANSWERS) * len(ANSWERS) / 2
