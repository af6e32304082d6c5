"""What one row of a data file must look like, and the exact reason when it does not.

Three kinds of rows exist: `messages` (with optional `tools`), `prompt` + `completion`, and `text`; `pairs` and
`prompts` have further ones. The first row fixes the kind for the whole file, and where it has the columns of several
kinds, the first of that list counts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from surefoot.errors import ConfigError

_JSON_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}


class RowError(Exception):
    """One row cannot be used.

    Attributes:
        reason: a few words to count rows by.
        detail: the field, what was found and what was expected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    def at(self, where: str) -> BadRow:
        return BadRow(where, self.reason, self.detail)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, where it is and why."""

    where: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row: a chat when `messages` is not `None`, else a text whose first part, `prompt`, is not trained.

    Attributes:
        where: for people, such as "train.jsonl:3".
        answers: only the last `answers` messages may be trained (in prompt + completion rows, the completion's).
        source: what the row's column of that name says, where that is a text: the kind of row it is.
    """

    where: str
    messages: list[dict[str, Any]] | None = None
    answers: int = 0
    tools: list[dict[str, Any]] | None = None
    prompt: str = ""
    completion: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Preference:
    """One checked row of preferences.

    Attributes:
        answers: one prompt with each of its answers.
        pairs: which of them are compared, by index: the chosen one, the rejected one. None where all ranks are tied.
        margin: by how much the chosen one should win, where the file says so.
    """

    where: str
    answers: list[Row]
    pairs: list[tuple[int, int]]
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked row that a model is to answer.

    Attributes:
        given: the prompt as the row has it.
        messages: the chat that is rendered; `None` where `given` is a text that stands as it is.
        columns: the row's other columns, plain JSON values, for rewards and environments.
    """

    where: str
    given: str | list[dict[str, Any]]
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    columns: dict[str, Any]

    @property
    def source(self) -> str:
        """As a `Row`'s."""
        return _text(self.columns.get("source"))

    @property
    def shown(self) -> str:
        """For people: the text, or what was said last in the chat."""
        return self.given if isinstance(self.given, str) else str(self.given[-1].get("content", ""))


def chat_text(prompt: Prompt, said: list[dict[str, Any]]) -> str:
    """What was asked and said, for a column of texts."""
    return json.dumps([prompt.where, prompt.given, prompt.messages, prompt.tools, said])


def chat_of(text: str) -> tuple[Prompt, list[dict[str, Any]]]:
    """From `chat_text`; without the prompt's columns."""
    where, given, messages, tools, said = json.loads(text)
    return Prompt(where, given, messages, tools, {}), said


Checked = Row | Preference | Prompt | BadRow


