"""One call of a reward function: the arguments that its style asks for, and a strict look at what it returns.

This runs in a worker process, or, for functions that no name can find, in the training process.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from surefoot.errors import ConfigError, SurefootError
from surefoot.rollout.reward_functions import BUILT_IN, check_options, whole_text

Row: TypeAlias = Mapping[str, Any]  # id, prompt, completion, completion_ids, columns
Table: TypeAlias = dict[str, list[Any]]  # one entry per row in each list
Values: TypeAlias = list[float | None]

GREATEST = 3.4028235e38  # rewards are trained on in float32, in which all beyond is infinite


class RewardError(SurefootError):
    """A reward function returned what is no reward, lacks a column, or failed too often."""


# ------------------------------------------------------------------------------------------------------------- styles


def _built_in(rows: Sequence[Row], columns: Table) -> Table:
    return {**columns, "completion": _each(rows, "completion"), "completion_ids": _each(rows, "completion_ids")}


def _trl(rows: Sequence[Row], columns: Table) -> Table:
    names = {"prompts": "prompt", "completions": "completion", "completion_ids": "completion_ids"}
    return columns | {theirs: _each(rows, ours) for theirs, ours in names.items()}


def _verl(rows: Sequence[Row], columns: Table) -> Table:
    """What verl's reward managers give: the response's text, the answer, the name of the data set, further columns."""
    table = {
        "data_source": columns.get("data_source", [""] * len(rows)),
        "solution_str": [whole_text(text) for text in _each(rows, "completion")],
        "extra_info": columns.get("extra_info", [{} for _ in rows]),
    }
    inner = [(value or {}).get("ground_truth") for value in columns.get("reward_model", [])]
    answers = columns.get("ground_truth", inner)
    return table | ({"ground_truth": answers} if answers else {})


def _verl_batch(rows: Sequence[Row], columns: Table) -> Table:
    return {f"{name}s": values for name, values in _verl(rows, columns).items()}


def _openrlhf(rows: Sequence[Row], columns: Table) -> Table:
    prompts, texts = ([whole_text(text) for text in _each(rows, name)] for name in ("prompt", "completion"))
    queries = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    return {**columns, "queries": queries, "prompts": prompts}


@dataclass(frozen=True)
class Style:
    """How a kind of reward functions is called.

    Attributes:
        inputs: from rows and their columns to all that may be given.
        by_row: it scores one row a call.
        mark: the parameter by which such a function is known.
        part: where it may return a mapping, the reward's key.
        reads: columns that its inputs are made of, besides those that its parameters name.
    """

    inputs: Callable[[Sequence[Row], Table], Table]
    by_row: bool = False
    mark: str = ""
    part: str = ""
    reads: tuple[str, ...] = ()


_VERL_COLUMNS = ("data_source", "ground_truth", "reward_model", "extra_info")
_BUILT_IN = Style(_built_in, by_row=True)
_TRL = Style(_trl)
STYLES = {
    "verl": Style(_verl, by_row=True, mark="solution_str", part="score", reads=_VERL_COLUMNS),
    "verl_batch": Style(_verl_batch, mark="solution_strs", part="score", reads=_VERL_COLUMNS),
    "openrlhf": Style(_openrlhf, mark="queries", part="rewards"),
    "trl": _TRL,
}


# -------------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class RewardFunction:
    """A function, ready to be called.

    Attributes:
        columns: parameter -> column, where they differ.
        arguments: keyword arguments of each call.
    """

    label: str
    function: Callable[..., Any]
    style: Style
    columns: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, label: str, function: Callable[..., Any], spec: Mapping[str, Any]) -> RewardFunction:
        """`spec`: a `RewardConfig` as a mapping. Raises `ConfigError` when the function cannot be called."""
        named = _parameters(function)
        style = STYLES.get(spec["style"]) or next((s for s in STYLES.values() if s.mark in named), _TRL)
        if style is _TRL and not _takes_all(named) and "completions" not in named:
            raise ConfigError(
                "expected a function of (prompts, completions, **columns), or one in a style that docs/rewards.md "
                f"names, found the parameters ({', '.join(named)})"
            )
        check_names("columns", [name for name in spec["columns"] if name not in style.reads], named)
        check_names("arguments", spec["arguments"], named)
        for name in spec["arguments"]:
            if name in style.inputs([], {}):
                raise ConfigError(f"arguments: {name!r} is what each call is given of the rows; call yours otherwise")
        for name, parameter in named.items():
            if parameter.kind is parameter.POSITIONAL_ONLY and _has_no_default(parameter):
                raise ConfigError(f"expected parameters that can be given by name, found {name} before a /")
        hooks = {name: _ignore for name in ("log_extra", "log_metric") if style is _TRL and name in named}
        return cls(label, function, style, spec["columns"], {**hooks, **spec["arguments"]})

    def start(self, rows: Sequence[Row]) -> list[Any]:
        """Call it; results, one per call, may have to be awaited. Raises `RewardError` when a column is missing."""
        inputs = self.inputs(rows)
        if not self.style.by_row:
            return [self.function(**inputs, **self.arguments)]
        calls = [dict(zip(inputs, values, strict=True)) for values in zip(*inputs.values(), strict=True)]
        if self.style is _BUILT_IN:
            can = [all(call[name] is not None for name in self._needed) for call in calls]
            return [self.function(**call, **self.arguments) if c else None for c, call in zip(can, calls, strict=True)]
        return [self.function(**call, **self.arguments) for call in calls]

    def inputs(self, rows: Sequence[Row]) -> Table:
        """What it is called with. Raises `RewardError` when a column is missing."""
        named = _parameters(self.function)
        inputs = self.style.inputs(rows, self._columns(rows))
        taken = [name for name in inputs if (name in named or _takes_all(named)) and name not in self.arguments]
        inputs = {name: inputs[name] for name in taken}
        for name in self._needed:
            if name not in inputs:
                raise RewardError(
                    f"reward {self.label} needs {name!r}, and no row has such a column; they have "
                    f"{', '.join(self._columns(rows)) or 'none'}. `columns: {{{name}: theirs}}` names another"
                )
        return inputs

    def needed_columns(self, rows: Sequence[Row]) -> list[str]:
        """The columns of these rows that it cannot do without. Raises `RewardError` when one is missing."""
        self.inputs(rows)
        wanted = [self.columns.get(name, name) for name in dict.fromkeys([*self._needed, *self.style.reads])]
        return [name for name in {*wanted, *self.columns.values()} if name in self._columns(rows)]

    @property
    def _needed(self) -> list[str]:
        named = _parameters(self.function)
        return [name for name, parameter in named.items() if _is_needed(parameter) and name not in self.arguments]

    def finish(self, results: Sequence[Any], rows: Sequence[Row]) -> Values:
        """One value per row. Raises `RewardError` for anything but a finite number or None for each."""
        given: Any = [self._part(result) for result in results]
        if not self.style.by_row:
            given = given[0]
            if getattr(given, "ndim", None) == 1:  # a NumPy array or a tensor
                given = given.tolist()
            if not isinstance(given, list | tuple) or len(given) != len(rows):
                found = f"{len(given)} values" if isinstance(given, list | tuple) else _described(given)
                raise RewardError(
                    f"reward {self.label} returned {found} for {len(rows)} rows, of which the first is "
                    f"{named(rows[0])}; expected a list with a number or None for each"
                )
        return [self._number(self._part(value), row) for value, row in zip(given, rows, strict=True)]

    def _number(self, value: Any, row: Row) -> float | None:
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, numbers.Real) else math.nan  # a bool counts as 0 or 1
        except OverflowError:
            number = math.inf
        if not abs(number) <= GREATEST:
            raise RewardError(
                f"reward {self.label} returned {_described(value)} for {named(row)}; expected a finite number, or "
                f"None to abstain, and no number beyond {GREATEST:.1e}"
            )
        return number

    def _part(self, value: Any) -> Any:
        return value[self.style.part] if isinstance(value, Mapping) and self.style.part in value else value

    def _columns(self, rows: Sequence[Row]) -> Table:
        names = dict.fromkeys(name for row in rows for name in row["columns"])
        found = {name: [row["columns"].get(name) for row in rows] for name in names}
        for ours, theirs in self.columns.items():
            if theirs not in found:
                raise RewardError(
                    f"reward {self.label}: columns names {theirs!r} for {ours!r}, and no row has such a column; they "
                    f"have {', '.join(found) or 'none'}"
                )
        return found | {ours: found[theirs] for ours, theirs in self.columns.items()}


async def _all(results: Sequence[Any]) -> list[Any]:
    async def one(result: Any) -> Any:
        return await result if isinstance(result, Awaitable) else result

    return list(await asyncio.gather(*map(one, results)))


async def score_async(function: RewardFunction, rows: Sequence[Row]) -> Values:
    """As `score`, where an event loop runs."""
    return function.finish(await _all(function.start(rows)), rows)


# --------------------------------------------------------------------------------------- what a worker process is told


def calls(values: Mapping[str, Any]) -> Callable[[Any], Any]:
    """What a worker is to do with rows: score them, or, given a mapping with `rows`, only see whether it could, and by
    which columns."""
    function = load(values)
    return lambda given: score(function, given) if isinstance(given, list) else function.needed_columns(given["rows"])


def load(values: Mapping[str, Any]) -> RewardFunction:
    """The function of a `RewardConfig`, given as a mapping. Raises `ConfigError` when it cannot be had here."""
    label, name = values["label"], values["name"]
    if name is None:
        return RewardFunction.of(label, imported(values["function"]), values)
    check_options(name, values["options"])
    check_names("columns", values["columns"], _parameters(BUILT_IN[name]))
    return RewardFunction(label, BUILT_IN[name], _BUILT_IN, values["columns"], values["options"])


def imported(path: str) -> Callable[..., Any]:
    """The function of a dotted path. Raises `ConfigError` when there is none."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{path}: there is no module {error.name!r} in this folder or on PYTHONPATH") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{path}: {module_name} has no function or class {name!r}")
    return found  # type: ignore[no-any-return]


def score(function: RewardFunction, rows: Sequence[Row]) -> Values:
    """Call a function where no event loop runs. Raises `RewardError`, and whatever the function raises."""
    results = function.start(rows)
    if any(isinstance(result, Awaitable) for result in results):
        results = asyncio.run(_all(results))
    return function.finish(results, rows)


# ------------------------------------------------------------------------------------------------------------- pieces


def _each(rows: Sequence[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _ignore(*args: Any, **named: Any) -> None:
    """TRL's hooks for logging from inside a reward function: taken, and not used."""


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def check_names(key: str, names: Iterable[str], named: Mapping[str, inspect.Parameter]) -> None:
    """Raises `ConfigError` when a function has no parameter of such a name."""
    for name in names:
        if name not in named and not _takes_all(named):
            raise ConfigError(f"{key}: it has no parameter {name!r}, only {', '.join(named)}")


def _has_no_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _takes_all(named: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())


def _is_needed(parameter: inspect.Parameter) -> bool:
    return _has_no_default(parameter) and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def named(row: Row) -> str:
    """A row, for messages."""
    return f"row {row['id']}, whose completion begins {whole_text(row['completion'])[:60]!r}"


def _described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
