"""Are two runs the same, bit for bit? Every file of their last checkpoints, and every metric of every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

# These say which run it is, and when and where it was written: run id, paths, timings.
_ABOUT_THE_RUN = frozenset({"manifest.json", "config.yaml", "report/metrics.json"})


class Comparison(NamedTuple):
    """`differences`: files and lines that differ, or that only one run has. `num_bytes`: of the first run's files."""

    differences: list[str]
    num_files: int
    num_bytes: int
    num_lines: int


def compare_runs(one: Path, other: Path, step: int) -> Comparison:
    """Compare two run folders: `checkpoints/step_<step>` in each, and `metrics.jsonl` outside the key "timing"."""
    files, lines = _files(one, step), _lines(one)
    a, b = {**files, **lines}, {**_files(other, step), **_lines(other)}
    differences = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return Comparison(differences, len(files), sum(map(len, files.values())), len(lines))


def _files(run: Path, step: int) -> dict[str, bytes]:
    checkpoint = run / "checkpoints" / f"step_{step}"
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    return {name: files[name].read_bytes() for name in sorted(files.keys() - _ABOUT_THE_RUN)}


def _lines(run: Path) -> dict[str, bytes]:
    """Each line without its timing, as JSON again, where every number has one form: -0.0 is not 0.0."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plain = [{key: value for key, value in record.items() if key != "timing"} for record in records]
    return {f"metrics.jsonl line {n}": json.dumps(record).encode() for n, record in enumerate(plain, start=1)}
