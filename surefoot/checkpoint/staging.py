"""Where tensors are captured, so that training may go on while they are written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """Implements `types.Stager`: one block of memory, its pages touched beforehand, that every capture fills anew.

    Copying into pages that were never touched is several times slower, so `warm` before the first step with tensors of
    the sizes that will be captured. A capture of other tensors allocates anew.
    """

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._drains = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return sum(view.numel() * view.element_size() for view in self._views.values())

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        if self._fits(tensors):
            return
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = end
            end += tensor.numel() * tensor.element_size()
            end += -end % _ALIGNMENT
        self._views = {}  # the old block goes before the new one comes
        block = torch.empty(end, dtype=torch.uint8).fill_(0)
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            self._views[name] = block[places[name] : places[name] + size].view(tensor.dtype).view(tensor.shape)

    @torch.no_grad()
    def capture(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with self._lock:
            if self._drains:
                raise RuntimeError("the tensors captured before are still being written; wait for that save first")
            self.warm(tensors)
            if tensors:
                torch._foreach_copy_([self._views[name] for name in tensors], [t.detach() for t in tensors.values()])
            return {name: self._views[name] for name in tensors}

    @contextmanager
    def draining(self) -> Iterator[None]:
        with self._lock:
            self._drains += 1
        try:
            yield
        finally:
            with self._lock:
                self._drains -= 1

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        views = self._views
        return len(views) == len(tensors) and all(
            name in views and views[name].dtype == tensor.dtype and views[name].shape == tensor.shape
            for name, tensor in tensors.items()
        )
