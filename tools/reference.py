"""Write docs/configuration.md from the sections' own definitions: `python tools/reference.py`."""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from surefoot.config import ModelConfig, RunConfig
from surefoot.config_file import algorithm_names, load_algorithm
from surefoot.rollout.config import RolloutRunConfig

HEADER = """# Configuration

One YAML file per run; `surefoot config show FILE` prints the effective one, `surefoot config check FILE` validates it.
This page is written from the code by `tools/reference.py`.

```console
$ surefoot config show examples/sft.yaml max_num_steps=10
$ surefoot config check examples/sft.yaml
```
"""


def sections(model: type[BaseModel], path: str) -> typing.Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, info in model.model_fields.items():
        for inner in (info.annotation, *typing.get_args(info.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                many = typing.get_origin(info.annotation) is dict
                yield from sections(inner, f"{path}.{name}" + (".<name>" if many else "") if path else name)


def default(info: Any) -> str:
    if info.annotation is ModelConfig:
        return "the policy's"
    if info.default is PydanticUndefined:
        return "required"
    return "see below" if isinstance(info.default, BaseModel) else f"`{json.dumps(info.default)}`"  # as YAML has it


def kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return "section" if issubclass(annotation, BaseModel) else annotation.__name__
    parts = [kind(part) for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is list:
        return f"list of {parts[-1]}"
    if typing.get_origin(annotation) is dict:
        return f"mapping to {parts[-1]}"
    return parts[0] if typing.get_origin(annotation) is typing.Annotated else " or ".join(parts)


def about(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """A section's docstring: its text, and what it and the sections it is made of say of keys under `Attributes:`."""
    keys: dict[str, str] = {}
    for part in reversed(model.__mro__):
        _, _, attributes = (inspect.cleandoc(part.__doc__ or "")).partition("Attributes:\n")
        for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE):
            keys |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    keys = {name: text for name, text in keys.items() if name in model.model_fields}
    return inspect.cleandoc(model.__doc__ or "").partition("Attributes:\n")[0].strip(), keys


def page() -> str:
    found: list[tuple[str, type[BaseModel]]] = []

    def add(run: type[RunConfig], title: str) -> None:
        """What there is in such a run and was in none before."""
        known = {path for path, _ in found}
        found.extend((path or title, model) for path, model in sections(run, "") if path not in known)

    add(RunConfig, "The run")
    add(RolloutRunConfig, "Runs that sample completions")
    for name in algorithm_names():
        algorithm = load_algorithm(name)
        found += sections(algorithm.Config, name)
        if algorithm.run_config not in (None, RolloutRunConfig):
            add(algorithm.run_config, f"Runs of `{name}`")
    text = HEADER
    for path, model in found:
        prose, keys = about(model)
        title = path if issubclass(model, RunConfig) else f"`{path}`"
        inherited = model.__base__.model_fields if issubclass(model, RunConfig) else {}
        text += f"\n## {title}\n\n{prose}\n\n"
        text += "| key | type | default |" + (" about |\n|---|---|---|---|\n" if keys else "\n|---|---|---|\n")
        for name, info in model.model_fields.items():
            if name in inherited:
                continue
            text += f"| `{name}` | {kind(info.annotation)} | {default(info)} |"
            text += f" {keys.get(name, '')} |\n" if keys else "\n"
    return text


def main() -> None:
    (Path(__file__).parent.parent / "docs" / "configuration.md").write_text(page())


if __name__ == "__main__":
    main()
