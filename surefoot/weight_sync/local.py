"""Weights for generators in the same process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from surefoot.errors import StaleWeights
from surefoot.types import Generator

if TYPE_CHECKING:
    from torch import Tensor


class LocalSync:
    """Hands the live weights to each generator at once. With no generators it does nothing, not even ask for them.

    Args:
        checksum: of weights by name, as `weights_checksum` of a generator gives it: each is asked what it has got.
    """

    def __init__(
        self, generators: Sequence[Generator] = (), checksum: Callable[[Mapping[str, Tensor]], str] | None = None
    ) -> None:
        self._generators, self._checksum = tuple(generators), checksum

    def publish(self, weights: Callable[[], Mapping[str, Tensor]], version: int) -> Future[int]:
        """Raises `StaleWeights` when a generator has other weights afterwards."""
        if self._generators:
            live = weights()
            expected = None if self._checksum is None else self._checksum(live)
            for generator in self._generators:
                generator.assign(live, version)
                found = expected if expected is None else generator.weights_checksum()
                if found != expected:
                    raise StaleWeights(
                        f"version {version} of the weights has the checksum {expected}, and the generator that was to "
                        f"get it has {found}"
                    )
        done: Future[int] = Future()
        done.set_result(version)
        return done
