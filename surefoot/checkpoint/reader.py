"""A checkpoint being read from a local directory: hashes are checked as files are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from surefoot.checkpoint import safetensors_format, storage
from surefoot.checkpoint.manifest import FileEntry, Manifest, check_path, read_manifest, structure_problems
from surefoot.checkpoint.sink import CHUNK_BYTES
from surefoot.errors import CheckpointError, CorruptCheckpoint

if TYPE_CHECKING:
    from torch import Tensor


def read_checked(path: Path, entry: FileEntry, into: memoryview | None = None) -> None:
    """Read a file, check every extent's hash, and keep the bytes if `into` (of the file's size) is given.

    Raises:
        CorruptCheckpoint: missing, unreadable, of another size, or a hash does not match.
    """
    try:
        descriptor = storage.open_for_reading(path)
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    scratch = memoryview(bytearray(CHUNK_BYTES if into is None else 0))
    try:
        for extent in entry.extents:
            hasher, done = xxhash.xxh3_128(), 0
            while done < extent.length:
                length = min(CHUNK_BYTES, extent.length - done)
                start = extent.offset + done
                target = scratch[:length] if into is None else into[start : start + length]
                count = os.readv(descriptor, [target])
                if not count:
                    raise CorruptCheckpoint(f"{path} ends at byte {start}; the manifest says {entry.size} bytes")
                hasher.update(target[:count])
                done += count
            if hasher.hexdigest() != extent.hash:
                raise CorruptCheckpoint(
                    f"{path} is damaged between bytes {extent.offset} and {extent.offset + extent.length}: "
                    f"its hash is {hasher.hexdigest()}, the manifest says {extent.hash}"
                )
        if os.fstat(descriptor).st_size != entry.size:
            raise CorruptCheckpoint(f"{path} is longer than the {entry.size} bytes that the manifest says")
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


class LocalReader:
    """Implements `types.Reader`.

    Attributes:
        root: the checkpoint's directory.
        manifest: its manifest, own checksum checked.
    """

    def __init__(self, root: Path, manifest: Manifest, folder: str = "", checked: set[str] | None = None) -> None:
        self.root = root
        self.manifest = manifest
        self._folder = folder
        self._checked: set[str] = (
            set() if checked is None else checked
        )  # files whose hashes `local` need not check again

    @classmethod
    def open(cls, checkpoint: Path) -> LocalReader:
        """Raises `CorruptCheckpoint` when the manifest is missing or damaged, or the files' sizes do not agree."""
        manifest = read_manifest(checkpoint)
        problems = structure_problems(checkpoint, manifest)
        if problems:
            raise CorruptCheckpoint(f"{checkpoint} does not agree with its manifest: {'; '.join(problems[:5])}")
        return cls(checkpoint, manifest)

    def mark_checked(self) -> None:
        """All hashes were checked a moment ago. What is read through this reader is checked again as it is read."""
        self._checked.update(entry.path for entry in self.manifest.files)

    def under(self, folder: str) -> LocalReader:
        return LocalReader(self.root, self.manifest, self._full(folder), self._checked)

    def files(self) -> tuple[str, ...]:
        prefix = f"{self._folder}/" if self._folder else ""
        return tuple(sorted(e.path[len(prefix) :] for e in self.manifest.files if e.path.startswith(prefix)))

    def json(self, path: str) -> Any:
        return json.loads(self.bytes(path))

    def bytes(self, path: str) -> bytes:
        return bytes(self._read(path))

    def tensors(self, path: str) -> dict[str, Tensor]:
        """All tensors of a safetensors file. They share one buffer, which nothing else refers to."""
        data = self._read(path)
        try:
            spans, start = safetensors_format.decode_header(data.data, len(data))
        except ValueError as error:
            raise CorruptCheckpoint(f"{self.root / self._full(path)}: {error}") from error
        return {name: _as_tensor(data[start + s.start : start + s.end], s) for name, s in spans.items()}

    def local(self, path: str = "") -> Path:
        full = self._full(path) if path else self._folder
        target = self.root / full
        entries = [e for e in self.manifest.files if not full or e.path == full or e.path.startswith(f"{full}/")]
        if not entries:
            raise CheckpointError(f"checkpoint {self.root} has no {full!r}; it has {self._top_names()}")
        self._refuse_strangers(target)
        for entry in entries:
            if entry.path not in self._checked:
                read_checked(self.root / entry.path, entry)
                self._checked.add(entry.path)
        return target

    def _read(self, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        full = self._full(path)
        entry = self.manifest.entry(full)
        if entry is None:
            raise CheckpointError(f"checkpoint {self.root} has no file {full!r}; it has {self._top_names()}")
        data = np.empty(entry.size, np.uint8)
        read_checked(self.root / full, entry, data.data)
        return data

    def _refuse_strangers(self, target: Path) -> None:
        """Whoever is handed a folder reads what is in it, so there must be nothing but what was saved."""
        known = {self.root / entry.path for entry in self.manifest.files}
        for path in _walk(target):
            if path.is_symlink() or (not path.is_dir() and path not in known and path.parent != self.root):
                raise CorruptCheckpoint(f"{path} is not in the manifest of {self.root}: remove it to load the folder")

    def _full(self, path: str) -> str:
        check_path(path)
        return f"{self._folder}/{path}" if self._folder else path

    def _top_names(self) -> str:
        return ", ".join(sorted({entry.path.split("/")[0] for entry in self.manifest.files})) or "no files"


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")


def _as_tensor(data: np.ndarray[Any, np.dtype[np.uint8]], span: safetensors_format.TensorSpan) -> Tensor:
    if not data.size:
        return torch.empty(span.shape, dtype=span.dtype)
    aligned = data if data.ctypes.data % span.dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(span.dtype).reshape(span.shape)
