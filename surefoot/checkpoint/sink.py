"""A checkpoint being written to a local directory: everything is hashed from memory on its way to the disk."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import xxhash

from surefoot.checkpoint import safetensors_format, storage
from surefoot.checkpoint.manifest import EXTENT_BYTES, MANIFEST_FILE, Extent, FileEntry, check_path
from surefoot.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# Small enough to stay in a core's cache between check, hash and write; big enough that the calls cost nothing.
CHUNK_BYTES = 1 << 20


class HashingFile(io.RawIOBase):
    """A new file that hashes what is written to it, extent by extent. `finish` syncs and closes it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._descriptor = storage.create_file(path)
        self._open = True
        self._hasher = xxhash.xxh3_128()
        self._extents: list[Extent] = []
        self._size = self._extent_start = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self._open:
            raise ValueError(f"{self._path} is closed")
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            rest = view[start : start + CHUNK_BYTES]
            while rest:
                part = rest[: self._extent_start + EXTENT_BYTES - self._size]
                self._hasher.update(part)
                storage.write_all(self._descriptor, part, self._path)
                self._size += len(part)
                if self._size - self._extent_start == EXTENT_BYTES:
                    self._end_extent()
                rest = rest[len(part) :]
        return len(view)

    def _end_extent(self) -> None:
        length = self._size - self._extent_start
        if length:
            self._extents.append(Extent(self._extent_start, length, self._hasher.hexdigest()))
            self._extent_start = self._size
            self._hasher.reset()

    def finish(self, name: str) -> FileEntry:
        """Sync, close, and return the manifest's entry under this name."""
        self._end_extent()
        storage.fsync(self._descriptor, self._path)
        self._open = False
        storage.close(self._descriptor, self._path)
        return FileEntry(name, self._size, tuple(self._extents))

    def abandon(self) -> None:
        """Close after a failure, which is the error to see."""
        if self._open:
            self._open = False
            os.close(self._descriptor)


def hash_file(path: Path, name: str, sync: bool) -> FileEntry:
    """Hash a regular file that is there already; `sync` also makes it survive a power cut."""
    descriptor = storage.open_for_reading(path)
    try:
        extents, size = [], 0
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while True:
            hasher, start = xxhash.xxh3_128(), size
            while size - start < EXTENT_BYTES and (count := os.readv(descriptor, [buffer])):
                hasher.update(buffer[:count])
                size += count
            if size == start:
                break
            extents.append(Extent(start, size - start, hasher.hexdigest()))
        if sync:
            storage.fsync(descriptor, path)
    finally:
        os.close(descriptor)
    return FileEntry(name, size, tuple(extents))


class LocalSink:
    """Implements `types.Sink` on a directory that exists. Files are readable as soon as they are written, but nothing
    counts before the manifest is there and the directory is committed.

    Attributes:
        entries: what passed through this sink and all sinks `under` it, by path from the checkpoint's top.
    """

    def __init__(self, root: Path, folder: str = "", entries: dict[str, FileEntry] | None = None) -> None:
        self.root = root
        self.folder = folder
        self.entries: dict[str, FileEntry] = {} if entries is None else entries

    def under(self, folder: str) -> LocalSink:
        return LocalSink(self.root, self._full(folder), self.entries)

    def json(self, path: str, value: Any) -> None:
        self.bytes(path, (json.dumps(value, indent=1) + "\n").encode())

    def bytes(self, path: str, data: bytes) -> None:
        with self._file(path) as file:
            file.write(data)

    def tensors(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        with self._file(path) as file:
            file.write(safetensors_format.encode_header(tensors, metadata or {}))
            for name in safetensors_format.layout(tensors):
                data = safetensors_format.tensor_bytes(tensors[name])
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    safetensors_format.refuse_non_finite(chunk, start, name, tensors[name])
                    file.write(chunk)

    @contextmanager
    def stream(self, path: str) -> Iterator[BinaryIO]:
        with self._file(path) as file:
            buffered = io.BufferedWriter(file, CHUNK_BYTES)
            try:
                yield cast(BinaryIO, buffered)
                buffered.flush()
            except BaseException:
                file.abandon()  # what is still buffered has nowhere to go
                raise
            finally:
                with suppress(OSError, ValueError):
                    buffered.detach()

    def local(self, path: str) -> Path:
        target = self.root / self._full(path)
        self._make_parents(target)
        return target

    def adopt(self, path: str) -> None:
        full = self._full(path)
        self._refuse_twice(full)
        self._record(hash_file(self.root / full, full, sync=True))

    def adopt_rest(self) -> None:
        """Take in every file in the directory that did not pass through a sink.

        Raises:
            CheckpointError: there is a link, or something else that is neither a file nor a folder.
        """
        for path in sorted(self.root.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise CheckpointError(f"{path} is neither a file nor a folder; a checkpoint holds nothing else")
            if path.is_file() and name not in self.entries and name != MANIFEST_FILE:
                LocalSink(self.root, "", self.entries).adopt(name)

    def sync_directories(self) -> None:
        """Make the names of all files survive a power cut, innermost folders first."""
        for folder in sorted((path for path in self.root.rglob("*") if path.is_dir()), reverse=True):
            storage.sync_directory(folder)
        storage.sync_directory(self.root)

    @contextmanager
    def _file(self, path: str) -> Iterator[HashingFile]:
        full = self._full(path)
        self._refuse_twice(full)
        self._make_parents(self.root / full)
        file = HashingFile(self.root / full)
        try:
            yield file
            entry = file.finish(full)
        finally:
            file.abandon()
        self._record(entry)

    def _full(self, path: str) -> str:
        check_path(path)
        return f"{self.folder}/{path}" if self.folder else path

    def _refuse_twice(self, full: str) -> None:
        if full in self.entries or full == MANIFEST_FILE:
            raise CheckpointError(f"{full} is written twice in one checkpoint, or is not a name that a part may use")

    def _record(self, entry: FileEntry) -> None:
        self._refuse_twice(entry.path)
        self.entries[entry.path] = entry

    def _make_parents(self, target: Path) -> None:
        missing = []
        folder = target.parent
        while folder != self.root and not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with suppress(FileExistsError):  # made by another writer a moment ago
                storage.make_directory(folder)
