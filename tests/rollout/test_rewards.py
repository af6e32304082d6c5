"""Several reward functions: weighed, found before the first step, counted where they fail."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from surefoot.errors import ConfigError
from surefoot.rollout.rewards import RewardConfig, RewardError, Rewards, Scored, Scores, load_rewards
from tests.rollout import reward_samples as samples

SAMPLES = "tests.rollout.reward_samples"


def rows(*completions: Any, **columns: Sequence[Any]) -> list[Scored]:
    names = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [
        Scored(f"e0_d1_g{i}", "p", completion, names[i] if names else {}, list(range(len(completion))))
        for i, completion in enumerate(completions)
    ]


def score(rewards: Sequence[Any], scored: Sequence[Scored], **options: Any) -> Scores:
    with load_rewards(rewards, **options) as loaded:
        return asyncio.run(loaded.score(scored))


# -------------------------------------------------------------------------------------------------------- the weights


def test_the_weighted_sum_is_of_those_that_do_not_abstain() -> None:
    scored = rows("a", "bb", "ccc", "dddd", value=[1, None, 0, True])
    found = score(
        [
            RewardConfig(function=f"{SAMPLES}.scripted", weight=2.0),
            RewardConfig(function=f"{SAMPLES}.lengths", weight=-0.5),
            RewardConfig(function=f"{SAMPLES}.constant", weight=0, label="shown_only"),
        ],
        scored,
    )
    assert found.values == {
        "scripted": [1.0, None, 0.0, 1.0],
        "lengths": [1.0, 2.0, 3.0, 4.0],
        "shown_only": [1.0] * 4,
    }
    assert found.total == [1.5, -1.0, -1.5, 0.0]
    assert found.failures == {"scripted": 0, "lengths": 0, "shown_only": 0}


def test_where_all_abstain_there_is_no_reward() -> None:
    scripted = RewardConfig(function=f"{SAMPLES}.scripted")
    shown = RewardConfig(function=f"{SAMPLES}.constant", weight=0)
    found = score([scripted, shown], rows("a", "b", "c", value=[None, 0.25, None]))
    assert [math.isnan(total) for total in found.total] == [True, False, True]
    found = score([scripted], rows("a", "b", value=[None, None]))
    assert all(map(math.isnan, found.total)) and found.failures == {"scripted": 0}


def test_no_rows() -> None:
    assert score([RewardConfig(function=f"{SAMPLES}.lengths")], []) == Scores({"lengths": []}, [], {"lengths": 0})


def test_functions_from_python() -> None:
    calls: list[int] = []

    def local(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        calls.append(len(completions))
        if "bad" in completions:
            raise ValueError("no")
        return [0.5] * len(completions)

    async def waits(completions: list[Any]) -> list[float]:
        await asyncio.sleep(0)
        return [0.25] * len(completions)

    found = score([samples.lengths, (local, 2.0), waits], rows("a", "bad", "ccc"))
    assert found.values["local"] == [0.5, None, 0.5] and calls == [3, 1, 1, 1]
    assert found.total == [2.25, 3.25, 4.25] and found.failures == {"lengths": 0, "local": 1, "waits": 0}
    with pytest.raises(RewardError, match=r"reward lambda returned float 1\.0 for 1 rows"):
        score([lambda completions: 1.0], rows("a"))


def test_only_functions_without_a_name_run_in_this_process(caplog: pytest.LogCaptureFixture) -> None:
    with load_rewards([samples.lengths, lambda completions: [1.0]]) as loaded:
        assert loaded.names == ("lengths", "lambda")
    assert [record.args for record in caplog.records] == [("lambda",)]
    assert "without a time limit" in caplog.text


# ---------------------------------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "expected exactly one of name, function and model, found none"),
        ({"name": "regex", "function": "a.b"}, "found name and function"),
        ({"name": "exact"}, "expected one of exact_match, regex"),
        ({"name": "regex"}, "pattern: regex needs it"),
        ({"name": "exact_match", "pattern": "a"}, "pattern: exact_match does not read it; it takes ignore_case"),
        ({"function": "a.b", "target": 3}, "target: b does not read it; it takes no options"),
        ({"name": "length", "target": 0}, "greater than 0"),
        ({"name": "exact_match", "style": "verl"}, "arguments and style are of functions of your own"),
        ({"function": "my reward"}, "should match pattern"),
        ({"function": "reward"}, "should match pattern"),
        ({"name": "exact_match", "timeout_s": 0}, "greater than 0"),
        ({"name": "exact_match", "weight": "nan"}, "expected a finite number"),
        ({"name": "exact_match", "wieght": 2}, "Extra inputs are not permitted"),
    ],
)
def test_a_section_that_cannot_be(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"function": "nowhere.reward"},
            "reward reward: nowhere.reward: there is no module 'nowhere'",
        ),
        ({"function": f"{SAMPLES}.nothing"}, f"{SAMPLES} has no function or class 'nothing'"),
        ({"function": f"{SAMPLES}.SLEEP"}, f"{SAMPLES} has no function or class 'SLEEP'"),
        ({"function": f"{SAMPLES}.of_nothing"}, r"reward of_nothing: expected a function of \(prompts, .* \(a, b\)"),
        (
            {"function": f"{SAMPLES}.lengths", "arguments": {"a": 1}},
            "it has no parameter 'a', only prompts",
        ),
        (
            {"function": f"{SAMPLES}.lengths", "arguments": {"completions": 1}},
            "arguments: 'completions' is what each call is given of the rows; call yours otherwise",
        ),
        (
            {"function": f"{SAMPLES}.lengths", "columns": {"a": "b"}},
            "columns: it has no parameter 'a', only prompts",
        ),
        ({"name": "exact_match", "columns": {"solution": "answer"}}, "columns: it has no parameter 'solution', only"),
        ({"function": f"{SAMPLES}.by_place"}, "can be given by name, found prompts before a /"),
        ({"name": "regex", "pattern": "("}, r"reward regex: pattern '\(' is not a regular expression"),
        ({"name": "regex", "pattern": "a", "weight": 0}, "at least one with a weight other than 0"),
    ],
)
def test_a_function_that_cannot_be_had(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rewards([RewardConfig(**section)])


def test_a_module_that_cannot_be_imported(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "half_written_reward.py").write_text("import json\nraise RuntimeError('half written')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match="cannot be loaded: RuntimeError: half written\nTraceback") as caught:
        load_rewards([RewardConfig(function="half_written_reward.score")])
    assert 'half_written_reward.py", line 2' in str(caught.value)


def test_two_of_one_name() -> None:
    twice = [RewardConfig(name="regex", pattern="a"), RewardConfig(name="regex", pattern="b")]
    with pytest.raises(ConfigError, match="two are called regex; give one of them another name with label"):
        load_rewards(twice)
    found = score([twice[0], RewardConfig(name="regex", pattern="b", label="has_b")], rows("a", "b"))
    assert found.values == {"regex": [1.0, 0.0], "has_b": [0.0, 1.0]}


def test_columns_are_looked_for_without_a_call() -> None:
    with load_rewards([RewardConfig(name="exact_match"), samples.lengths]) as loaded:
        loaded.check(rows("a", answer=["a"]))
        with pytest.raises(RewardError, match="reward exact_match needs 'answer', and no row has such a column"):
            loaded.check(rows("a", other=["a"]))
    with load_rewards([RewardConfig(function=f"{SAMPLES}.misbehave", columns={"folder": "place"})]) as loaded:
        loaded.check(rows("raise", place=["."]))  # it would raise if it were called


def test_a_column_that_is_named_and_not_there() -> None:
    message = (
        r"reward exact_match: columns names 'solution' for 'answer', and no row has such a column; they have answer"
    )
    with load_rewards([RewardConfig(name="exact_match", columns={"answer": "solution"})]) as loaded:
        with pytest.raises(RewardError, match=message):
            loaded.check(rows("a", answer=["a"]))
        with pytest.raises(RewardError, match=message):
            asyncio.run(loaded.score(rows("a", answer=["a"])))


def test_rows_of_a_call_may_all_lack_a_column_that_others_have() -> None:
    """Whether a row is scored does not depend on which rows are scored with it."""
    functions = [
        RewardConfig(name="exact_match", columns={"answer": "solution"}),
        RewardConfig(name="final_number", columns={"answer": "solution"}),
        RewardConfig(function=f"{SAMPLES}.trl_accuracy"),
    ]
    with load_rewards(functions) as loaded:
        loaded.check(rows("4", solution=["4"]))
        without = asyncio.run(loaded.score(rows("4", other=["5"]))).values
        mixed = asyncio.run(loaded.score([*rows("4", other=["5"]), *rows("4", solution=["4"])])).values
    assert without["exact_match"] == [None] == without["final_number"]
    assert {name: values[:1] for name, values in mixed.items()} == without


def test_an_argument_comes_before_a_column_of_its_name() -> None:
    constant = RewardConfig(function=f"{SAMPLES}.constant", arguments={"level": 2})
    assert score([constant], rows("a", level=[5])).total == [2.0]


def test_rows_that_are_no_json(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RewardError, match=r"reward lengths: the rows hold what is no JSON value: .*set"):
        score([samples.lengths], rows("a", other=[{1}]))


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.fixture
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="surefoot.rollout.rewards"):
        yield caplog


def raising(count: int, bad: int) -> list[Scored]:
    return rows(*(["raise"] * bad + ["fine"] * (count - bad)), folder=["."] * count)


def test_a_row_on_which_a_function_raises_abstains(quiet_log: pytest.LogCaptureFixture) -> None:
    with load_rewards([RewardConfig(function=f"{SAMPLES}.misbehave")]) as loaded:
        found = asyncio.run(loaded.score(raising(4, bad=1)))
        assert found.values["misbehave"] == [None, 1.0, 1.0, 1.0] and found.failures == {"misbehave": 1}
        told = [record.getMessage() for record in quiet_log.records]
        assert "reward misbehave failed on 4 rows: KeyError: 'no such answer'; trying each alone" in told[0]
        assert "failed on row e0_d1_g0, whose completion begins 'raise': KeyError: 'no such answer'" in told[1]
        assert "Traceback" in told[1] and "reward_samples.py" in told[1]
        asyncio.run(loaded.score(raising(1, bad=1)))
        assert len(quiet_log.records) == 2  # the same kind again


def test_a_function_of_all_rows_is_not_tried_row_by_row() -> None:
    scored = rows("aa", "raise")
    reward = RewardConfig(function=f"{SAMPLES}.relative", per_row=False)
    found = score([reward], scored)
    assert found.values == {"relative": [None, None]} and found.failures == {"relative": 2}


def test_too_many_failures_stop_the_run() -> None:
    with load_rewards([RewardConfig(function=f"{SAMPLES}.misbehave")], max_reward_failures=0.03) as loaded:
        assert asyncio.run(loaded.score(raising(3, bad=3))).failures == {"misbehave": 3}
        with pytest.raises(RewardError, match=r"failed on 4 of its last 100 rows, .*\(0.03\)") as caught:
            asyncio.run(loaded.score(raising(2, bad=1)))
        assert "First on row e0_d1_g0, whose completion begins 'raise': KeyError: 'no such answer'" in str(caught.value)


def test_failures_long_ago_are_forgotten() -> None:
    with load_rewards([RewardConfig(function=f"{SAMPLES}.misbehave")], max_reward_failures=0.03) as loaded:
        for _ in range(3):
            asyncio.run(loaded.score(raising(3, bad=3)))
            asyncio.run(loaded.score(raising(100, bad=0)))


def test_closed_rewards_and_any_event_loop() -> None:
    loaded: Rewards = load_rewards([samples.lengths])
    assert asyncio.run(loaded.score(rows("a"))).total == [1.0]
    assert asyncio.run(loaded.score(rows("aa"))).total == [2.0]
    loaded.close()
    loaded.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        asyncio.run(loaded.score(rows("a")))
