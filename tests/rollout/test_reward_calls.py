"""One call of a reward function: how it is called, what it may return, and the functions that come with the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.rollout.reward_calls import RewardError, load, score
from surefoot.rollout.rewards import RewardConfig, Scored, plain, spec_of

SAMPLES = "tests.rollout.reward_samples"


def rows(*completions: Any, **columns: Sequence[Any]) -> list[Scored]:
    names = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [
        Scored(f"e0_d1_g{i}", "p", completion, names[i] if names else {}, list(range(len(completion))))
        for i, completion in enumerate(completions)
    ]


def one(scored: Sequence[Scored], **section: Any) -> list[float | None]:
    """What a worker does with this section and these rows."""
    return score(load(spec_of(RewardConfig(**section))), [plain(row) for row in scored])


def mine(name: str, scored: Sequence[Scored], **section: Any) -> list[float | None]:
    return one(scored, function=f"{SAMPLES}.{name}", **section)


# ------------------------------------------------------------------------------------------------- what is no reward


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("=nan", "float nan"),
        ("=inf", "float inf"),
        ("=huge", "int 1000"),
        (1e39, "float 1e+39"),
        ("yes", "str 'yes'"),
        ([1.0], "list [1.0]"),
    ],
)
def test_a_value_that_is_no_number_is_an_error(value: Any, found: str) -> None:
    with pytest.raises(RewardError, match="reward scripted returned") as caught:
        mine("scripted", rows("fine", "the other", value=[1, value]))
    message = str(caught.value)
    assert found in message and "row e0_d1_g1, whose completion begins 'the other'" in message
    assert "expected a finite number, or None to abstain" in message


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("one", "1 values for 3 rows"),
        ("one less", "2 values for 3 rows"),
        ("one more", "4 values for 3 rows"),
        ("a float", "float 1.0 for 3 rows"),
        ("text", "str '111' for 3 rows"),
        ("None", "NoneType None for 3 rows"),
        ("a mapping", "dict {0: 1.0"),
        ("a generator", "generator <generator"),
        ("n x 1 array", "ndarray of shape (3, 1) for 3 rows"),
        ("0-d array", "ndarray of shape () for 3 rows"),
        ("n x 1 list", "list [1.0] for row e0_d1_g0"),
    ],
)
def test_anything_but_one_value_per_row_is_an_error(what: str, found: str) -> None:
    with pytest.raises(RewardError) as caught:
        mine("returns", rows("a", "b", "c", what=[what] * 3))
    assert f"reward returns returned {found}" in str(caught.value)
    assert "e0_d1_g0, whose completion begins 'a'" in str(caught.value)


@pytest.mark.parametrize(
    ("what", "values"),
    [("array", [0.0, 0.5, 1.0]), ("array of bools", [1.0, 0.0, 1.0]), ("tuple of numpy numbers", [0.0, 1.0, 2.0])],
)
def test_other_forms_of_one_value_per_row(what: str, values: list[float]) -> None:
    assert mine("returns", rows("a", "b", "c", what=[what] * 3)) == values


def test_one_value_for_one_row() -> None:
    assert mine("returns", rows("a", what=["one"])) == [1.0]
    with pytest.raises(RewardError, match=r"ndarray of shape \(1, 1\) for 1 rows"):
        mine("returns", rows("a", what=["n x 1 array"]))


# ------------------------------------------------------------------------------------------------ how they are called


def test_async_functions_and_the_columns() -> None:
    assert mine("lengths_async", rows("a", "bb", other=[1, 2])) == [1.0, 2.0]
    assert mine("row_names", rows("a", other=[1], more=[2])) == [4.0]  # and prompts, and completion_ids
    assert mine("constant", rows("a"), arguments={"level": 0.25}) == [0.25]


def test_trl_style() -> None:
    chats = [[{"role": "assistant", "content": text}] for text in ("4", "5", "6")]
    scored = [
        Scored(f"r{i}", [{"role": "user", "content": "2+2"}], chat, {"solution": right}, [0])
        for i, (chat, right) in enumerate(zip(chats, ("4", "4", None), strict=True))
    ]
    assert mine("trl_accuracy", scored) == [1.0, 0.0, None]
    assert mine("trl_logging", scored) == [0.5] * 3


@pytest.mark.parametrize("name", ["compute_score", "compute_score_async", "compute_scores"])
def test_verl_style(name: str) -> None:
    chat = [{"role": "assistant", "content": "so 7"}]
    scored = [
        Scored("r0", "p", "it is 4", {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}, "extra_info": {}}),
        Scored("r1", "p", chat, {"data_source": "gsm8k", "reward_model": {"ground_truth": "8"}, "extra_info": {}}),
    ]
    assert mine(name, scored) == [1.0, 0.1]
    assert mine(name, rows("4", "5", answer=["4", "4"]), columns={"ground_truth": "answer"}) == [1.0, 0.1]
    with pytest.raises(RewardError, match=r"needs 'ground_truth.*they have answer. `columns: {ground_truth"):
        mine(name, rows("4", answer=["4"]))


def test_verl_style_takes_further_arguments() -> None:
    scored = rows("4", ground_truth=["4"])
    assert mine("compute_score_async", scored, arguments={"method": "flexible"}, style="verl") == [1.0]


def test_openrlhf_style() -> None:
    scored = rows("4", " 5", labels=["4", "4"])
    assert mine("reward_func", scored) == [1.0, 0.0]
    assert mine("reward_func", rows("4", answer=["4"]), columns={"labels": "answer"}) == [1.0]


# --------------------------------------------------------------------------------------------------------- built in


@pytest.mark.parametrize(
    ("section", "completions", "answers", "values"),
    [
        ({"name": "exact_match"}, [" 4\n", "4.", "", "Four"], ["4", 4, "4", "four"], [1, 0, 0, 0]),
        ({"name": "exact_match", "ignore_case": True}, ["Four", "x"], ["four", None], [1, None]),
        ({"name": "regex", "pattern": r"\d{2}"}, ["a 12", "a 1"], ["", ""], [1, 0]),
        ({"name": "regex", "pattern": r"is (\d+)"}, ["is 3, no: is 4", "4", "is 5"], ["4", 4, None], [1, 0, None]),
        ({"name": "final_number"}, ["so 1,200.", "-3 or 3", "5-3", "none"], ["#### 1200", "3", -3, 1], [1, 1, 0, 0]),
        ({"name": "final_number"}, ["$1.50", "x=-2", "07", "4"], ["1.5", "-2", "7", "four"], [1, 1, 1, None]),
        ({"name": "length", "target": 4}, ["", "ab", "abcd", "abcdef", "a" * 9], [""] * 5, [0, 0.5, 1, 0.5, 0]),
        ({"name": "length", "target": 2, "unit": "words"}, ["one", "one two"], ["", ""], [0.5, 1]),
        ({"name": "format"}, ["<think>a</think>\n<answer>b</answer>", "<answer>b</answer>"], ["", ""], [1, 0]),
        (
            {"name": "format", "tags": ["a"]},
            ["<a>1</a>", "<a>1</a> 2", "<a><a>1</a></a>", "<a>1"],
            [""] * 4,
            [1, 0, 0, 0],
        ),
    ],
)
def test_built_in(section: dict[str, Any], completions: list[str], answers: list[Any], values: list[Any]) -> None:
    assert one(rows(*completions, answer=answers), **section) == values


def test_of_several_messages_the_assistants_last_one_counts() -> None:
    chat = [
        {"role": "assistant", "content": "5"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "7"},
    ]
    scored = [Scored("r0", "p", chat, {"answer": "4"}), Scored("r1", "p", [], {"answer": "4"})]
    assert one(scored, name="exact_match") == [1.0, 0.0]


def test_math_verify() -> None:
    pytest.importorskip("math_verify")
    completions = [r"so $\frac{1}{2}$", "The answer is 0.5.", "3", r"\boxed{42}", "no idea", r"$x = 2$"]
    answers = [r"\frac{1}{2}", "1/2", "4", "6 * 7 = 42\n#### 42", "1", "2"]
    assert one(rows(*completions, answer=answers), name="math_verify") == [1, 1, 0, 1, 0, 1]
    assert one(rows("4", answer=[""]), name="math_verify") == [None]


def test_reasoning_gym() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entries = [gym.create_dataset("chain_sum", seed=3, size=2)[i] for i in range(2)]
    completions = [f"<answer>1</answer> no, <answer> {entries[0]['answer']} </answer>", "12345678"]
    columns = {name: [entry[name] for entry in entries] for name in ("question", "answer", "metadata")}
    values = one(rows(*completions, **columns), name="reasoning_gym", task="chain_sum")
    assert values[0] == 1.0 and values[1] is not None and values[1] < 0.2
    assert one(rows(*completions, **columns), name="reasoning_gym") == values
    assert one(rows("no number", answer=["3"]), name="reasoning_gym", task="prime_factorization") == [0.0]
    with pytest.raises(ConfigError, match=r"reasoning-gym has no task 'sum'; it has .*chain_sum"):
        one([], name="reasoning_gym", task="sum")


@pytest.mark.parametrize(("module", "name"), [("math_verify", "math_verify"), ("reasoning_gym", "reasoning_gym")])
def test_a_missing_extra_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"is not installed .*: pip install 'surefoot\[math\]'"):
        one(rows("4", answer=["4"]), name=name)


@pytest.mark.parametrize("name", ["exact_match", "final_number"])
def test_a_missing_column_is_named(name: str) -> None:
    with pytest.raises(RewardError, match=f"reward {name} needs 'answer', and no row has such a column; they have sol"):
        one(rows("a", sol=["a"]), name=name)
    assert one(rows("4", sol=["4"]), name=name, columns={"answer": "sol"}) == [1.0]


def test_length_needs_token_ids() -> None:
    with pytest.raises(ConfigError, match="the rows come without token ids"):
        one([Scored("r", "p", "abc")], name="length", target=3)