class RowChecker:
    """Checks the rows of one file. `as_chat`: strings in `prompt` and `completion` become two turns of a chat."""

    kinds: ClassVar[dict[str, tuple[str, ...]]] = {
        "messages": ("messages",),
        "prompt": ("prompt", "completion"),
        "text": ("text",),
    }
    names: ClassVar[tuple[str, ...]] = ("messages", "tools", "prompt", "completion", "text", "source")
    expected: ClassVar[str] = "`messages`, or `prompt` and `completion`, or `text`"

    def __init__(self, columns: Mapping[str, str], *, as_chat: bool) -> None:
        for name in columns:
            if name not in self.names:
                raise ConfigError(f"columns: found {name!r}, expected our names on the left: {', '.join(self.names)}")
        self._columns = columns
        self._as_chat = as_chat
        self._kind = self._kind_of(columns)
        self.saw_chats = self.saw_tools = False
        self.missing = dict(columns)  # of these, those that no row so far has

    def check(self, where: str, value: Any) -> Checked:
        """`value`: one that `datasets.read` gave, which may be a `RowError`."""
        try:
            if isinstance(value, RowError):
                raise value
            fields = self._fields(value)
            row = self._row(where, fields)
            return replace(row, source=_text(fields.get("source"))) if isinstance(row, Row) else row
        except RowError as error:
            return error.at(where)

    def _fields(self, value: Any) -> dict[str, Any]:
        """The row's columns by our names, with all that its kind needs."""
        if not isinstance(value, dict):
            raise RowError("not an object", f"expected an object with {self.expected}, found {describe(value)}")
        fields = {ours: value[self._theirs(ours)] for ours in self.names if self._theirs(ours) in value}
        self.missing = {ours: theirs for ours, theirs in self.missing.items() if ours not in fields}
        found = ", ".join(map(repr, value)) or "(none)"
        self._kind = self._kind or self._kind_of(fields)
        if self._kind is None:
            hint = self._hint(value)
            raise RowError("missing key", f"expected {self.expected}, found the keys {found}; {hint}")
        for name in self.kinds[self._kind]:
            if name not in fields:
                hint = "" if name in self._columns else f"; `columns: {{{name}: their_name}}` maps another name"
                raise RowError("missing key", f"missing key {self._label(name)}, found the keys {found}{hint}")
        return fields

    def _hint(self, value: dict[str, Any]) -> str:
        """What to do about a row of no kind."""
        return "`columns: {prompt: their_name, completion: their_name}` maps other names"

    def _kind_of(self, names: Collection[str]) -> str | None:
        return next((kind for kind, needed in self.kinds.items() if not set(needed).isdisjoint(names)), None)

    def _row(self, where: str, fields: dict[str, Any]) -> Row | Preference | Prompt:
        if self._kind == "text":
            return Row(where, completion=self._string("text", fields["text"]))
        if self._kind == "messages":
            asked, answered = [], self._turns("messages", fields["messages"], None)
        elif not self._as_chat and isinstance(fields["prompt"], str) and isinstance(fields["completion"], str):
            prompt = self._string("prompt", fields["prompt"], may_be_empty=True)
            return Row(where, prompt=prompt, completion=self._string("completion", fields["completion"]))
        else:
            asked = self._turns("prompt", fields["prompt"], "user")
            answered = self._turns("completion", fields["completion"], "assistant")
        return self._chat(where, asked, answered, fields)

    def _chat(
        self, where: str, asked: list[dict[str, Any]], answered: list[dict[str, Any]], fields: dict[str, Any]
    ) -> Row:
        tools = self._tools(fields.get("tools"))
        self.saw_chats, self.saw_tools = True, self.saw_tools or tools is not None
        return Row(where, asked + answered, len(answered), tools)

    def _theirs(self, ours: str) -> str:
        return self._columns.get(ours, ours)

    def _label(self, name: str) -> str:
        return f"{self._theirs(name)!r}" + (f" (the {name})" if self._theirs(name) != name else "")

    def _string(
        self, name: str, value: Any, expected: str = "a string", *, may_be_empty: bool = False, label: str = ""
    ) -> str:
        label = label or self._label(name)
        text: str = expect(name, label, value, str, expected)
        if not text and not may_be_empty:
            raise RowError(f"empty {name}", f"field {label}: expected text, found an empty string")
        check_plain(name, label, text)
        return text

    def _turns(self, name: str, value: Any, role: str | None, label: str = "") -> list[dict[str, Any]]:
        """A list of messages, or where a `role` is given a string, which becomes its one turn."""
        label = label or self._label(name)
        if role is not None and not isinstance(value, list):
            text = self._string(name, value, "a string or a list of messages", label=label)
            return [{"role": role, "content": text}]
        expect(name, label, value, list, "a list of messages")
        if not value:
            raise RowError(f"empty {name}", f"field {label}: expected at least one message, found an empty list")
        messages = [_message(name, f"{label}[{i}]", message) for i, message in enumerate(value)]
        check_plain(name, label, messages)
        return messages

    def _tools(self, tools: Any) -> list[dict[str, Any]] | None:
        """A list of JSON schemas, or the same as JSON text, as data files often have it."""
        label = self._label("tools")
        if isinstance(tools, str):
            tools = _inner_json("tools", label, tools)
        if tools is None or tools == []:
            return None
        for tool in expect("tools", label, tools, list, "a list of objects"):
            expect("tools", label, tool, dict, "a list of objects")
        check_plain("tools", label, tools)
        return list(tools)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _message(name: str, label: str, value: Any) -> dict[str, Any]:
    expect(name, label, value, dict, "an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    role = expect(name, f"{label}.role", message.get("role"), str, "a string")
    if not role or (role != "assistant" and difflib.get_close_matches(role.lower(), ["assistant"], cutoff=0.8)):
        raise RowError("misspelt role", f"field {label}.role: expected 'user', 'assistant' …, found {role!r}")
    calls = message.get("tool_calls")
    if calls:
        expect(name, f"{label}.tool_calls", calls, list, "a list of objects")
        message["tool_calls"] = [_tool_call(name, f"{label}.tool_calls", call) for call in calls]
    if "content" not in message and calls:
        return message
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(b, dict) and isinstance(b.get("text"), str) for b in content):
        content = "".join(block["text"] for block in content)  # templates for text would print such a list as code
    message["content"] = expect(name, f"{label}.content", content, str, "a string or text blocks")
    if not content and not calls and role == "assistant":
        raise RowError(f"empty {name}", f"field {label}.content: expected text, found an empty string")
    return message


def _tool_call(name: str, label: str, call: Any) -> dict[str, Any]:
    """Arguments that are JSON text become objects: templates write them as JSON themselves, and would quote twice."""
    expect(name, label, call, dict, "a list of objects")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(name, label, call["function"])}
    if isinstance(call.get("arguments"), str):
        return {**call, "arguments": _inner_json(name, label, call["arguments"])}
    return dict(call)


def expect(name: str, label: str, value: Any, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise RowError(f"wrong type in {name}", f"field {label}: expected {expected}, found {describe(value)}")
    return value


def _inner_json(name: str, label: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"field {label}: expected JSON text, found {describe(text)}: {error}"
        raise RowError(f"invalid JSON in {name}", found) from None


def check_plain(name: str, label: str, value: Any) -> None:
    """Everything that is rendered must be plain JSON values, and text that can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(error.object[error.start]):04X}, half of a cut character"
        raise RowError(f"lone surrogate in {name}", f"field {label}: expected Unicode, found {found}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"wrong type in {name}", f"field {label}: expected plain JSON values: {error}") from None


def describe(value: Any) -> str:
    """The type as JSON calls it, and the beginning of the value.

    >>> describe({"value": 5})
    "object {'value': 5}"
    """
    if value is None:
        return "null"
    text = repr(value)
    name = _JSON_NAMES.get(type(value), type(value).__name__)
    return f"{name} {text if len(text) <= 60 else text[:57] + '…'}"
