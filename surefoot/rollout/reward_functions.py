"""The rewards that come with the package. Each scores one row: its completion and the columns that its parameters
name. A row that lacks a required one abstains. Keyword-only parameters are options of the configuration.

A completion is text, or the messages of one; of several messages the last one of the assistant holds the answer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import ModuleType
from typing import Any, TypeAlias

from surefoot.errors import ConfigError

Text: TypeAlias = str | Sequence[dict[str, Any]]

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_match(completion: Text, answer: Any, *, ignore_case: bool = False) -> float:
    """1 where the completion is the answer, white space at the ends aside."""
    given, right = answer_text(completion).strip(), str(answer).strip()
    return float(given.casefold() == right.casefold() if ignore_case else given == right)


def regex(completion: Text, answer: Any = None, *, pattern: str) -> float | None:
    """1 where the pattern is found; where it has a group, that must hold the answer in the last place found."""
    compiled = re.compile(pattern, re.DOTALL)
    found = list(compiled.finditer(answer_text(completion)))
    if not compiled.groups:
        return float(bool(found))
    return None if answer is None else float(bool(found) and (found[-1][1] or "").strip() == str(answer).strip())


def final_number(completion: Text, answer: Any) -> float | None:
    """1 where the last number of the completion is the last number of the answer: "#### 1,200" and "It is 1200." """
    right = last_number(str(answer))
    return None if right is None else float(last_number(answer_text(completion)) == right)


def math_verify(completion: Text, answer: Any) -> float | None:
    """1 where math-verify finds the completion equal to the answer; an answer that it cannot read abstains. Behind
    "####", as in GSM8K, stands the answer proper."""
    library = extra("math_verify", "math-verify")
    for name in ("math_verify", "latex2sympy2_extended"):  # they warn that nothing limits their time; the worker does
        logging.getLogger(name).setLevel(logging.ERROR)
    parse = functools.partial(library.parse, parsing_timeout=None)
    gold = str(answer).rpartition("####")[2].strip()
    right = parse(gold) or parse(f"${gold}$")
    return float(library.verify(right, parse(answer_text(completion)), timeout_seconds=None)) if right else None


def length(
    completion: Text, completion_ids: Sequence[int] | None = None, *, target: int, unit: str = "tokens"
) -> float:
    """1 at `target` units of length, falling evenly to 0 at none and at twice as many."""
    text = whole_text(completion)
    if unit == "tokens" and completion_ids is None:
        raise ConfigError("length: the rows come without token ids; set unit: words or characters")
    size = {"tokens": len(completion_ids or ()), "words": len(text.split()), "characters": len(text)}[unit]
    return max(0.0, 1 - abs(size - target) / target)


def tag_format(completion: Text, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 where the completion is `<tag>…</tag>` for each tag, in order, once, with nothing else around."""
    parts = (rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in map(re.escape, tags))
    return float(re.fullmatch(r"\s*" + r"\s*".join(parts) + r"\s*", answer_text(completion), re.DOTALL) is not None)


def reasoning_gym(
    completion: Text, answer: str, metadata: Any = None, question: str = "", *, task: str | None = None
) -> float:
    """The task's own score, from 0 to 1, of what stands in the last `<answer>` tag, or of the whole completion. Rows
    are the task's entries; without `task`, their metadata names it. What the task cannot even read is wrong: 0."""
    name = task or (metadata or {}).get("source_dataset")
    if name is None:
        raise ConfigError("reasoning_gym: set task; the row has no metadata.source_dataset to name it")
    text = answer_text(completion)
    given = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text]
    entry = {"question": question, "answer": answer, "metadata": metadata}
    try:
        return float(gym_task(name).score_answer(given[-1].strip(), entry))
    except ValueError:
        return 0.0


BUILT_IN: dict[str, Callable[..., float | None]] = {
    "exact_match": exact_match,
    "regex": regex,
    "final_number": final_number,
    "math_verify": math_verify,
    "length": length,
    "format": tag_format,
    "reasoning_gym": reasoning_gym,
}


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options of a built-in function."""
    found = inspect.signature(BUILT_IN[name]).parameters
    return {option: parameter for option, parameter in found.items() if parameter.kind is parameter.KEYWORD_ONLY}


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raises `ConfigError` when a built-in function cannot run here with these options."""
    if name == "regex":
        try:
            re.compile(options["pattern"])
        except re.error as error:
            raise ConfigError(f"pattern {options['pattern']!r} is not a regular expression: {error}") from None
    if name == "math_verify":
        extra("math_verify", "math-verify")
    if name == "reasoning_gym":
        gym_task(options["task"]) if "task" in options else extra("reasoning_gym", "reasoning-gym")


# ------------------------------------------------------------------------------------------------------------- pieces


def answer_text(completion: Text) -> str:
    """The text, or of messages the last one of the assistant's."""
    if isinstance(completion, str):
        return completion
    said = [str(message.get("content") or "") for message in completion if message.get("role") == "assistant"]
    return said[-1] if said else ""


def whole_text(text: Text) -> str:
    """The text, or all the messages' texts, one below the other."""
    return text if isinstance(text, str) else "\n".join(str(message.get("content") or "") for message in text)


def last_number(text: str) -> Decimal | None:
    """
    >>> last_number("from 3 apples to #### 1,200.")
    Decimal('1200')
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def extra(module: str, package: str) -> ModuleType:
    """A package of the extra `math`. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{package} is not installed ({error}): pip install 'surefoot[math]'") from None


@functools.cache
def gym_task(task: str) -> Any:
    """A reasoning-gym data set, for its score. Raises `ConfigError` when there is no such task."""
    names = gym_tasks()
    if task not in names:
        raise ConfigError(f"reasoning-gym has no task {task!r}; it has {', '.join(names)}")
    return extra("reasoning_gym", "reasoning-gym").create_dataset(task, seed=0, size=1)


def gym_tasks() -> list[str]:
    """The names of reasoning-gym's tasks. Raises `ConfigError` where it is not installed."""
    extra("reasoning_gym", "reasoning-gym")
    return sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
