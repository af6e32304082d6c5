"""Rows with the chunks of two teachers, and a cross-tokenizer loss of them by the engine's head."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.engine.heads import token_outputs
from surefoot.losses.cross_tokenizer import PARTS, CrossTokenizerLoss, Target
from surefoot.types import Head, Metrics

V = 6
WEIGHTS = {"a": 0.7, "b": 1.3}


def target(logprobs: Tensor, k: int) -> Target:
    kept, ids = logprobs.topk(k)
    rest = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1).clamp(min=-1e4)
    return Target(ids, kept, rest)


def step(
    rows: int = 8, *, student: int = V, teachers: Mapping[str, tuple[int, int]] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of 3 to 7 tokens, of which the first is no target; chunks of one to three tokens, and some in none.

    Args:
        student: its vocabulary. `teachers`: of each its vocabulary, and k.
    """
    random = Random(2)
    generator = torch.Generator().manual_seed(1)
    lengths = [random.randint(3, 7) for _ in range(rows)]
    width = max(lengths)
    columns: dict[str, Any] = {
        "input_ids": torch.randint(student, (rows, width), generator=generator),
        "loss_mask": torch.zeros(rows, width),
    }
    teachers = teachers or {"a": (V, 3), "b": (V, 3)}
    for name, (vocabulary, k) in teachers.items():
        said = target(torch.randn(rows, width, vocabulary, generator=generator).log_softmax(-1), k)
        columns[f"{name}/chunk"] = torch.zeros(rows, width, dtype=torch.int64)
        columns[f"{name}/weight"] = torch.full((rows,), WEIGHTS[name])
        columns |= {f"{name}/topk_ids": said.ids, f"{name}/topk_logprobs": said.logprobs}
        columns |= {f"{name}/topk_rest": said.rest}
    for row, length in enumerate(lengths):
        columns["loss_mask"][row, 1:length] = 1
        for name in teachers if row != 3 else ("b",):  # row 3 has nothing of a
            number = 1
            for t in range(1, length - (row % 2)):
                columns[f"{name}/chunk"][row, t] = number
                number += random.random() < 0.6
            chunk = columns[f"{name}/chunk"][row]
            columns[f"{name}/chunk"][row] = torch.unique(chunk, return_inverse=True)[1]
    for name in teachers:
        spread(columns, name)
    logits = torch.randn(rows, width, student, generator=generator) * 2
    return logits, columns


def spread(columns: Mapping[str, Tensor], name: str) -> None:
    """What is said at a chunk's first token, to all of its tokens."""
    chunk = columns[f"{name}/chunk"]
    for t in range(1, chunk.shape[1]):
        goes_on = (chunk[:, t] > 0) & (chunk[:, t] == chunk[:, t - 1])
        for part in PARTS:
            columns[f"{name}/{part}"][goes_on, t] = columns[f"{name}/{part}"][goes_on, t - 1]


def outputs(
    loss: CrossTokenizerLoss, hidden: Tensor, columns: Mapping[str, Tensor], lm_head: nn.Linear | None = None
) -> dict[str, Tensor]:
    """The student's. `hidden` [rows, tokens, width]: the logits themselves where `lm_head` is `None`."""
    head = Head(loss.outputs, loss.temperature, function=loss.function)
    read = {name: columns[name].flatten(0, 1) for name in loss.function.fields}
    values = token_outputs(hidden.flatten(0, 1), read["input_ids"], lm_head, head, None, read)
    return {name: value.unflatten(0, hidden.shape[:2]) for name, value in values.items()}


def applied(
    loss: CrossTokenizerLoss,
    logits: Tensor,
    columns: Mapping[str, Tensor],
    norm: Mapping[str, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """The loss, by default of these rows alone."""
    return loss(outputs(loss, logits, columns), columns, norm=norm or loss.counts(columns))
