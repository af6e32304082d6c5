"""Look into a checkpoint, and compare two, without loading a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.checkpoint.directory import TRAINING_INFO_FILE
from surefoot.checkpoint.manifest import FileEntry, Manifest
from surefoot.checkpoint.reader import LocalReader


@dataclass(frozen=True)
class Description:
    """Attributes:
    parts: for each top-level folder or file, its number of files and of bytes.
    """

    path: Path
    manifest: Manifest
    training_info: dict[str, Any]
    parts: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Difference:
    """Attributes:
    what: a file, or "fingerprint <name>".
    detail: in words; for tensors how many differ and by how much.
    """

    what: str
    kind: Literal["only in the first", "only in the second", "differs"]
    detail: str = ""


def describe(checkpoint: Path) -> Description:
    """Raises `CorruptCheckpoint` for what is not a checkpoint. Contents are not read, but for the training info."""
    reader = LocalReader.open(checkpoint)
    parts: dict[str, tuple[int, int]] = {}
    for entry in reader.manifest.files:
        top = entry.path.split("/")[0]
        files, size = parts.get(top, (0, 0))
        parts[top] = (files + 1, size + entry.size)
    info = reader.json(TRAINING_INFO_FILE) if TRAINING_INFO_FILE in parts else {}
    return Description(checkpoint, reader.manifest, info, parts)


def diff(first: Path, second: Path) -> list[Difference]:
    """What differs between two checkpoints: by the manifests' hashes first, and then inside the files that differ.

    Raises:
        CorruptCheckpoint: one of them is damaged where it was read.
    """
    a, b = LocalReader.open(first), LocalReader.open(second)
    found = _fingerprints(a.manifest, b.manifest)
    files_a = {entry.path: entry for entry in a.manifest.files}
    files_b = {entry.path: entry for entry in b.manifest.files}
    for path in sorted({*files_a, *files_b}):
        if path not in files_b:
            found.append(Difference(path, "only in the first"))
        elif path not in files_a:
            found.append(Difference(path, "only in the second"))
        elif files_a[path] != files_b[path]:
            found.append(Difference(path, "differs", _inside(a, b, files_a[path], files_b[path])))
    return found


def _fingerprints(a: Manifest, b: Manifest) -> list[Difference]:
    """Hashes decide; the descriptions, which may name the same thing in other words, only explain."""
    one, other = a.fingerprints, b.fingerprints
    found = _mappings("fingerprint ", {n: f.hash for n, f in one.items()}, {n: f.hash for n, f in other.items()})
    words = {f"fingerprint {n}": f"{one[n].description} and {other[n].description}" for n in one if n in other}
    return [Difference(d.what, d.kind, words.get(d.what, d.detail)) for d in found]


def _mappings(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    found = [Difference(prefix + key, "only in the first", str(a[key])) for key in a if key not in b]
    found += [Difference(prefix + key, "only in the second", str(b[key])) for key in b if key not in a]
    same = [key for key in a if key in b and a[key] != b[key]]
    return found + [Difference(prefix + key, "differs", f"{a[key]} and {b[key]}") for key in same]


def _inside(a: LocalReader, b: LocalReader, entry_a: FileEntry, entry_b: FileEntry) -> str:
    path = entry_a.path
    if path.endswith(".safetensors"):
        return _tensors(a.tensors(path), b.tensors(path))
    if path.endswith(".json"):
        one, other = a.json(path), b.json(path)
        if isinstance(one, dict) and isinstance(other, dict):
            return "; ".join(
                f"{d.what}: {d.detail} {'' if d.kind == 'differs' else d.kind}".strip()
                for d in _mappings("", one, other)
            )
    return f"{entry_a.size} and {entry_b.size} bytes"


def _tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    missing = sorted(set(a) ^ set(b))
    reshaped = [n for n in a if n in b and (a[n].shape != b[n].shape or a[n].dtype != b[n].dtype)]
    gaps = {n: _largest_gap(a[n], b[n]) for n in a if n in b and n not in reshaped and not torch.equal(a[n], b[n])}
    words = [f"{len(gaps)} of {len(a)} tensors differ"]
    if gaps:
        worst = max(gaps, key=lambda name: gaps[name])
        words.append(f"most {worst}, by {gaps[worst]:.3g}")
    if reshaped:
        words.append(f"other shape or dtype: {', '.join(reshaped[:5])}")
    if missing:
        words.append(f"only in one: {', '.join(missing[:5])}")
    return "; ".join(words)


def _largest_gap(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max())
