"""Rows of prompts: what a model is to answer, and whatever else the rewards need to judge the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from surefoot.data.rows import Prompt, RowChecker, RowError, check_plain
from surefoot.errors import ConfigError

_TAKEN = ("prompts", "completions")  # what reward functions are given besides the row's columns
_COLUMNS = ("answer", "source")  # of the row's columns those that may be mapped
Messages = list[dict[str, Any]]


class Opener(Protocol):
    """What opens the conversation of a row: an environment, as the data sees it."""

    def rows(self, num_rows: int, name: str) -> list[dict[str, Any]]:
        """Rows of the environment's own making, for a data set of that name."""
        ...

    def open(self, row: dict[str, Any]) -> tuple[Messages, list[dict[str, Any]] | None]:
        """The chat to answer, and the tools. The row: its `prompt` and its columns. Raises `ConfigError` when no other
        row would fare better than this one."""
        ...


class PromptChecker(RowChecker):
    """Checks the rows of one file. Two kinds exist: `prompt`, a text or a chat; and `messages`, a chat whose last turn,
    where that is the assistant's, is no part of the prompt but the column `answer`, unless the row has its own."""

    kinds: ClassVar[dict[str, tuple[str, ...]]] = {"prompt": ("prompt",), "messages": ("messages",)}
    names: ClassVar[tuple[str, ...]] = ("prompt", "messages", "tools", *_COLUMNS)
    expected: ClassVar[str] = "`prompt` or `messages`"

    def __init__(self, columns: Mapping[str, str], *, as_chat: bool, opener: Opener | None = None) -> None:
        super().__init__(columns, as_chat=as_chat or opener is not None)
        self._opener = opener

    def _hint(self, value: dict[str, Any]) -> str:
        return "`columns: {prompt: their_name, answer: their_name}` maps other names"

    def _fields(self, value: Any) -> dict[str, Any]:
        fields = super()._fields(value)
        ours = {self._theirs(name) for name in self.names}
        columns = {name: item for name, item in value.items() if name not in ours}
        for name in _TAKEN:
            if name in columns:
                found = f"field {name!r}: rewards are given the sampled {name} by this name; call the column otherwise"
                raise RowError("column with a taken name", found)
        return {**fields, "columns": columns | {name: fields[name] for name in _COLUMNS if name in fields}}

    def _row(self, where: str, fields: dict[str, Any]) -> Prompt:
        kind = self._kind or "prompt"
        columns = fields["columns"]
        for name, item in columns.items():
            check_plain(name, repr(name), item)
        turns = self._turns(kind, fields[kind], "user" if kind == "prompt" else None)
        if kind == "messages" and turns[-1]["role"] == "assistant":
            columns = {"answer": turns[-1].get("content", ""), **columns}
            turns = turns[:-1]
        if not turns or turns[-1]["role"] == "assistant":
            found = "nothing in front of the answer" if not turns else "an assistant turn at its end"
            raise RowError("nothing to answer", f"field {self._label(kind)}: expected a chat to answer, found {found}")
        given = fields[kind] if isinstance(fields[kind], str) else turns
        if isinstance(given, str) and not self._as_chat:
            return Prompt(where, given, None, None, columns)
        tools = self._tools(fields.get("tools"))
        if self._opener is not None:
            turns, tools = self._opened(self._opener, {"prompt": given, **columns})
        self.saw_chats, self.saw_tools = True, self.saw_tools or tools is not None
        return Prompt(where, given, turns, tools, columns)

    def _opened(self, opener: Opener, row: dict[str, Any]) -> tuple[Messages, list[dict[str, Any]] | None]:
        try:
            return opener.open(row)
        except ConfigError:  # it opens no row
            raise
        except Exception as error:  # an environment is the user's program: whatever it raises is its reason
            found = f"the environment cannot open this row: {type(error).__name__}: {error}"
            raise RowError("refused by the environment", found) from error
