"""What every environment keeps, and each of those that come with the package. The folder is listed: a new file joins by
itself, and fails until `OPTIONS` and `ANSWERS` say how to play it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.rollout.environments import (
    Environment,
    EnvironmentConfig,
    Message,
    Step,
    environment_names,
    load_environment,
)
from surefoot.rollout.environments.arithmetic import Arithmetic
from surefoot.rollout.environments.calculator import Calculator, calculate
from surefoot.rollout.environments.guessing import Guessing
from surefoot.rollout.environments.tools import ToolCall, Tools, parse_tool_calls, run_tool

OPTIONS: dict[str, dict[str, Any]] = {
    "tools": {"tools": ["surefoot.rollout.environments.calculator.calculate"]},
    "reasoning_gym": {"task": "chain_sum", "system_prompt": "Mark the answer."},
}


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': arguments})}</tool_call>"


# Environment -> what a model that plays well says, turn by turn, given the row.
ANSWERS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "arithmetic": lambda row: [row["answer"]],
    "calculator": lambda row: [f"Let me see. {call(expression=row['prompt'][:-1])}", f"It is {row['answer']}."],
    "guessing": lambda row: [str(row["secret"] % 16 + 1), f"I say {row['secret']}"],
    "reasoning_gym": lambda row: [f"<answer>{row['answer']}</answer>"],
    "tools": lambda row: [call(expression="1+1"), "2"],
}


@pytest.fixture(params=environment_names())
def made(request: pytest.FixtureRequest) -> tuple[str, Callable[[], Environment]]:
    if request.param == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    assert request.param in ANSWERS, "tests/rollout/test_environments.py does not say how to play it"
    return request.param, load_environment(
        EnvironmentConfig(name=request.param, options=OPTIONS.get(request.param, {}))
    )


def rows_of(name: str, make: Callable[[], Environment], num_rows: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    if name == "tools":
        return [{"prompt": [{"role": "user", "content": f"1+{i + seed}="}]} for i in range(num_rows)]
    return make().rows(num_rows, seed)


def played(environment: Environment, row: dict[str, Any], answers: list[str]) -> tuple[list[Message], list[Step]]:
    messages, steps = environment.reset(row), []
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
        steps.append(environment.step(messages[-1]))
        messages += steps[-1].observation
    return messages, steps


def replay(make: Callable[[], Environment], row: dict[str, Any], messages: list[Message]) -> Environment:
    """The environment as it was after `messages`, of which those of the model are told to it again."""
    environment = make()
    told = environment.reset(row)
    for message in messages[len(told) :]:
        if message["role"] == "assistant":
            told.append(message)
            told.extend(environment.step(message).observation)
    assert told[: len(messages)] == messages
    return environment


def test_rows_follow_from_the_seed(made: tuple[str, Callable[[], Environment]]) -> None:
    name, make = made
    rows = rows_of(name, make, 5)
    assert json.loads(json.dumps(rows)) == rows and len(rows) == 5
    assert rows == rows_of(name, make, 5) != rows_of(name, make, 5, seed=1)
    assert name == "reasoning_gym" or rows_of(name, make, 3) == rows[:3]
    assert all("prompt" in row for row in rows)


def test_good_play_is_rewarded_and_ends(made: tuple[str, Callable[[], Environment]]) -> None:
    name, make = made
    for row in rows_of(name, make):
        messages, steps = played(make(), row, ANSWERS[name](row))
        assert [step.done for step in steps] == [*(False for _ in steps[1:]), True]
        assert name == "tools" or sum(step.reward or 0 for step in steps) > 0.5
        assert all(bool(step.observation) is not step.done for step in steps)
        assert {m["role"] for step in steps for m in step.observation} == {make().reply_role} - {None}
        assert messages[-1]["role"] == "assistant"


def test_nonsense_is_no_crash_and_earns_nothing(made: tuple[str, Callable[[], Environment]]) -> None:
    name, make = made
    for text in ("", "no", "<tool_call>", "9" * 10_000, "\ud83d <answer></answer>", "<tool_call>[]</tool_call>"):
        _, steps = played(make(), rows_of(name, make)[0], [text])
        assert not steps[0].reward


def test_a_rollout_can_be_told_again(made: tuple[str, Callable[[], Environment]]) -> None:
    """Cut anywhere, an environment made anew goes on as the first one did."""
    name, make = made
    row = rows_of(name, make)[0]
    answers = ANSWERS[name](row)
    messages, steps = played(make(), row, answers)
    for turn in range(len(answers)):
        end = [i for i, message in enumerate(messages) if message["role"] == "assistant"][turn]
        again = replay(make, row, messages[:end])
        assert again.step(messages[end]) == steps[turn]


def test_the_template_is_told_of_the_tools(made: tuple[str, Callable[[], Environment]]) -> None:
    name, make = made
    schemas = make().tool_schemas
    assert (schemas is not None) == (name in ("tools", "calculator"))
    if schemas is not None:
        (function,) = [schema["function"] for schema in schemas]
        assert function["name"] == "calculate" and function["parameters"]["required"] == ["expression"]


# ----------------------------------------------------------------------------------------------------- the shipped ones


@pytest.mark.parametrize("operators", ["+", "+-", "+-*"])
def test_arithmetic_asks_what_it_answers(operators: str) -> None:
    rows = Arithmetic(operators=operators, num_terms=4, num_digits=3).rows(50, seed=1)
    for row in rows:
        assert calculate(row["prompt"].removesuffix("=")) == row["answer"]
    assert len({row["prompt"] for row in rows}) == 50


def test_guessing_counts_the_guesses() -> None:
    row = {"prompt": "Guess.", "secret": 6}
    messages, steps = played(Guessing(max_guesses=4), row, ["8", "my guess: 4", "what?", "6"])
    assert [m["content"] for m in messages if m["role"] == "user"] == ["Guess.", "Lower.", "Higher.", "Say a number."]
    assert steps[-1] == Step(reward=0.25, done=True)
    _, steps = played(Guessing(max_guesses=2), row, ["1", "2"])
    assert steps == [Step(({"role": "user", "content": "Higher."},)), Step(reward=0.0, done=True)]
    with pytest.raises(ValueError, match="found 1 and 5"):
        Guessing(highest=1)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 * (3 + 4)", "84"), (" -7 // 2", "-4"), ("7 % 4", "3"), ("1/4", "0.25"), ("+.5", "0.5"), ("1" * 30, "1" * 30)],
)
def test_calculate(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "2**9", "abs(1)", "a", "1 if 1 else 2", "'a'*9", "True", "(" * 150, "1;2", "1j", "[1]", "9" * 201),
        *("__import__('os').system('true')", "9 .__class__", "1\x00"),
    ],
)
def test_calculate_refuses_the_rest(expression: str) -> None:
    (found,) = parse_tool_calls(call(expression=expression))
    assert isinstance(found, ToolCall) and run_tool([calculate], found).startswith("error: ")


def test_the_calculator_answers_calls_and_judges_the_rest() -> None:
    row = {"prompt": "12*34=", "answer": "408"}
    calls = f"{call(expression='12*34')} and {call(expression='1/0')} and <tool_call>12*34"
    messages, steps = played(Calculator(), row, [calls, "408"])
    assert steps[1] == Step(reward=1.0, done=True)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results[:2] == ["408", "error: ZeroDivisionError: division by zero"]
    assert results[2].startswith("error: expected a call such as")
    assert played(Calculator(), row, ["407"])[1] == [Step(reward=0.0, done=True)]


# ------------------------------------------------------------------------------------------------------------ tools


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def listing(name: str) -> list[str]:
    """List.

    Args:
        name: What.
    """
    return [name] * 2000


def failing(what: str) -> str:
    """Fail.

    Args:
        what: How.
    """
    if what == "exit":
        sys.exit(3)
    if what == "half":
        return "\ud83d"
    raise LookupError(what)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', "2"),
        ('{"name": "add", "arguments": {"a": "1", "b": 2}}', "3"),
        ('{"name": "add", "arguments": {"a": "x"}}', "error: a: Input should be a valid integer"),
        ('{"name": "add"}', "error: a: Missing required argument"),
        ('{"name": "add", "arguments": {"a": 1, "c": 1}}', "error: c: Unexpected keyword argument"),
        ('{"name": "add", "arguments": [1]}', "error: expected a call such as"),
        ('{"name": "sub", "arguments": {}}', "error: there is no tool 'sub', only add, listing, failing"),
        ('{"arguments": {}}', 'error: expected a call such as {"name": "…", "arguments": {…}}: name: Field required'),
        ("[" * 100_000, "error: expected a call such as"),
        ('{"name": "failing", "arguments": {"what": "no"}}', "error: LookupError: no"),
        ('{"name": "failing", "arguments": {"what": "exit"}}', "error: SystemExit: 3"),
        ('{"name": "failing", "arguments": {"what": "half"}}', "error: UnicodeEncodeError: 'utf-8' codec can't encode"),
    ],
)
def test_whatever_is_wrong_with_a_call_is_told_to_the_model(text: str, result: str) -> None:
    (found,) = parse_tool_calls(f"so <tool_call>\n{text}\n</tool_call> then")
    said = found if isinstance(found, str) else run_tool([add, listing, failing], found)
    assert said.startswith(result)


def test_marks_and_long_results() -> None:
    environment = Tools(tools=[add, listing], call_start="[[", call_end="]]", max_result_characters=20)
    text = '[[{"name": "listing", "arguments": {"name": "abc"}}]] [[{"name": "add", "arguments": {"a": 4}}'
    _, (step,) = played(environment, {"prompt": "p"}, [text])
    assert [message["content"] for message in step.observation] == ['["abc", "abc", "abc" … (cut)', "5"]
    assert [message["name"] for message in step.observation] == ["listing", "add"]
    _, (step,) = played(environment, {"prompt": "p"}, ["<tool_call>{}</tool_call>"])
    assert step == Step(done=True)


# --------------------------------------------------------------------------------------------------------- by name


class Mine(Environment):
    def __init__(self, *, greeting: str) -> None:
        self._greeting = greeting

    def reset(self, row: Any) -> list[Message]:
        return [{"role": "user", "content": self._greeting}]

    def step(self, message: Message) -> Step:
        return Step(done=True)


async def later(a: int) -> int:
    """Add.

    Args:
        a: One.
    """
    return a


def undocumented(a: int) -> int:
    return a


def test_an_environment_of_ones_own() -> None:
    make = load_environment(EnvironmentConfig(name=f"{__name__}.Mine", options={"greeting": "hello"}))
    assert make().reset({}) == [{"role": "user", "content": "hello"}] and make() is not make()
    with pytest.raises(ConfigError, match=r"Mine makes no rows of its own; name a file in data.train.path"):
        make().rows(1, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calculate", {}, "expected arithmetic, calculator, guessing, .*, or module.Class, found 'calculate'"),
        ("nowhere.Mine", {}, "there is no module 'nowhere'"),
        (f"{__name__}.Yours", {}, "has no function or class 'Yours'"),
        (f"{__name__}.add", {}, "is no subclass of surefoot.rollout.environments.Environment"),
        (f"{__name__}.Mine", {"greetings": "a"}, "environment.options.greetings: .* did you mean greeting?"),
        (f"{__name__}.Mine", {}, "missing 1 required keyword-only argument: 'greeting'"),
        ("arithmetic", {"operators": "^"}, "environment arithmetic: expected operators out of"),
        ("arithmetic", {"operators": 3}, "environment arithmetic: "),
        ("guessing", {"highest": "a"}, r"environment guessing: with the options {'highest': 'a'} it raises TypeError"),
        (
            "tests.rollout.environment_samples.Odd",
            {"rows": "no environment"},
            "it raises LookupError: no server",
        ),
        ("tools", {"tools": [f"{__name__}.undocumented"]}, "environment tools: Tools: a tool cannot be described"),
        ("tools", {"tools": []}, "tools: expected a list of at least one function or dotted path, found \\[\\]"),
        (
            "tools",
            {"tools": f"{__name__}.add"},
            "expected a list of at least one function or dotted path, found 'tests",
        ),
        ("tools", {"tools": ["add"]}, "tools: expected functions or their dotted paths, found 'add'"),
        ("tools", {"tools": [f"{__name__}.later"]}, "tools: later is async; expected a function that gives its result"),
        ("tools", {"tools": [f"{__name__}.add"] * 2}, "two have the same one: add, add"),
        ("tools", {"tools": [f"{__name__}.add"], "call_start": ""}, "call_start: expected a text of at least one char"),
        ("calculator", {"call_end": 3}, "call_end: expected a text of at least one character, found 3"),
        (
            "tools",
            {"tools": [f"{__name__}.add"], "max_result_characters": -1},
            "max_result_characters: expected a number above 0, found -1",
        ),
        ("tools", {"tools": ["nowhere.tool"]}, "environment tools: nowhere.tool: there is no module"),
    ],
)
def test_an_environment_that_cannot_be_had(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvironmentConfig(name=name, options=options))


def test_reasoning_gym_settings() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"task": "chain_sum", "settings": {"max_terms": 2, "max_digits": 1}}
    make = load_environment(EnvironmentConfig(name="reasoning_gym", options=options))
    assert all(row["metadata"]["num_terms"] == 2 for row in make().rows(3, 0))
    with pytest.raises(ConfigError, match="chain_sum does not take settings"):
        load_environment(EnvironmentConfig(name="reasoning_gym", options={**options, "settings": {"a": 1}}))().rows(
            1, 0
        )
    with pytest.raises(ConfigError, match="reasoning-gym has no task 'sum'"):
        load_environment(EnvironmentConfig(name="reasoning_gym", options={"task": "sum"}))
