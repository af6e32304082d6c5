"""Are two runs the same, bit for bit? Their last checkpoints, tensor by tensor, and every metric of every step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import deserialize

# These say which run it is, and when and where it was written: run id, paths, timings.
_ABOUT_THE_RUN = frozenset({"manifest.json", "config.yaml", "report/metrics.json"})


@dataclass
class Comparison:
    """Attributes:
    differences: each says where and how; empty when the runs are the same.
    num_bytes: of the tensors compared.
    """

    differences: list[str] = field(default_factory=list)
    num_files: int = 0
    num_tensors: int = 0
    num_bytes: int = 0
    num_lines: int = 0

    @property
    def same(self) -> bool:
        return not self.differences


def compare_runs(one: Path, other: Path, step: int) -> Comparison:
    """Compare two run folders: `checkpoints/step_<step>` in each, and `metrics.jsonl` outside the key "timing"."""
    result = Comparison()
    _compare_folders(one / "checkpoints" / f"step_{step}", other / "checkpoints" / f"step_{step}", result)
    _compare_metrics(one / "metrics.jsonl", other / "metrics.jsonl", result)
    return result


def _compare_folders(one: Path, other: Path, result: Comparison) -> None:
    files, others = ({p.relative_to(top).as_posix() for p in top.rglob("*") if p.is_file()} for top in (one, other))
    if missing := sorted(files ^ others):
        result.differences.append(f"only one of {one} and {other} has {', '.join(missing)}")
    for name in sorted((files & others) - _ABOUT_THE_RUN):
        result.num_files += 1
        a, b = (one / name).read_bytes(), (other / name).read_bytes()
        found: list[str] = []
        if name.endswith(".safetensors"):
            found += _tensor_differences(_tensors(a), _tensors(b), result)
        elif name.endswith(".json") and a != b:
            found += _value_differences(json.loads(a), json.loads(b))
        if a != b and not found:
            found = [f"byte {_first_difference(a, b)}"]
        result.differences += [f"{name}: {difference}" for difference in found]


def _tensors(data: bytes) -> dict[str, Any]:
    """Name -> {dtype, shape, data}, as the safetensors library reads them."""
    return dict(deserialize(data))  # type: ignore[no-untyped-call]


def _tensor_differences(one: dict[str, Any], other: dict[str, Any], result: Comparison) -> Iterator[str]:
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"only one of them has the tensor {name}"
            continue
        a, b = one[name], other[name]
        result.num_tensors += 1
        result.num_bytes += len(a["data"])
        if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
            yield f"{name} is {a['dtype']} {a['shape']} and {b['dtype']} {b['shape']}"
        elif a["data"] != b["data"]:
            yield f"{name} {a['shape']}: its bytes differ from byte {_first_difference(a['data'], b['data'])} on"


def _compare_metrics(one: Path, other: Path, result: Comparison) -> None:
    lines, others = (path.read_text(encoding="utf-8").splitlines() for path in (one, other))
    if len(lines) != len(others):
        result.differences.append(f"metrics.jsonl has {len(lines)} lines in {one} and {len(others)} in {other}")
    for number, pair in enumerate(zip(lines, others, strict=False), start=1):
        a, b = (json.loads(line) for line in pair)
        a.pop("timing", None), b.pop("timing", None)
        result.num_lines += 1
        result.differences += [f"metrics.jsonl line {number}: {found}" for found in _value_differences(a, b)]


def _value_differences(one: Any, other: Any) -> Iterator[str]:
    """As text, where every number has one form: -0.0 is not 0.0."""
    if json.dumps(one) == json.dumps(other):
        return
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        yield f"{one} and {other}"
        return
    for key, value in one.items():
        if json.dumps(value) != json.dumps(other[key]):
            yield f"{key} is {value} and {other[key]}"


def _first_difference(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
