"""From a YAML file and `a.b=c` overrides to a `RunConfig`, with errors a user can act on.

Loading reads no model and no data, so it fails before anything heavy starts.
"""

from __future__ import annotations

import difflib
import importlib
import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError, create_model, model_validator

from surefoot.config import AlgorithmConfig, RunConfig
from surefoot.errors import ConfigError
from surefoot.types import Algorithm

ALGORITHMS_PACKAGE = "surefoot.algorithms"
Run = TypeVar("Run", bound=RunConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check a run's configuration.

    Args:
        path: the YAML file.
        overrides: "dotted.key=value"; the value is read as YAML.

    Raises:
        ConfigError: lists every fault found, each with the key's path.
    """
    return parse_config(read_yaml(Path(path)), overrides, origin=str(path))


def parse_config(
    values: Mapping[str, Any], overrides: Sequence[str] = (), origin: str = "the configuration"
) -> RunConfig:
    """Check a configuration that is already a mapping. Raises `ConfigError` as `load_config` does."""
    merged: dict[str, Any] = _copy(values)
    for override in overrides:
        _apply_override(merged, override)
    name = merged.get("algorithm")
    if not isinstance(name, str):
        raise ConfigError(
            f"{origin}: algorithm: expected one of {', '.join(algorithm_names())} or a dotted module name, "
            f"found {'nothing' if name is None else repr(name)}"
        )
    try:
        algorithm = load_algorithm(name)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return checked(_run_config_model(algorithm, section_name(name)), merged, origin)


def checked(model: type[Run], values: Mapping[str, Any], origin: str) -> Run:
    """The configuration of this kind. Raises `ConfigError` as `load_config` does."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = list(dict.fromkeys(_describe(fault, model) for fault in error.errors()))
        raise ConfigError(f"{origin} cannot be run:\n" + "\n".join(f"  - {line}" for line in lines)) from None


def algorithm_config(config: RunConfig) -> AlgorithmConfig:
    """The algorithm's own section."""
    section: AlgorithmConfig = getattr(config, section_name(config.algorithm))
    return section


def config_as_yaml(config: RunConfig) -> str:
    """The effective configuration; loading it again gives an equal one."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text


# -------------------------------------------------------------------------------------------------------- algorithms


def algorithm_names() -> list[str]:
    """The algorithms that come with the package: the files of its folder."""
    folder = Path(__file__).parent / "algorithms"
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))


def section_name(algorithm: str) -> str:
    return algorithm.rpartition(".")[2]


def load_algorithm(name: str) -> type[Algorithm]:
    """The one `Algorithm` subclass of `surefoot.algorithms.<name>`, or of the user's own dotted module.

    Raises:
        ConfigError: no such module, or it defines no or several algorithms.
    """
    module = _import_algorithm_module(name)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ConfigError(f"algorithm: {module.__name__} must define exactly one Algorithm subclass, found {names}")
    config_class = getattr(found[0], "Config", None)
    if not (isinstance(config_class, type) and issubclass(config_class, AlgorithmConfig)):
        raise ConfigError(
            f"algorithm: {found[0].__name__}.Config must be a subclass of surefoot.config.AlgorithmConfig, "
            f"found {config_class!r}"
        )
    return found[0]


def _import_algorithm_module(name: str) -> ModuleType:
    known = algorithm_names()
    if name not in known and not ("." in name and all(part.isidentifier() for part in name.split("."))):
        raise ConfigError(
            f"algorithm: expected {', '.join(known)} or a dotted module name, found {name!r}{_hint(name, known)}"
        )
    module_name = name if "." in name else f"{ALGORITHMS_PACKAGE}.{name}"
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"algorithm: no module {module_name!r} in this folder or on PYTHONPATH") from None
        raise


def _run_config_model(algorithm: type[Algorithm], section: str) -> type[RunConfig]:
    config_class: Any = algorithm.Config
    # A section whose fields all have defaults may be left out of the file.
    needed = any(info.is_required() for info in config_class.model_fields.values())
    default = ... if needed else config_class()
    fields: dict[str, Any] = {section: (config_class, default)}

    def fits(run: RunConfig) -> RunConfig:
        own: AlgorithmConfig = getattr(run, section)
        own.check_run(run)
        if algorithm.rows == "pairs" and run.policy.train_global_batch_size % 2:
            raise ValueError(
                f"policy.train_global_batch_size: found {run.policy.train_global_batch_size} rows; expected an even "
                f"number: {section} trains on pairs, two rows each"
            )
        scope, _, metric = (run.checkpointing.metric_name or "").partition(":")
        known = [
            set_name + name for set_name in ("", *(f"{n}/" for n in run.data.validation)) for name in own.measures()
        ]
        if scope == "val" and known and metric not in known:
            raise ValueError(
                f"checkpointing.metric_name: validation measures no {metric!r}{_hint(metric, known)}; expected one of "
                f"{', '.join(own.measures())}, by itself or behind a set's name and a slash"
            )
        return run

    checks: dict[str, Any] = {"fits": model_validator(mode="after")(fits)}
    base: type[RunConfig] = algorithm.run_config or RunConfig
    return create_model("RunConfig", __base__=base, __validators__=checks, **fields)


# -------------------------------------------------------------------------------------------------------------- YAML


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, which YAML libraries silently resolve to the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *defaults`, resolved by the base class
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"line {key_node.start_mark.line + 1}: keys are names, found {key!r}")
            line = key_node.start_mark.line + 1
            if key in seen:
                raise ConfigError(f"line {line}: key {key!r} is given twice (first in line {seen[key]}); keep one")
            seen[key] = line
        return super().construct_mapping(node, deep=deep)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            line = node.start_mark.line + 1
            raise ConfigError(f"line {line}: expected text, found {value!r}: it holds what no file or path can hold")
        return value


# Nothing here is a date or a number to base 60: 2024-01-31 and 10:00:00:00 are texts, such as a run_dir or a duration.
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _number_to_base_10(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return node.value if ":" in node.value else yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _StrictLoader.add_constructor(_tag, _number_to_base_10)


def _parse_yaml(text: str) -> Any:
    """Raises `ConfigError` with the reason alone."""
    try:
        value = yaml.load(text, _StrictLoader)
        json.dumps(value, default=str)  # refuses a value that holds itself
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except Exception as error:  # a scalar with a tag that does not fit makes the library raise almost anything
        raise ConfigError(f"it is not valid YAML: {error}") from None
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping. Raises `ConfigError` where the file is missing, is not YAML or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [str(other) for other in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise ConfigError(f"there is no configuration file {path}{_hint(str(path), siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    try:
        values = _parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {_kind(values)}")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {override!r}: expected dotted.key=value, such as policy.optimizer.lr=2e-5")
    try:
        value = _parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: the value cannot be read: {error}") from None
    *parents, last = key.split(".")
    for parent in parents:
        nested = values.get(parent)
        if nested is None:
            nested = values[parent] = {}
        if not isinstance(nested, dict):
            hint = f"; give it as a whole: '{parent}=[…]'" if isinstance(nested, list) else ""
            raise ConfigError(f"override {override!r}: {parent} is {_kind(nested)}, it has no keys{hint}")
        values = nested
    values[last] = value


def _copy(values: Any) -> Any:
    return {key: _copy(value) for key, value in values.items()} if isinstance(values, Mapping) else values


# -------------------------------------------------------------------------------------------------- describing faults


def _describe(fault: Any, model: type[BaseModel]) -> str:
    location = [str(part) for part in fault["loc"]]
    path = ".".join(location)
    if fault["type"] == "extra_forbidden":
        return f"{path}: unknown key{_key_hint(location, model)}"
    if fault["type"] == "missing":
        return f"{path}: missing; a value is required"
    message = fault["msg"].removeprefix("Value error, ")
    found = fault["input"]
    if fault["type"] == "model_type":
        message = "expected a section, a mapping of keys to values"
    if isinstance(found, BaseModel | Mapping) and fault["type"] == "value_error":  # a section's own check
        own = message.partition(":")[0] in _fields_at(model, location)
        return f"{path}{'.' if own else ': '}{message}" if path else message
    return f"{path}: {message[0].lower()}{message[1:]}, found {found!r} ({_kind(found)})"


def _key_hint(location: list[str], model: type[BaseModel]) -> str:
    *parents, key = location
    siblings = _fields_at(model, parents)
    for path in _all_paths(model):
        if path.rpartition(".")[2] == key and path != ".".join(location):
            return f"; it belongs at {path}"
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation such as `X`, `X | None` or `dict[str, X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if (section := _section_of(argument)) is not None:
            return section
    return None


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in path:
        if current is not None and part in current.model_fields:
            current = _section_of(current.model_fields[part].annotation)
        # else: a name chosen by the user, such as a validation set's; its section is already `current`
    return list(current.model_fields) if current is not None else []


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        section = _section_of(info.annotation)
        if section is not None:
            yield from _all_paths(section, f"{prefix}{name}.")


def _hint(found: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(found, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "a whole number", float: "a number", dict: "a mapping"}
    if value is None:
        return "nothing"
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else type(value).__name__)


# ------------------------------------------------------------------------------------------------ changes on a resume

# What a resumed run may change: how long it runs, how often it looks, where it reports, where files lie. A training
# file that moved is judged by its content: the dataset's fingerprint must still agree.
MAY_CHANGE = (
    "run_dir",
    "max_num_steps",
    "max_num_epochs",
    "val_period",
    "val_at_start",
    "val_at_end",
    "policy.num_threads",
    "policy.device",
    "data.train.path",
    "data.train.format",
    "data.validation",
    "data.num_workers",
    "evaluation",
    "max_reward_failures",
    "checkpointing",
    "logger",
)


@dataclass(frozen=True)
class ConfigChange:
    """One key whose value differs between two configurations."""

    path: str
    before: Any
    after: Any
    is_place: bool = False

    @property
    def allowed(self) -> bool:
        return self.is_place or self.is_in(MAY_CHANGE)

    def is_in(self, keys: Iterable[str]) -> bool:
        """Whether one of the keys is this one, or a section that it is in."""
        return any(self.path == key or self.path.startswith(f"{key}.") for key in keys)


def config_changes(before: RunConfig, after: RunConfig) -> list[ConfigChange]:
    """Every key whose value differs, in the file's order."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    paths = list(dict.fromkeys([*old, *new]))
    places = {f"{section_name(after.algorithm)}.{key}" for key in algorithm_config(after).places}
    changes = (ConfigChange(path, old.get(path), new.get(path), path in places) for path in paths)
    return [change for change in changes if change.before != change.after]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat
