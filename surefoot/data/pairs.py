"""Rows of preferences: which answer to a prompt is better than which other.

Two kinds exist: `chosen` + `rejected`, with a `prompt` or with the prompt inside both; and ranked answers, `context` +
`completions` (each a `completion` and its `rank`, the lowest being the best).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from surefoot.config import DatasetConfig
from surefoot.data.datasets import read
from surefoot.data.rows import Preference, Row, RowChecker, RowError, describe, expect

Answers = dict[tuple[str, str], Any]
"""By name (such as "chosen") and label (such as "'better' (the chosen)")."""
Ranking = Literal["best_worst", "all_pairs"]
_LARGEST = 3e38  # of a 32-bit float
_BINARY = (
    "these rows are binary feedback (one answer with a `label`), and training compares two answers to one prompt: make "
    "rows of a good one as `chosen` and a bad one as `rejected`, or train on the good ones alone with sft"
)


def looks_like_pairs(config: DatasetConfig) -> bool:
    """Whether a file's first object has columns of preferences, those of binary feedback included."""
    rows, _ = read(config)
    first = next((value for _, value in rows if isinstance(value, dict)), {})
    names = {n for n in ("chosen", "rejected", "completions", "completion") if config.columns.get(n, n) in first}
    return bool(names - {"completion"}) or (bool(names) and isinstance(first.get("label"), bool))


