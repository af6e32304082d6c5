"""The configuration of one reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surefoot.config import Place, PositiveInt, PositiveReal, Real, Section
from surefoot.rollout.reward_functions import BUILT_IN, options_of

Style = Literal["auto", "trl", "verl", "verl_batch", "openrlhf"]
_OPTIONS = tuple(dict.fromkeys(option for name in BUILT_IN for option in options_of(name)))


class RewardConfig(Section):
    """One reward: a built-in function by `name`, one of your own by `function`, or a reward model by `model`.

    Attributes:
        function: dotted path, such as my_module.my_reward.
        model: a checkpoint's folder or a hub name.
        label: its name in metrics and completions; default: the function's own, or "reward_model".
        weight: of its value in the row's reward; 0 only reports it.
        timeout_s: of one call. It is ended for good, and what hangs in it abstains. A reward model has none.
        style: how your function is called; "auto" looks at its parameters' names. See `docs/rewards.md`.
        columns: parameter -> the column of the data that it is given, for example {answer: solution}.
        arguments: further keyword arguments of your function, the same in each call.
        per_row: a row's value does not depend on other rows, so that after a failed call each may be tried alone.
            Without it, all rows of a failed call abstain.

    The rest are options of built-in functions; one that the named function does not read is an error.
    """

    name: str | None = None
    function: Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$")] | None = None
    model: Place | None = None
    label: Annotated[str, Field(pattern=r"^[^\s/:]+$")] | None = None
    weight: Real = 1.0
    timeout_s: PositiveReal = 30.0
    style: Style = "auto"
    columns: dict[str, str] = Field(default={})
    arguments: dict[str, Any] = Field(default={})
    per_row: bool = True
    ignore_case: bool | None = None
    pattern: str | None = None
    target: PositiveInt | None = None
    unit: Literal["tokens", "words", "characters"] | None = None
    tags: Annotated[list[str], Field(min_length=1)] | None = None
    task: str | None = None

    @property
    def shown_as(self) -> str:
        return self.label or self.name or (self.function or "reward_model").rpartition(".")[2]

    @property
    def options(self) -> dict[str, Any]:
        """The options of built-in functions that are set."""
        return {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) is not None}

    @model_validator(mode="after")
    def _one_function_with_its_own_options(self) -> RewardConfig:
        given = [key for key in ("name", "function", "model") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of name, function and model, found {' and '.join(given) or 'none'}")
        if self.name is not None and self.name not in BUILT_IN:
            raise ValueError(f"name: expected one of {', '.join(BUILT_IN)}, found {self.name!r}")
        if self.function is None and (self.arguments or self.style != "auto"):
            raise ValueError(f"arguments and style are of functions of your own; {self.shown_as} reads neither")
        known = options_of(self.name) if self.name is not None else {}
        for option in self.options:
            if option not in known:
                takes = ", ".join(known) or "no options"
                raise ValueError(f"{option}: {self.shown_as} does not read it; it takes {takes}")
        for option, parameter in known.items():
            if parameter.default is parameter.empty and option not in self.options:
                raise ValueError(f"{option}: {self.name} needs it")
        return self
