"""Weights for generators in this process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from surefoot.types import WeightSync
from surefoot.weight_sync.local import LocalSync


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[Mapping[str, torch.Tensor], int]] = []

    def assign(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.seen.append((weights, version))


def test_every_generator_has_the_version_when_the_future_is_done() -> None:
    generators, live = [Recorder(), Recorder()], {"w": torch.ones(2)}
    sync: WeightSync = LocalSync(generators)  # type: ignore[arg-type]
    assert sync.publish(lambda: live, 3).result(timeout=0) == 3
    for generator in generators:
        ((weights, version),) = generator.seen
        assert (weights["w"] is live["w"], version) == (True, 3)


def test_nobody_generates() -> None:
    def weights() -> Mapping[str, torch.Tensor]:
        raise AssertionError("asked for weights that nobody wants")

    assert LocalSync().publish(weights, 8).result(timeout=0) == 8
