"""The torch sampler keeps the generators' contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surefoot.generation.torch_sampler import TorchSampler
from tests.contract.generator_contract import GeneratorContract


class TestTorchSampler(GeneratorContract):
    @classmethod
    def start(cls, model: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> TorchSampler:
        return TorchSampler(model, weights, slots=16, **options)
