"""Conversations in which the model may call tools: typed Python functions with docstrings."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import pydantic

from surefoot.rollout.environments import Environment, Message, Row, Step
from surefoot.rollout.reward_calls import imported


class ToolCall(pydantic.BaseModel):
    """A call as the model writes it, in JSON."""

    name: str
    arguments: dict[str, Any] = {}


def parse_tool_calls(text: str, start: str = "<tool_call>", end: str = "</tool_call>") -> list[ToolCall | str]:
    """The calls in a turn, each between the marks, of which the last `end` may be missing; what is wrong with a call
    where it is none.

    >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    """
    return [_tool_call(part.partition(end)[0]) for part in text.split(start)[1:]]


def _tool_call(text: str) -> ToolCall | str:
    try:
        return ToolCall.model_validate_json(text)
    except ValueError as error:
        return f'error: expected a call such as {{"name": "…", "arguments": {{…}}}}: {_first(error)}'


def run_tool(tools: Sequence[Callable[..., Any]], call: ToolCall) -> str:
    """What a call gives, as text. Whatever is wrong with it is told to the model: "error: …"."""
    known = {tool.__name__: tool for tool in tools}
    if call.name not in known:
        return f"error: there is no tool {call.name!r}, only {', '.join(known)}"
    try:
        result = _checked(known[call.name])(**call.arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        text.encode()  # half a character could not be told to the model
        return text
    except (Exception, SystemExit) as error:  # the tool's own, or arguments that are not the tool's
        return f"error: {_first(error)}"


def _first(error: BaseException) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    found = error.errors()[0]
    return ": ".join([*(".".join(map(str, found["loc"])),) * bool(found["loc"]), found["msg"]])


@functools.cache
def _checked(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool with its arguments checked against its annotations, and read as such where they are texts."""
    return pydantic.validate_call(tool)


def _tool(given: Callable[..., Any] | str) -> Callable[..., Any]:
    """Raises `ValueError` when it is no function that gives its result at once."""
    tool = imported(given) if isinstance(given, str) and "." in given else given
    if not callable(tool) or not hasattr(tool, "__name__"):
        raise ValueError(f"tools: expected functions or their dotted paths, found {given!r}")
    if inspect.iscoroutinefunction(tool):
        raise ValueError(f"tools: {tool.__name__} is async; expected a function that gives its result at once")
    return tool


class Tools(Environment):
    """The model calls tools until a turn has no call in it: that one is its answer, for reward functions to judge.

    A turn whose tools take longer than the environment's time is told so in their place.

    Args:
        tools: functions, or their dotted paths.
        call_start, call_end: the marks around a call.
        max_result_characters: longer results are cut.
    """

    reply_role = "tool"

    def __init__(
        self,
        *,
        tools: Sequence[Callable[..., Any] | str],
        call_start: str = "<tool_call>",
        call_end: str = "</tool_call>",
        max_result_characters: int = 2000,
    ) -> None:
        if isinstance(tools, str) or not tools:
            raise ValueError(f"tools: expected a list of at least one function or dotted path, found {tools!r}")
        for name, mark in (("call_start", call_start), ("call_end", call_end)):
            if not isinstance(mark, str) or not mark:
                raise ValueError(f"{name}: expected a text of at least one character, found {mark!r}")
        if not isinstance(max_result_characters, int) or max_result_characters < 1:
            raise ValueError(f"max_result_characters: expected a number above 0, found {max_result_characters!r}")
        self.tools = [_tool(tool) for tool in tools]
        names = [tool.__name__ for tool in self.tools]
        if len({*names}) < len(names):
            raise ValueError(f"tools: the model calls them by name, and two have the same one: {', '.join(names)}")
        self._marks, self._max_characters = (call_start, call_end), max_result_characters

    def reset(self, row: Row) -> list[Message]:
        return self.opening(row)

    def step(self, message: Message) -> Step:
        calls = parse_tool_calls(message["content"], *self._marks)
        if not calls:
            return Step(reward=self.judge(message["content"]), done=True)
        return Step(tuple(map(self._result, calls)))

    def failed(self, message: Message, error: str) -> Step | None:
        calls = parse_tool_calls(message["content"], *self._marks)
        names = [call.name if isinstance(call, ToolCall) else "unknown" for call in calls]
        told = tuple({"role": "tool", "name": name, "content": f"error: {error}"} for name in names)
        return Step(told) if told else None

    def judge(self, answer: str) -> float | None:
        """The reward of the last turn."""
        return None

    def _result(self, call: ToolCall | str) -> Message:
        name, text = ("unknown", call) if isinstance(call, str) else (call.name, run_tool(self.tools, call))
        text = text if len(text) <= self._max_characters else text[: self._max_characters] + " … (cut)"
        return {"role": "tool", "name": name, "content": text}
