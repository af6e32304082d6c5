"""Which checkpoint a resumed run goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.checkpoint.directory import STATUS_FILE, CheckpointInfo, last_saved
from surefoot.checkpoint.lineage import Attempt
from surefoot.checkpoint.reader import LocalReader
from surefoot.checkpoint.verify import open_verified
from surefoot.errors import CheckpointError, CorruptCheckpoint


@dataclass(frozen=True)
class ResumePoint:
    """Attributes:
    reader: of a checkpoint whose hashes have all been checked; `None`: start from step 0.
    skipped: newer checkpoints that cannot be used, each with the reason; to be shown loudly.
    notes: what else the user must be told.
    """

    reader: LocalReader | None
    skipped: tuple[tuple[Path, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> Path | None:
        return self.reader.root if self.reader else None

    @property
    def step(self) -> int:
        return self.reader.manifest.step if self.reader else 0


def newest_sound(directory: Path, found: Sequence[CheckpointInfo], attempt: Attempt) -> ResumePoint:
    """The newest checkpoint of the line whose every hash agrees; the line's origins outside the directory count too.

    Raises:
        CorruptCheckpoint: there are checkpoints, and not one of them is sound.
    """
    skipped: list[tuple[Path, str]] = []
    for path, checksum, reason in _by_age(found, attempt, _gone(directory, found)):
        try:
            if reason:
                raise CorruptCheckpoint(reason)
            reader = open_verified(path)
            if checksum is not None and reader.manifest.checksum != checksum:
                raise CorruptCheckpoint(f"{path} is not the checkpoint that this run went on from before")
        except CheckpointError as error:
            skipped.append((path, str(error)))
            continue
        return ResumePoint(reader, tuple(skipped))
    if skipped:
        reasons = "\n  ".join(f"{path}: {reason}" for path, reason in skipped)
        raise CorruptCheckpoint(f"no checkpoint in {directory} can be resumed from:\n  {reasons}")
    return ResumePoint(None)


def _gone(directory: Path, found: Sequence[CheckpointInfo]) -> list[tuple[int, Path]]:
    step = last_saved(directory)
    if step is None or any(info.step == step for info in found):
        return []
    return [(step, directory / f"step_{step}")]


def _by_age(
    found: Sequence[CheckpointInfo], attempt: Attempt, gone: Sequence[tuple[int, Path]]
) -> Iterator[tuple[Path, str | None, str]]:
    """Path, expected manifest checksum if one is on record, and what is known to be wrong; newest step first."""
    candidates: list[tuple[int, int, Path, str | None, str]] = [
        (info.step, 1, info.path, None, info.reason) for info in found if info.state != "left_behind"
    ]
    lost = f"{STATUS_FILE} says that it was saved, and it is not there any more"
    candidates += [(step, 1, path, None, lost) for step, path in gone]
    candidates += [
        (entry.from_step, 0, Path(entry.origin), entry.checksum, "") for entry in attempt.lineage if entry.origin
    ]
    for _, _, path, checksum, reason in sorted(candidates, key=lambda c: (c[0], c[1]), reverse=True):
        yield path, checksum, reason


def next_attempt(directory: Path, current: Attempt | None, point: ResumePoint, highest: int) -> Attempt:
    """The attempt that goes on from `point`.

    Args:
        current: the directory's attempt on record, if any.
        highest: the highest attempt number in use.
    """
    if point.reader is None:
        return Attempt.first(current.run_id if current else "", highest + 1)
    manifest, root = point.reader.manifest, point.reader.root
    number = max(highest, *(entry.attempt for entry in manifest.lineage)) + 1
    origin = None if root.parent == directory else str(root.absolute())
    if current is not None and manifest.run_id != current.run_id:  # its attempt numbers mean nothing here
        fresh = Attempt(current.run_id, ())
        return fresh.resumed(manifest.step, origin, manifest.checksum, number)
    return manifest.attempt.resumed(manifest.step, origin, manifest.checksum, number)
