"""Tensors that took long to compute, kept on disk between runs, and proven before they are used.

A file is accepted only if it is, byte for byte, what `write` writes for its own tensors, its name and the key. So one
that is damaged, cut short, renamed or of another key is never used: a warning names it, and it is computed anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import xxhash
from torch import Tensor

from surefoot.checkpoint import storage
from surefoot.checkpoint.safetensors_format import encode_header, layout, refuse_non_finite, tensor_bytes
from surefoot.errors import StorageFailed

_log = logging.getLogger(__name__)


def cache_home() -> Path:
    """The user's folder for what can be made anew: $XDG_CACHE_HOME, where that is an absolute path, or ~/.cache."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path("~/.cache").expanduser()


class TensorCache:
    """Implements `types.Cache` in a folder of its own below `parent`, named after the key. Files are safetensors whose
    header holds the key and a hash; each appears whole or not at all, so what an interrupted run finished is kept.

    Args:
        key: all that the tensors follow from, by name.
    """

    def __init__(self, parent: Path, key: Mapping[str, str]) -> None:
        self._key = dict(sorted(key.items()))
        self.folder = parent / xxhash.xxh3_128_hexdigest(json.dumps(self._key).encode())

    @contextmanager
    def held(self) -> Iterator[TensorCache]:
        """Inside, this run alone computes and writes; another one that wants the same waits, and then finds it there.

        Raises:
            StorageFailed: the folder cannot be made or locked.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("a")
        except OSError as error:
            raise self._unusable(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("another run is computing what belongs in %s: waiting for it", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise self._unusable(error) from error
            yield self

    def read(self, name: str) -> dict[str, Tensor] | None:
        path = self._path(name)
        try:
            data = path.read_bytes()
            tensors: dict[str, Tensor] = safetensors.torch.load(data)
            if data == self._encoded(name, tensors):
                return tensors
            reason = "it is not what was written there"
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file makes a library raise
            reason = str(error)
        _log.warning("%s cannot be used and is computed anew: it is damaged, or of something else (%s)", path, reason)
        return None

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Raises `NonFiniteError`, naming the tensor, when a value is NaN or infinite."""
        for tensor_name, tensor in tensors.items():
            refuse_non_finite(tensor_bytes(tensor), 0, tensor_name, tensor)
        try:
            storage.write_small_file(self._path(name), self._encoded(name, tensors))
        except OSError as error:
            raise self._unusable(error) from error

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _encoded(self, name: str, tensors: Mapping[str, Tensor]) -> bytes:
        body = b"".join(tensor_bytes(tensors[each]).tobytes() for each in layout(tensors))
        about = {**self._key, "part": name}
        digest = xxhash.xxh3_128_hexdigest(encode_header(tensors, about) + body)
        return encode_header(tensors, {**about, "hash": digest}) + body

    def _unusable(self, error: OSError) -> StorageFailed:
        return StorageFailed(
            f"{self.folder} cannot be written to: {error.strerror or error}. What is computed before the first step is "
            "kept there: make room, make it writable, or name another folder for it"
        )
