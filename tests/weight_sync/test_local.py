"""Weights for generators in this process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from surefoot.errors import StaleWeights
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


class Silent(Recorder):
    """Takes the version and not the weights."""

    def weights_checksum(self) -> str:
        return "0.0"


def test_weights_that_did_not_arrive_are_noticed() -> None:
    def checksum(weights: Mapping[str, torch.Tensor]) -> str:
        return f"{float(weights['w'].sum())}"

    sync = LocalSync([Silent()], checksum)  # type: ignore[list-item]
    assert sync.publish(lambda: {"w": torch.zeros(2)}, 0).result(timeout=0) == 0
    with pytest.raises(StaleWeights, match=r"version 1 of the weights has the checksum 2\.0, .* it has 0\.0"):
        sync.publish(lambda: {"w": torch.ones(2)}, 1)