class PairChecker(RowChecker):
    """Checks the rows of one file. `as_chat`: strings become turns of a chat. `ranking`: which of ranked answers are
    compared; those of equal rank never are, and of several best or worst the first one is taken."""

    kinds: ClassVar[dict[str, tuple[str, ...]]] = {
        "pair": ("chosen", "rejected"),
        "ranked": ("completions", "context"),
    }
    names: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected", "context", "completions", "margin", "tools")
    expected: ClassVar[str] = "`prompt`, `chosen` and `rejected`, or `context` and `completions`"

    def __init__(self, columns: Mapping[str, str], *, as_chat: bool, ranking: Ranking) -> None:
        super().__init__(columns, as_chat=as_chat)
        self._ranking = ranking
        self._has_margin: bool | None = None
        self._inside: bool | None = None

    def _hint(self, value: dict[str, Any]) -> str:
        mapped = "`columns: {prompt: their_name, chosen: their_name, rejected: their_name}` maps other names"
        return _BINARY if "label" in value else mapped

    def _row(self, where: str, fields: dict[str, Any]) -> Preference:
        if self._kind == "ranked":
            name, (answers, pairs) = "context", self._ranked(fields["completions"])
        else:
            answers = {(side, self._label(side)): fields[side] for side in ("chosen", "rejected")}
            name, pairs = "prompt", [(0, 1)]
        margin = self._margin(fields.get("margin"))
        return Preference(where, self._answers(where, name, fields, answers), pairs, margin)

    def _ranked(self, value: Any) -> tuple[Answers, list[tuple[int, int]]]:
        """The answers and the pairs to compare."""
        label = self._label("completions")
        answers: Answers = {}
        ranks = []
        for i, item in enumerate(expect("completions", label, value, list, "a list of objects")):
            expect("completions", f"{label}[{i}]", item, dict, "an object with completion and rank")
            rank = item.get("rank")
            if not _is_number(rank):
                found = f"field {label}[{i}].rank: expected a number (the lowest is the best), found {describe(rank)}"
                raise RowError("wrong type in rank", found)
            answers["completion", f"{label}[{i}].completion"] = item.get("completion")
            ranks.append(rank)
        if len(ranks) < 2:
            raise RowError("fewer than two completions", f"field {label}: expected two or more, found {len(ranks)}")
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        if self._ranking == "best_worst":
            order = [order[0], ranks.index(max(ranks))]
        return answers, [(i, j) for i in order for j in order if ranks[i] < ranks[j]]

    def _margin(self, value: Any) -> float | None:
        if (value is not None and not _is_number(value)) or self._has_margin not in (None, value is not None):
            expected = "no margin, as on the rows before" if self._has_margin is False else "a number"
            found = f"field {self._label('margin')}: expected {expected}, found {describe(value)}"
            raise RowError("wrong type in margin", found)
        self._has_margin = value is not None
        return None if value is None else float(value)

    def _answers(self, where: str, name: str, fields: dict[str, Any], answers: Answers) -> list[Row]:
        """The prompt with each answer. `name`: the column it is in."""
        prompt = fields.get(name)
        if not isinstance(prompt, list) and all(isinstance(answer, str) for answer in answers.values()):
            prompt, answers = self._texts(name, prompt, answers)
            if not self._as_chat:
                return [Row(where, prompt=prompt, completion=answer) for answer in answers.values()]
        asked = None if prompt is None else self._turns(name, prompt, "user")
        turns = {key: self._turns(key[0], answer, "assistant", key[1]) for key, answer in answers.items()}
        inside = _prompt_inside(asked, list(turns.values()))
        for (_, label), messages in turns.items():
            if messages[inside]["role"] != "assistant" or (asked is None and not inside):
                expected = f"`{name}`, or the same turns inside every answer, and then an assistant turn"
                found = ", ".join(message["role"] for message in messages)
                raise RowError("no answer to a prompt", f"field {label}: expected {expected}, found the turns {found}")
        return [
            self._chat(where, messages[:inside] or asked or [], messages[inside:], fields)
            for messages in turns.values()
        ]

    def _texts(self, name: str, prompt: Any, answers: Answers) -> tuple[str, Answers]:
        """A prompt and answers that are texts, without the prompt inside. Whether it is there, the first row says for
        the whole file: a prompt "Hi" and answers "Hi!" and "Hi there" could mean either."""
        texts = {key: self._string(key[0], answer, label=key[1]) for key, answer in answers.items()}
        hint = f"; `columns: {{{name}: their_name}}` maps another name"
        if prompt is not None:
            prompt = self._string(name, prompt, "a string or a list of messages", may_be_empty=not self._as_chat)
            inside = all(text.startswith(prompt) and len(text) > len(prompt) for text in texts.values())
            self._inside = inside if self._inside is None else self._inside
            if self._inside and not inside:
                found = f"expected answers that begin with {describe(prompt)}, as those before begin with theirs"
                raise RowError("prompt not inside", f"field {self._label(name)}: {found}")
            inside = self._inside
        elif self._as_chat:
            expected = "texts that have the prompt inside need `prompt_format: plain`"
            raise RowError("missing key", f"missing key {self._label(name)}; {expected}{hint}")
        else:
            prompt, inside = _shared_beginning(list(texts.values())), True
            if not prompt:
                found = "and the answers share no beginning that could be one"
                raise RowError("missing key", f"missing key {self._label(name)}, {found}{hint}")
        return prompt, {key: text[len(prompt) * inside :] for key, text in texts.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _shared_beginning(texts: list[str]) -> str:
    shortest = min(texts, key=len)
    differ = (i for i in range(len(shortest)) if any(text[i] != shortest[i] for text in texts))
    return shortest[: next(differ, len(shortest))]


def _prompt_inside(asked: list[dict[str, Any]] | None, answers: list[list[dict[str, Any]]]) -> int:
    """How many turns at the start of every answer are the prompt: up to the last place of what was `asked`, or where
    that is not said, all turns that they share. What follows begins with an assistant turn."""
    shared, limit = 0, min(map(len, answers)) - 1
    while shared < limit and all(answer[shared] == answers[0][shared] for answer in answers):
        shared += 1
    ends = [end for end in range(shared, 0, -1) if all(answer[end]["role"] == "assistant" for answer in answers)]
    if asked is not None:
        ends = [end for end in ends if answers[0][max(end - len(asked), 0) : end] == asked]
    return next(iter(ends), 0)
