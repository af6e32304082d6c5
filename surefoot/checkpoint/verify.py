"""Prove one checkpoint: every byte of every file against the manifest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from surefoot.checkpoint.manifest import MANIFEST_FILE, read_manifest, structure_problems
from surefoot.checkpoint.reader import LocalReader, read_checked
from surefoot.errors import CorruptCheckpoint


@dataclass(frozen=True)
class Verification:
    """Attributes:
    problems: everything that does not agree, in words; empty for a sound checkpoint.
    notes: what is there without being part of the checkpoint; no fault.
    """

    path: Path
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    num_files: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not self.problems


def verify_checkpoint(checkpoint: Path) -> Verification:
    """Check the manifest's own checksum and every hash of every file. Never raises for damage: it is the answer."""
    started = time.perf_counter()
    try:
        manifest = read_manifest(checkpoint)
    except CorruptCheckpoint as error:
        return Verification(checkpoint, (str(error),))
    problems = structure_problems(checkpoint, manifest)
    broken = {problem.split(": ")[0] for problem in problems}
    for entry in manifest.files:
        if entry.path in broken:
            continue
        try:
            read_checked(checkpoint / entry.path, entry)
        except CorruptCheckpoint as error:
            problems.append(str(error))
    known = {MANIFEST_FILE, *(entry.path for entry in manifest.files)}
    there = (path for path in sorted(checkpoint.rglob("*")) if path.is_symlink() or not path.is_dir())
    strangers = [path.relative_to(checkpoint).as_posix() for path in there]
    notes = tuple(f"{name}: not part of the checkpoint" for name in strangers if name not in known)
    seconds = time.perf_counter() - started
    return Verification(checkpoint, tuple(problems), notes, len(manifest.files), manifest.num_bytes, seconds)


def open_verified(checkpoint: Path) -> LocalReader:
    """A reader of a checkpoint whose every hash has been checked.

    Raises:
        CorruptCheckpoint: names what does not agree.
    """
    result = verify_checkpoint(checkpoint)
    if not result.sound:
        raise CorruptCheckpoint(f"{checkpoint} is not a sound checkpoint: {'; '.join(result.problems[:5])}")
    reader = LocalReader.open(checkpoint)
    reader.mark_checked()
    return reader
