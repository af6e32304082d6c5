"""Which checkpoints belong to the run that is going on, and which were left behind on a branch.

Each resume starts a new *attempt*. An attempt knows the attempts that it descends from and the step at which each
began. A checkpoint written by attempt `a` at step `s` belongs to the current line if `a` is one of them and `s` is not
past the step at which the next one took over.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.checkpoint import storage
from surefoot.checkpoint.sealed import seal, unseal

ATTEMPT_FILE = "attempt.json"
_KINDS = (int, int, str | None, str | None, str)  # of a `LineageEntry`; one from before there were keys has four


class LineageEntry(NamedTuple):
    """One attempt of the line.

    Attributes:
        attempt: its number, from 1.
        from_step: the step it went on from; 0 for a fresh start.
        origin: the checkpoint it went on from, if that lies outside the directory; else `None`.
        checksum: the origin's manifest checksum, wherever it lies; `None` for a fresh start.
        key: random. Two copies of a run that are both resumed count alike, and are not one attempt.
    """

    attempt: int
    from_step: int
    origin: str | None
    checksum: str | None
    key: str = ""


@dataclass(frozen=True)
class Attempt:
    """The attempt that is going on and the line it descends from; the last entry is the attempt itself.

    >>> first = Attempt.first("run")
    >>> line, copy = (first.resumed(10, None, "abc", number=2) for _ in range(2))
    >>> line.owns(first, 10), line.owns(first, 12), line.owns(line, 12), line.owns(copy, 12)
    (True, False, True, False)
    """

    run_id: str
    lineage: tuple[LineageEntry, ...]

    @classmethod
    def first(cls, run_id: str = "", number: int = 1) -> Attempt:
        return cls(run_id or uuid.uuid4().hex, (LineageEntry(number, 0, None, None, uuid.uuid4().hex),))

    @property
    def number(self) -> int:
        return self.lineage[-1].attempt

    def resumed(self, from_step: int, origin: str | None, checksum: str, number: int) -> Attempt:
        """The attempt that goes on from a checkpoint of this line."""
        entry = LineageEntry(number, from_step, origin, checksum, uuid.uuid4().hex)
        return Attempt(self.run_id, (*self.lineage, entry))

    def owns(self, writer: Attempt, step: int) -> bool:
        """Whether what `writer` saved at this step belongs to the line."""
        for entry, successor in zip(self.lineage, (*self.lineage[1:], None), strict=True):
            if entry == writer.lineage[-1] and writer.run_id == self.run_id:
                return successor is None or step <= successor.from_step
        return False


def lineage_to_json(lineage: Sequence[LineageEntry]) -> list[list[Any]]:
    return [list(entry) for entry in lineage]


def lineage_from_json(value: Any) -> tuple[LineageEntry, ...]:
    """Raises `ValueError` for anything that `lineage_to_json` does not write."""
    if not isinstance(value, list) or not value:
        raise ValueError("the lineage is not a list of attempts")
    entries = []
    for item in value:
        if not isinstance(item, list) or len(item) not in (4, 5) or not all(map(isinstance, item, _KINDS)):
            raise ValueError(f"the lineage has an entry of another form: {item!r}")
        entries.append(LineageEntry(*item))
    return tuple(entries)


def write_attempt(directory: Path, attempt: Attempt) -> None:
    body = {
        "run_id": attempt.run_id,
        "attempt": attempt.number,
        "lineage": lineage_to_json(attempt.lineage),
    }
    storage.write_small_file(directory / ATTEMPT_FILE, seal(body))


def read_attempt(directory: Path) -> Attempt | None:
    """The attempt on record; `None` where there is no record.

    Raises:
        ValueError: the file is broken.
    """
    path = directory / ATTEMPT_FILE
    if not path.exists():
        return None
    body = unseal(path.read_bytes())
    lineage = lineage_from_json(body.get("lineage"))
    if not isinstance(body.get("run_id"), str) or body.get("attempt") != lineage[-1].attempt:
        raise ValueError("it does not describe an attempt")
    return Attempt(body["run_id"], lineage)


def find_attempt(directory: Path, written: Sequence[Attempt]) -> tuple[Attempt, tuple[str, ...]]:
    """The attempt that is going on, and what there is to say about how it was found.

    The record decides. Where it is missing, broken, or older than what was written since, the highest attempt that
    wrote a checkpoint does. An empty directory begins a new line.

    Args:
        written: the attempts that wrote the checkpoints in the directory.
    """
    newest = max(written, key=lambda attempt: attempt.number, default=None)
    try:
        recorded = read_attempt(directory)
        problem = "is missing"
    except (ValueError, OSError) as error:
        recorded, problem = None, f"is broken ({error})"
    if recorded is not None:
        rival = [attempt for attempt in written if attempt.run_id == recorded.run_id]
        if all(attempt.number <= recorded.number for attempt in rival):
            return recorded, ()
        problem = "is older than the checkpoints beside it"
        newest = max(rival, key=lambda attempt: attempt.number)
    if newest is None:
        return Attempt.first(), () if problem == "is missing" else (f"{directory / ATTEMPT_FILE} {problem}",)
    note = f"{directory / ATTEMPT_FILE} {problem}; going by the checkpoints, attempt {newest.number} was the last"
    return newest, (note,)
