"""A checkpoint in a dictionary: a sink, the reader of what it took, and a stager. For tests of single parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from surefoot.types import Saveable


class MemorySink:
    def __init__(self, files: dict[str, bytes] | None = None, folder: str = "") -> None:
        self.contents: dict[str, bytes] = {} if files is None else files
        self._folder = folder

    def json(self, path: str, value: Any) -> None:
        self.bytes(path, json.dumps(value).encode())

    def bytes(self, path: str, data: bytes) -> None:
        assert self._folder + path not in self.contents, f"{path} written twice"
        self.contents[self._folder + path] = bytes(data)

    def tensors(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        self.bytes(path, save({name: t.detach().contiguous() for name, t in tensors.items()}, dict(metadata or {})))

    def under(self, folder: str) -> MemorySink:
        return MemorySink(self.contents, f"{self._folder}{folder}/")


class MemoryReader:
    def __init__(self, contents: dict[str, bytes], folder: str = "") -> None:
        self._contents, self._folder = contents, folder

    def json(self, path: str) -> Any:
        return json.loads(self.bytes(path))

    def bytes(self, path: str) -> bytes:
        return self._contents[self._folder + path]

    def tensors(self, path: str) -> dict[str, Tensor]:
        return load(self.bytes(path))

    def files(self) -> tuple[str, ...]:
        return tuple(sorted(n.removeprefix(self._folder) for n in self._contents if n.startswith(self._folder)))

    def under(self, folder: str) -> MemoryReader:
        return MemoryReader(self._contents, f"{self._folder}{folder}/")


class CloningStager:
    """Captures by cloning, and keeps the contract that nothing is captured while the writer drains."""

    def __init__(self) -> None:
        self.warmed: set[str] = set()
        self._draining = False

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        self.warmed = set(tensors)

    def capture(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._draining:
            raise RuntimeError("captured while draining")
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @contextmanager
    def draining(self) -> Iterator[None]:
        self._draining = True
        yield
        self._draining = False


def saved(part: Saveable) -> MemoryReader:
    """Settle, snapshot and write a part; the reader of what it wrote."""
    part.settle()
    sink = MemorySink()
    part.snapshot()(sink)  # type: ignore[arg-type]
    return MemoryReader(sink.contents)
