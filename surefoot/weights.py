"""The fingerprint by which the engine's weights and a generator's are told to be the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and every bit."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())
