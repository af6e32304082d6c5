"""Conversations that answer back: a row opens one, the environment replies to each of the model's turns and ends it.

One file per environment, with one subclass of `Environment`. An environment is made anew for each rollout and may keep
state in itself, but only such as follows from the row and the messages so far: chance belongs in the row. So a rollout
that is made again, on a resume, is the same.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field

from surefoot.config import PositiveInt, PositiveReal, Section
from surefoot.errors import ConfigError
from surefoot.rollout.reward_calls import imported

Message: TypeAlias = dict[str, Any]
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to a turn of the model.

    Attributes:
        observation: messages for the model to go on from; none where all is said.
        reward: of this turn; the rollout's is the sum over its turns, and None where no turn had any.
        done: the conversation is over.
    """

    observation: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False


class Environment(ABC):
    """One conversation. Options of the configuration are the keyword-only parameters of `__init__`.

    Attributes:
        tools: functions that the model may call. The chat template is given their schemas.
        reply_role: the role in which it replies; None where one turn of the model is all.
    """

    tools: Sequence[Callable[..., Any]] = ()
    reply_role: str | None = "user"

    @abstractmethod
    def reset(self, row: Row) -> list[Message]:
        """The messages that open the conversation. Raises `KeyError` when the row lacks a column."""

    @abstractmethod
    def step(self, message: Message) -> Step:
        """The reply to what the model has said: `role` "assistant" and its `content`, as it was sampled."""

    def failed(self, message: Message, error: str) -> Step | None:
        """What is said in place of `step`, which took longer than its time on this turn, or ended its process. Called
        on another object than `step`. None: the rollout fails."""
        return None

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        """Rows to play with, a function of the seed alone; JSON values.

        Raises:
            ConfigError: the environment makes none: they must come from a file.
        """
        raise ConfigError(f"{type(self).__name__} makes no rows of its own; name a file in data.train.path")

    @staticmethod
    def opening(row: Row) -> list[Message]:
        """The row's `prompt`: messages, or a text that becomes the user's turn."""
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    @functools.cached_property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """For the chat template: from the functions' annotations and docstrings."""
        if not self.tools:
            return None
        from transformers.utils import get_json_schema  # heavy

        try:
            return [get_json_schema(tool) for tool in self.tools]
        except Exception as error:  # several kinds: no docstring, an argument without a type or a description
            raise ConfigError(f"{type(self).__name__}: a tool cannot be described to the model: {error}") from None


class EnvironmentConfig(Section):
    """The environment that rollouts take place in.

    Attributes:
        name: a file of `surefoot/rollout/environments`, or the dotted path of a class of your own.
        max_turns: turns of the model in one rollout.
        timeout_s: of one call of the environment, with the tools that it uses. It is ended for good.
        options: keyword arguments of the class.
    """

    name: str
    max_turns: PositiveInt = 8
    timeout_s: PositiveReal = 30.0
    options: dict[str, Any] = Field(default={})


def environment_names() -> list[str]:
    """The environments that come with the package: the files of this folder."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))


def load_environment(config: EnvironmentConfig) -> Callable[[], Environment]:
    """What makes an environment for each rollout, once that is seen to work and its tools can be described.

    Raises:
        ConfigError: there is no such class, or it does not take these options.
    """
    make = environment_maker(config)
    try:
        _ = make().tool_schemas
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"environment {config.name}: {error}") from None
    except Exception as error:  # the class is the user's program: whatever it raises is its reason
        given = f"with the options {config.options}" if config.options else "without options"
        raise ConfigError(f"environment {config.name}: {given} it raises {type(error).__name__}: {error}") from error
    return make


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """As `load_environment`, and makes none yet."""
    found = _environment_class(config.name)
    takes = list(inspect.signature(found).parameters)
    for option in config.options:
        if option not in takes:
            close = difflib.get_close_matches(option, takes, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(takes) or 'none'}"
            raise ConfigError(f"environment.options.{option}: {config.name} has no such option{hint}")
    return functools.partial(found, **config.options)


def _environment_class(name: str) -> type[Environment]:
    if name in environment_names():
        module = importlib.import_module(f"{__name__}.{name}")
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        (found,) = [c for c in classes if issubclass(c, Environment) and c.__module__ == module.__name__]
        return found
    if "." not in name:
        known = ", ".join(environment_names())
        raise ConfigError(f"environment.name: expected {known}, or module.Class, found {name!r}")
    value = imported(name)
    if not (isinstance(value, type) and issubclass(value, Environment)):
        raise ConfigError(f"environment.name: {name} is no subclass of surefoot.rollout.environments.Environment")
    return value
