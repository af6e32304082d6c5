"""Preferences: what a row may look like, what both sides share, and what is dropped."""

from __future__ import annotations

import json
import logging
import math
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
ROOT = Path(__file__).parents[2]
GSM8K = next((p for p in (ROOT, ROOT.parent) if (p / "shared/data/gsm8k").exists()), ROOT) / "shared/data/gsm8k"
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
    return prepare(source, DataConfig(train=source, **data), tokenizer or tiny.byte_level(), max_length, rows="pairs")


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
            "expected `prompt`, or the same turns inside every",
        ),
        ({"chosen": chat("s: x"), "rejected": chat("s: x")}, "no answer to a prompt", "found the turns system"),
        (
            {**PAIR, "chosen": chat("s: x")},
            "no answer to a prompt",
            "and then an assistant turn, found the turns system",
        ),
        (
            {"prompt": "other", "chosen": chat("u: q", "a: x"), "rejected": chat("u: q", "a: y")},
            "no answer to a prompt",
            "field 'chosen': expected `prompt`, or the same turns inside every answer, and then",
        ),
        (
            {"chosen": chat("u: p", "a: x"), "rejected": chat("u: q", "a: y")},
            "no answer to a prompt",
            "and then an assistant turn, found the turns user, assistant",
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


@pytest.mark.parametrize(
    ("name", "as_chat"),
    [(name, True) for name in TOKENIZERS if name != "gpt2-like"] + [(name, False) for name in list(TOKENIZERS)[:6]],
)
def test_both_sides_share_the_prompts_tokens(name: str, as_chat: bool) -> None:
    tokenizer = TOKENIZERS[name]
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


def test_a_token_across_the_end_of_the_prompt_on_one_side_alone() -> None:
    """Joined with the chosen answer the prompt's last word is no token of its own: it is trained on both sides."""
    tokenizer = tiny.byte_level(texts=["foo bar foobar foo"], merges=40)
    assert tokenizer.tokenize("x foobar")[-1].endswith("foobar")
    chosen, rejected = encode(tokenizer, {"prompt": "x foo", "chosen": "bar", "rejected": ", no", "as_chat": False})
    assert assert_shares_the_prompt(chosen, rejected) == len(tokenizer("x").input_ids)
    assert [tokenizer.decode(side.ids[side.mask]) for side in (chosen, rejected)] == [
        " foobar<|im_end|>",
        " foo, no<|im_end|>",
    ]


def test_an_answer_that_changes_the_tokens_of_the_prompt_itself() -> None:
    """1·a·bc and 1·ab·d: the second token ends before the answer on either side, and yet is another one."""
    tokenizer = tiny.byte_level(texts=["bc bc bc bc", "ab ab"], merges=4)
    assert [len(tokenizer.tokenize(text)) for text in ("bc", "ab", "abc")] == [1, 1, 2]
    chosen, rejected = encode(tokenizer, {"prompt": "1ab", "chosen": "c", "rejected": "d", "as_chat": False})
    assert assert_shares_the_prompt(chosen, rejected) == 1
    assert tokenizer.decode(chosen.ids[1:]) == "abc<|im_end|>"


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(*[st.text("foo bar\n12é ", min_size=1, max_size=8)] * 3, st.booleans())
def test_the_prompt_is_shared_for_any_texts(prompt: str, chosen: str, rejected: str, as_chat: bool) -> None:
    row = {"prompt": f".{prompt}", "chosen": chosen, "rejected": rejected, "as_chat": as_chat}
    assert assert_shares_the_prompt(*encode(TOKENIZERS["byte-level"], row)) >= 1


def test_each_side_is_cut_by_its_own_budget() -> None:
    """One side ten times longer than the other takes nothing from it, nor from the prompt."""
    letters = tiny.byte_level(chat_template=None, merges=0)
    for long, short in (("chosen", "rejected"), ("rejected", "chosen")):
        found = encode(letters, {"prompt": "xyz", long: "a" * 100, short: "b" * 10}, 24)
        sides = {"chosen": found[0], "rejected": found[1]}
        assert (sides[long].length, len(sides[long].ids)) == (104, 24)
        assert (sides[short].length, len(sides[short].ids)) == (14, 14)
        assert letters.decode(sides[short].ids) == "xyz" + "b" * 10 + "<|im_end|>"
        assert assert_shares_the_prompt(sides["chosen"], sides["rejected"]) == 3


def test_an_answer_of_several_turns_trains_each_assistant_turn() -> None:
    tokenizer = tiny.byte_level()
    row = {"prompt": "q", "chosen": chat("a: x", "u: more", "a: y"), "rejected": "z"}
    chosen, _ = encode(tokenizer, row)
    assert tokenizer.decode(chosen.ids[chosen.mask]) == "x<|im_end|>y<|im_end|>"
    stripping = tiny.byte_level(chat_template=tiny.CHATML_THOUGHTS_STRIPPED)
    thinking = {**row, "chosen": chat("a: <think>1</think>x", "u: more", "a: y")}
    bad = encode(stripping, thinking)
    assert isinstance(bad, BadRow)
    assert bad.reason == "answer of several texts"
    assert "train_on: last_assistant" in bad.detail
    checked = check(thinking)
    last = DataConfig(train=DatasetConfig(path="x"), train_on="last_assistant")
    found = Encoder(stripping, last, 1000).encode(checked)
    assert not isinstance(found, BadRow)
    assert stripping.decode(found[0].ids[found[0].mask]) == "y<|im_end|>"


# ------------------------------------------------------------------------------------------------------ whole data sets


def test_a_dataset_of_pairs(tmp_path: Path) -> None:
    dataset = load(write(tmp_path, [{**PAIR, "margin": 0.5}, {**PAIR, "prompt": "1 + 1", "margin": -2}]))
    assert (len(dataset), dataset.num_groups, dataset.group_size) == (4, 2, 2)
    assert dataset.row_index.tolist() == [0, 0, 1, 1]
    assert trained(dataset) == ["5<|im_end|>", "6<|im_end|>"] * 2
    assert dataset.margins is not None
    assert dataset.margins.tolist() == [0.5, 0.5, -2, -2]
    assert "2 pairs from 2 rows" in dataset.description


def test_the_fingerprint_follows_margins_and_ranking(tmp_path: Path) -> None:
    ranked = [{"rank": i, "completion": str(i)} for i in range(3)]
    row = {"context": "q", "completions": ranked}
    found = [load(write(tmp_path, [{**row, **margin}])).fingerprint for margin in ({}, {"margin": 1}, {"margin": 2})]
    found.append(load(write(tmp_path, [row]), ranking="all_pairs").fingerprint)
    assert len(set(found)) == 4


def test_pairs_that_are_the_same_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the start, and once what differs is cut away."""
    long = "word " * 60
    rows = [
        {"prompt": "p", "chosen": long + "yes", "rejected": long + "no"},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"prompt": "p", "chosen": "yes", "rejected": long},
        {"prompt": "p" * 300, "chosen": "yes", "rejected": "no"},
        PAIR,
    ]
    with caplog.at_level(logging.WARNING):
        dataset = load(write(tmp_path, rows), max_length=32)
    assert dataset.row_index.tolist() == [2, 2, 4, 4]
    assert dataset.counts.dropped == {
        "both sides the same within 32 tokens": 1,
        "both sides the same": 1,
        "nothing to train within 32 tokens": 1,
    }
    assert dataset.counts.truncated == 5
    assert "2 pairs from 5 rows" in caplog.text
    with pytest.raises(DataError, match=r"none of its 1 rows can be trained on: 1 × both sides the same$"):
        load(write(tmp_path, [rows[1]]))


def test_a_pair_with_one_side_cut_to_nothing_is_dropped(tmp_path: Path) -> None:
    """Its template marks no thoughts, of which one answer has more than there is room for."""
    content = "{{ m['content'].split('=')[0] }}={% generation %}{{ m['content'].split('=')[1] }}"
    template = tiny.CHATML_MARKED.replace("{% generation %}{{ m['content'] }}", content)
    row = {"prompt": "q", "chosen": "thought=5", "rejected": "thought" * 20 + "=6"}
    tokenizer = tiny.byte_level(chat_template=template)
    path = write(tmp_path, [row, {**row, "rejected": "=6"}])
    dataset = load(path, tokenizer, 64)
    assert trained(dataset, tokenizer) == ["5<|im_end|>", "6<|im_end|>"]
    assert dataset.counts.dropped == {"nothing to train within 64 tokens": 1}


def test_ranked_rows_give_one_pair_or_all(tmp_path: Path) -> None:
    def row(*ranks: int) -> dict[str, Any]:
        return {"context": "q", "completions": [{"rank": rank, "completion": f"{i}"} for i, rank in enumerate(ranks)]}

    path = write(tmp_path, [row(2, 0, 1), row(1, 1), row(0, 1)])
    best_worst, every = load(path), load(path, ranking="all_pairs")
    assert best_worst.row_index.tolist() == [0, 0, 2, 2]
    assert trained(best_worst) == [f"{i}<|im_end|>" for i in (1, 0, 0, 1)]
    assert every.row_index.tolist() == [0, 0, 0, 0, 0, 0, 2, 2]
    assert trained(every) == [f"{i}<|im_end|>" for i in (1, 2, 1, 0, 2, 0, 0, 1)]
    assert best_worst.counts.dropped == every.counts.dropped == {"all ranks tied": 1}
    assert (best_worst.counts.split, every.counts.split) == (0, 1)
    assert "1 rows of several pairs" in every.description


def test_bad_rows_of_preferences_are_listed_or_skipped(tmp_path: Path) -> None:
    unpaired = [{"prompt": "q", "chosen": "x"}, {"prompt": "q", "rejected": "y"}]
    path = write(tmp_path, [PAIR, *unpaired, {**PAIR, "prompt": ""}])
    with pytest.raises(DataError, match="3 of 4 rows cannot be used") as caught:
        load(path)
    assert f"{path}:2: missing key 'rejected', found the keys 'prompt', 'chosen'" in str(caught.value)
    assert f"{path}:3: missing key 'chosen'" in str(caught.value)
    assert load(path, on_bad_row="skip").counts.skipped == {"missing key": 2, "empty prompt": 1}
    with pytest.raises(DataError, match="binary feedback"):
        load(write(tmp_path, [{"prompt": "q", "completion": "x", "label": 1}]))


def test_a_system_turn_alone_is_a_prompt_where_the_template_takes_it(tmp_path: Path) -> None:
    path = write(tmp_path, [{**PAIR, "prompt": chat("s: be brief")}])
    assert (
        tiny.byte_level().decode(load(path).ids(1)).endswith("be brief<|im_end|>\n<|im_start|>assistant\n6<|im_end|>")
    )
    with pytest.raises(DataError, match="System role not supported"):
        load(path, tiny.byte_level(chat_template=tiny.STRICT))
    with pytest.raises(DataError, match="expected a user turn next, found a assistant turn"):
        load(path, fold_system=True)


def test_sft_does_not_take_pairs_by_accident(tmp_path: Path) -> None:
    source = DatasetConfig(path=str(write(tmp_path, [PAIR])))
    with pytest.raises(DataError, match="missing key 'completion', found the keys 'prompt', 'chosen', 'rejected'"):
        prepare(source, DataConfig(train=source), tiny.byte_level(), 64)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_change_nothing(tmp_path: Path, num_workers: int) -> None:
    rows: list[Any] = [{**PAIR, "rejected": f"{i}", "margin": i} for i in range(600)]
    rows[100] = {"prompt": "q"}
    path = write(tmp_path, rows)
    alone, shared = (load(path, on_bad_row="skip", num_workers=n) for n in (0, num_workers))
    assert alone.fingerprint == shared.fingerprint
    assert alone.counts == shared.counts
    assert alone.counts.dropped == {"both sides the same": 1}


@pytest.mark.skipif(not GSM8K.exists(), reason=f"no preferences made of GSM8K in {GSM8K}")
def test_preferences_of_gsm8k() -> None:
    tokenizer = tiny.byte_level()
    dataset = load(GSM8K / "preferences.jsonl", tokenizer, 1024, max_rows=200)
    assert dataset.num_groups + sum(dataset.counts.dropped.values()) == 200
    assert dataset.num_groups > 150
    for i in range(0, len(dataset), 2):
        start = int(dataset.loss_mask(i).argmax())
        assert start == int(dataset.loss_mask(i + 1).argmax())
        assert dataset.ids(i)[:start].tolist() == dataset.ids(i + 1)[:start].tolist()
        assert tokenizer.decode(dataset.ids(i)[:start]).endswith("<|im_start|>assistant\n")
