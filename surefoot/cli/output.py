"""What the commands that measure have in common: options that were given, and where their results go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def given(**options: Any) -> dict[str, Any]:
    """Those that are not `None`."""
    return {name: value for name, value in options.items() if value is not None}


def check_target(out: Path, file: str, overwrite: bool, kinds: Sequence[str] = ()) -> None:
    """Whether `--out` can be written, before there is anything to write.

    Args:
        file: what is read.
        kinds: endings that are known; none: any.

    Raises:
        DataError: it cannot.
    """
    from surefoot.errors import DataError

    if kinds and out.suffix.removeprefix(".") not in kinds:
        raise DataError(f"--out: expected a name that ends in .{' or .'.join(kinds)}, found {out.name}")
    if not out.parent.is_dir():
        raise DataError(f"--out: there is no folder {out.parent.absolute()} to write {out.name} into")
    if out.is_dir() or (Path(file).exists() and out.exists() and out.samefile(file)):
        raise DataError(f"--out: {out} is a folder, or the very file that is read: expected another name")
    if out.exists() and not overwrite:
        raise DataError(f"--out: {out} exists: choose another name, or replace it with --overwrite")


def as_text(summary: dict[str, Any]) -> str:
    """A line for each."""
    from surefoot.report.text import number

    lines, width = [], max(16, *map(len, summary))
    for name, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{n} × {reason}" for reason, n in value.items()) or 0
        lines.append(f"{name:<{width}} {number(value) if isinstance(value, float) else value}")
    return "\n".join(lines)
