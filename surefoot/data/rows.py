"""What one row of a data file must look like, and the exact reason when it does not.

Three kinds of rows exist: `messages` (with optional `tools`), `prompt` + `completion`, and `text`. The first row fixes
the kind for the whole file, and where it has the columns of several kinds, the first of that list counts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import ConfigError

KINDS: dict[str, tuple[str, ...]] = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
COLUMNS = ("messages", "tools", "prompt", "completion", "text")
_JSON_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
_ROLES = ("system", "user", "assistant", "tool")
EXPECTED = "`messages`, or `prompt` and `completion`, or `text`"


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


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, where it is and why."""

    index: int
    where: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row: a chat when `messages` is not `None`, else a text whose first part, `prompt`, is not trained.

    Attributes:
        index: counted from 0 in the file; for JSONL the line number minus one.
        where: for people, such as "train.jsonl:3".
        answers: only the last `answers` messages may be trained (in prompt + completion rows, the completion's).
        extra: the row's other columns, as they stand.
    """

    index: int
    where: str
    messages: list[dict[str, Any]] | None = None
    answers: int = 0
    tools: list[dict[str, Any]] | None = None
    prompt: str = ""
    completion: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class RowChecker:
    """Checks the rows of one file. `as_chat`: strings in `prompt` and `completion` become two turns of a chat."""

    def __init__(self, columns: Mapping[str, str], *, as_chat: bool) -> None:
        for name in columns:
            if name not in COLUMNS:
                raise ConfigError(f"columns: found {name!r}, expected our names on the left: {', '.join(COLUMNS)}")
        self._columns = columns
        self._as_chat = as_chat
        self.saw_chats = self.saw_tools = False
        self.kind = next((kind for kind, names in KINDS.items() if set(names) & set(columns)), None)

    def check(self, index: int, where: str, value: Any) -> Row:
        """Raises `RowError`."""
        if not isinstance(value, dict):
            raise RowError("not an object", f"expected an object with {EXPECTED}, found {describe(value)}")
        fields = self._rename(value)
        self.kind = self.kind or next((kind for kind, names in KINDS.items() if set(names) & set(fields)), None)
        if self.kind is None:
            raise RowError(
                "missing key",
                f"expected {EXPECTED}, found the keys {', '.join(map(repr, value)) or '(none)'}; "
                "`columns: {prompt: their_name, completion: their_name}` maps other names",
            )
        for name in KINDS[self.kind]:
            if name not in fields:
                found = ", ".join(map(repr, value)) or "(none)"
                hint = f"; `columns: {{{name}: their_name}}` maps another name"
                raise RowError("missing key", f"missing key {self._label(name)}, found the keys {found}{hint}")
        extra = {name: fields[name] for name in fields if name not in (*KINDS[self.kind], "tools")}
        if self.kind == "text":
            return Row(index, where, completion=self._string("text", fields["text"]), extra=extra)
        if self.kind == "prompt":
            row = self._pair(index, where, fields, extra)
        else:
            messages = self._messages("messages", fields["messages"])
            row = Row(index, where, messages, len(messages), self._tools(fields), extra=extra)
        self.saw_chats |= row.messages is not None
        self.saw_tools |= row.tools is not None
        return row

    def _rename(self, value: dict[str, Any]) -> dict[str, Any]:
        for ours, theirs in self._columns.items():
            if theirs not in value and ours != "tools":
                found = ", ".join(map(repr, value)) or "(none)"
                raise RowError("missing key", f"missing key {self._label(ours)}, found the keys {found}")
        kept = {name: item for name, item in value.items() if name not in self._columns.values()}
        return kept | {ours: value[theirs] for ours, theirs in self._columns.items() if theirs in value}

    def _label(self, name: str) -> str:
        theirs = self._columns.get(name, name)
        return f"{theirs!r}" if theirs == name else f"{theirs!r} (the {name})"

    def _pair(self, index: int, where: str, fields: dict[str, Any], extra: dict[str, Any]) -> Row:
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str) and not self._as_chat:
            prompt = self._string("prompt", prompt, may_be_empty=True)
            return Row(index, where, prompt=prompt, completion=self._string("completion", completion), extra=extra)
        asked = self._turns("prompt", prompt, "user")
        answered = self._turns("completion", completion, "assistant")
        return Row(index, where, asked + answered, len(answered), self._tools(fields), extra=extra)

    def _turns(self, name: str, value: Any, role: str) -> list[dict[str, Any]]:
        if isinstance(value, list):
            return self._messages(name, value)
        return [{"role": role, "content": self._string(name, value, "a string or a list of messages")}]

    def _string(
        self, name: str, value: Any, expected: str = "a string", *, may_be_empty: bool = False, label: str = ""
    ) -> str:
        label = label or self._label(name)
        if not isinstance(value, str):
            raise RowError(f"wrong type in {name}", f"field {label}: expected {expected}, found {describe(value)}")
        if not value and not may_be_empty:
            raise RowError(f"empty {name}", f"field {label}: expected text, found an empty string")
        _plain_json(name, label, value)
        return value

    def _messages(self, name: str, value: Any) -> list[dict[str, Any]]:
        label = self._label(name)
        if not isinstance(value, list):
            raise RowError(
                f"wrong type in {name}", f"field {label}: expected a list of messages, found {describe(value)}"
            )
        if not value:
            raise RowError(f"empty {name}", f"field {label}: expected at least one message, found an empty list")
        return [self._message(name, f"{label}[{i}]", message) for i, message in enumerate(value)]

    def _message(self, name: str, label: str, value: Any) -> dict[str, Any]:
        wrong = f"wrong type in {name}"
        if not isinstance(value, dict):
            raise RowError(wrong, f"field {label}: expected an object with role and content, found {describe(value)}")
        message = {key: item for key, item in value.items() if item is not None}
        role = self._string(name, value.get("role"), label=f"{label}.role")
        if role not in _ROLES and difflib.get_close_matches(role.lower(), ["assistant"], cutoff=0.8):
            raise RowError("misspelt role", f"field {label}.role: expected 'assistant', found {role!r}")
        calls = message.get("tool_calls")
        if calls is not None:
            message["tool_calls"] = [_tool_call(wrong, f"{label}.tool_calls", call) for call in _list_of(calls)]
        if "content" in message:
            answers = role == "assistant" and not calls
            content = _joined_blocks(wrong, f"{label}.content", message["content"])
            message["content"] = self._string(name, content, may_be_empty=not answers, label=f"{label}.content")
        elif not calls:
            raise RowError(wrong, f"field {label}.content: expected a string, found {describe(value.get('content'))}")
        _plain_json(name, label, message)
        return message

    def _tools(self, fields: dict[str, Any]) -> list[dict[str, Any]] | None:
        """A list of JSON schemas, or the same as JSON text, as data files often have it."""
        tools, label = fields.get("tools"), self._label("tools")
        if isinstance(tools, str):
            tools = _inner_json("invalid JSON in tools", label, tools)
        if tools is None or tools == []:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RowError(
                "wrong type in tools", f"field {label}: expected a list of objects, found {describe(fields['tools'])}"
            )
        _plain_json("tools", label, tools)
        return tools


def _list_of(calls: Any) -> list[Any]:
    return calls if isinstance(calls, list) else [calls]


def _tool_call(reason: str, label: str, call: Any) -> dict[str, Any]:
    """Arguments that are JSON text become objects: templates write them as JSON themselves, and would quote twice."""
    if not isinstance(call, dict):
        raise RowError(reason, f"field {label}: expected a list of objects, found {describe(call)}")
    function = call.get("function")
    holder: dict[str, Any] = function if isinstance(function, dict) else call
    if isinstance(holder.get("arguments"), str):
        parsed = {**holder, "arguments": _inner_json("invalid JSON in tool calls", label, holder["arguments"])}
        return parsed if holder is call else {**call, "function": parsed}
    return call


def _joined_blocks(reason: str, label: str, content: Any) -> Any:
    """The text of `[{"type": "text", "text": …}, …]`: templates for text would print such a list as code."""
    if not isinstance(content, list):
        return content
    for block in content:
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            found = f"a block of type {block['type']!r}" if isinstance(block, dict) and "type" in block else None
            raise RowError(reason, f"field {label}: expected a string or text blocks, found {found or describe(block)}")
    return "".join(block["text"] for block in content)


def _inner_json(reason: str, label: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(reason, f"field {label}: expected JSON text, found {describe(text)}: {error}") from None


def _plain_json(name: str, label: str, value: Any) -> None:
    """Everything that is rendered must be text that can be encoded, and plain enough to cross to another process."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise RowError(
            f"lone surrogate in {name}",
            f"field {label}: expected valid Unicode, found the lone surrogate U+{code:04X}, half of a cut character",
        ) from None
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
