"""Weights for generators in the same process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from surefoot.types import Generator

if TYPE_CHECKING:
    from torch import Tensor


class LocalSync:
    """Hands the live weights to each generator at once. With no generators it does nothing, not even ask for them."""

    def __init__(self, generators: Sequence[Generator] = ()) -> None:
        self._generators = tuple(generators)

    def publish(self, weights: Callable[[], Mapping[str, Tensor]], version: int) -> Future[int]:
        if self._generators:
            live = weights()
            for generator in self._generators:
                generator.assign(live, version)
        done: Future[int] = Future()
        done.set_result(version)
        return done
