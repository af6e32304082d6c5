"""What every generator checks of a model and of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import ModelError


def check_length(model: Any, max_total_sequence_length: int) -> None:
    """Raises `ModelError` when the model cannot read so many tokens."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and 0 < limit < max_total_sequence_length:
        raise ModelError(
            f"max_total_sequence_length is {max_total_sequence_length}, but {type(model).__name__} reads at most "
            f"{limit} tokens (its max_position_embeddings): lower max_total_sequence_length"
        )


def check_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises `ModelError` when a name is missing or extra, or a shape or dtype differs; float32 fits any dtype."""
    wrong = [f"{name} is missing" for name in own.keys() - given.keys()]
    wrong += [f"{name} is not in this model" for name in given.keys() - own.keys()]
    for name in own.keys() & given.keys():
        found, expected = given[name], own[name]
        if found.shape != expected.shape or found.dtype not in (expected.dtype, torch.float32):
            wrong.append(f"{name} is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}")
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise ModelError(f"the weights assigned to the sampler do not fit: {'; '.join(sorted(wrong)[:5])}{more}")
