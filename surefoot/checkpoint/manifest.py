"""The manifest: what a checkpoint consists of. A directory is a checkpoint if it has one and agrees with it, else not.

It is written last, lists every file with its size and the hashes of its extents, and carries its own checksum. Extents
rather than whole files, because several ranks may one day each write a range of one file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from surefoot.checkpoint import storage
from surefoot.checkpoint.lineage import Attempt, LineageEntry, lineage_from_json, lineage_to_json
from surefoot.checkpoint.sealed import seal, unseal
from surefoot.errors import CheckpointError, CorruptCheckpoint, ResumeRefused

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1
EXTENT_BYTES = 16 << 20  # the longest stretch of a file under one hash

_HASH = re.compile(r"[0-9a-f]{32}")  # xxh3-128


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What something was when a checkpoint was written: a hash to compare, and words to name it in a message."""

    hash: str
    description: str


class Extent(NamedTuple):
    offset: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    path: str
    size: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    run_id, lineage: which run and which attempt wrote it (the last entry), and what that attempt went on from.
    fingerprints: of the model, tokenizer, chat template, dataset, algorithm and parallel layout, and of what judges.
    created: UTC, ISO 8601.
    checksum: of the manifest itself; empty until it is read back or written.
    """

    step: int
    run_id: str
    lineage: tuple[LineageEntry, ...]
    files: tuple[FileEntry, ...]
    fingerprints: Mapping[str, Fingerprint]
    created: str
    checksum: str = ""

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.run_id, self.lineage)

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    def entry(self, path: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.path == path), None)


def check_path(path: str) -> str:
    """The path, if it stays inside the checkpoint.

    Raises:
        CheckpointError: it is absolute, empty, not in its simplest form, or leads out by `..`.
    """
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\0" in path or path == ".":
        raise CheckpointError(f"{path!r} is not a plain relative path inside a checkpoint")
    return path


def encode_manifest(manifest: Manifest) -> bytes:
    return seal(
        {
            "schema_version": SCHEMA_VERSION,
            "step": manifest.step,
            "run_id": manifest.run_id,
            "attempt": manifest.attempt.number,
            "lineage": lineage_to_json(manifest.lineage),
            "created": manifest.created,
            "fingerprints": {
                name: {"hash": print_.hash, "description": print_.description}
                for name, print_ in manifest.fingerprints.items()
            },
            "files": [
                {"path": entry.path, "size": entry.size, "extents": [list(extent) for extent in entry.extents]}
                for entry in sorted(manifest.files, key=lambda entry: entry.path)
            ],
        }
    )


def decode_manifest(data: bytes) -> Manifest:
    """Raises `ValueError` with the reason in words."""
    body = unseal(data)
    version = body.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"its schema version is {version!r}; this Surefoot reads version {SCHEMA_VERSION}")
    try:
        prints = {name: Fingerprint(str(v["hash"]), str(v["description"])) for name, v in body["fingerprints"].items()}
        files = tuple(_decode_file(entry) for entry in body["files"])
        lineage = lineage_from_json(body["lineage"])
        step, run_id, created = body["step"], body["run_id"], body["created"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a manifest: {error!r}") from error
    if not isinstance(step, int) or not isinstance(run_id, str) or not isinstance(created, str):
        raise ValueError("it is not a manifest: step, run_id or created has another type")
    if len({entry.path for entry in files}) != len(files) or any(entry.path == MANIFEST_FILE for entry in files):
        raise ValueError("it lists one path twice, or itself")
    return Manifest(step, run_id, lineage, files, prints, created, body["checksum"])


def _decode_file(value: Any) -> FileEntry:
    path, size = value["path"], value["size"]
    try:
        check_path(path)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    extents = tuple(Extent(*extent) for extent in value["extents"])
    end = 0
    for extent in extents:
        if extent.offset != end or not 0 < extent.length <= EXTENT_BYTES or not _HASH.fullmatch(extent.hash):
            raise ValueError(f"its extents of {path} have gaps, overlap, or are malformed")
        end += extent.length
    if end != size:
        raise ValueError(f"its extents of {path} cover {end} bytes of {size}")
    return FileEntry(path, size, extents)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint directory, its own checksum checked.

    Raises:
        CorruptCheckpoint: there is none, or it is damaged, or another schema version wrote it.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        descriptor = storage.open_for_reading(path)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read()
        return decode_manifest(data)
    except FileNotFoundError:
        if not os.path.lexists(checkpoint):
            raise CorruptCheckpoint(f"there is no checkpoint {checkpoint}, or no longer") from None
        inside = checkpoint / "checkpoints"
        hint = f"; those of a run are in {inside}, as step_N" if inside.is_dir() else ""
        raise CorruptCheckpoint(f"{checkpoint} has no {MANIFEST_FILE}: it is not a complete checkpoint{hint}") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is damaged: {error}") from error


def structure_problems(checkpoint: Path, manifest: Manifest) -> list[str]:
    """What can be seen without reading contents: a file missing, of another size, or no regular file. Links count as
    damage wherever they stand on the way to a file."""
    problems = []
    folders: set[PurePosixPath] = set()
    for entry in manifest.files:
        folders.update(PurePosixPath(entry.path).parents)
        try:
            status = os.lstat(checkpoint / entry.path)
        except OSError as error:
            problems.append(f"{entry.path}: {error.strerror or error}")
            continue
        if not stat.S_ISREG(status.st_mode):
            problems.append(f"{entry.path}: not a regular file")
        elif status.st_size != entry.size:
            problems.append(f"{entry.path}: {status.st_size} bytes, the manifest says {entry.size}")
    for folder in sorted(folders):
        if os.path.islink(checkpoint / folder):  # noqa: PTH114 - never raises, however long the name
            problems.append(f"{folder}: a link, not a folder")
    return problems


def check_fingerprints(
    manifest: Manifest, expected: Mapping[str, Fingerprint], allow: frozenset[str] | set[str] = frozenset()
) -> None:
    """Compare what wrote a checkpoint with what is to go on from it. The parallel layout may differ, and what judges.

    Raises:
        ResumeRefused: something differs that `allow` does not name; the message names both.
    """
    refused = {}
    for name in sorted({*manifest.fingerprints, *expected} - {"layout", "judges"} - set(allow)):
        before, now = manifest.fingerprints.get(name), expected.get(name)
        if before is None or now is None or before.hash != now.hash:
            was = before.description if before else "not recorded"
            given = now.description if now else "none"
            refused[name] = f"{name.replace('_', ' ')}: the checkpoint was written with {was}; this run has {given}"
    if refused:
        raise ResumeRefused(
            f"step {manifest.step} cannot be resumed with something else than wrote it.\n  "
            + "\n  ".join(refused.values())
            + "\nGo on with what the checkpoint was written with, start a new run, or allow the change by name: "
            + " ".join(f"--allow {name}" for name in refused)
        )
