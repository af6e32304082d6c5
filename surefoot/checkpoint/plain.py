"""Whatever a caller hands over as information, in the types that JSON and YAML have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel


def as_yaml(run_config: Mapping[str, Any] | BaseModel | str) -> str:
    if isinstance(run_config, str):
        return run_config
    plain = run_config.model_dump(mode="json") if isinstance(run_config, BaseModel) else plain_json(dict(run_config))
    text: str = yaml.safe_dump(plain, sort_keys=False)
    return text


def plain_json(value: Any) -> Any:
    """JSON's own types: tensors, arrays and numpy scalars become numbers or lists of them, paths become text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
