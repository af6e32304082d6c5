"""Rows into optimizer steps and micro-batches, and columns into padded tensors. Groups are never torn apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from surefoot.types import BatchRef, Column


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        rows: their places in the batch they were cut from.
        ids: their row ids.
        input_ids: [rows, tokens], zeros on the right. What pads is told by `lengths`, never by a token's id.
        lengths: [rows].
        columns: what the loss reads, and `attention_mask`; token columns are [rows, tokens, ...].
    """

    rows: tuple[int, ...]
    ids: tuple[str, ...]
    input_ids: Tensor
    lengths: Tensor
    columns: Mapping[str, Tensor]


def groups_of(ref: BatchRef) -> list[list[int]]:
    """Row places by group, in order.

    Raises:
        ValueError: the rows of a group do not lie next to each other.
    """
    groups = [[place for place, _ in run] for _, run in groupby(enumerate(ref.groups), key=lambda pair: pair[1])]
    if len(groups) != len(set(ref.groups)):
        raise ValueError(f"rows of one group must lie next to each other: {ref.groups}")
    return groups


def fill(groups: Sequence[Sequence[int]], max_rows: int) -> list[list[int]]:
    """Whole groups into batches of at most `max_rows` rows; a larger group is a batch of its own.

    >>> fill([[0, 1], [2, 3], [4]], 3)
    [[0, 1], [2, 3, 4]]
    """
    batches: list[list[int]] = []
    for group in groups:
        if batches and len(batches[-1]) + len(group) <= max_rows:
            batches[-1].extend(group)
        else:
            batches.append(list(group))
    return batches


def optimizer_steps(ref: BatchRef, max_rows: int | None) -> list[BatchRef]:
    """The rows of each optimizer step, in order."""
    if max_rows is None:
        return [ref]
    return [ref.rows(batch[0], batch[-1] + 1) for batch in fill(groups_of(ref), max_rows)]


def micro_batches(
    ref: BatchRef, columns: Mapping[str, Column], inputs: str, max_rows: int, device: torch.device
) -> list[MicroBatch]:
    """Cut rows into micro-batches. Groups of like length share one, the longest first: there is less padding, and
    what does not fit into memory shows at once. The order is a function of the lengths and the row order alone."""
    lengths = [len(row) for row in columns[inputs]]
    groups = sorted(groups_of(ref), key=lambda group: -max(lengths[row] for row in group))
    return [_collate(ref, columns, inputs, rows, lengths, device) for rows in fill(groups, max_rows)]


def _collate(
    ref: BatchRef,
    columns: Mapping[str, Column],
    inputs: str,
    rows: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
) -> MicroBatch:
    padded = {
        name: _padded(name, column, rows, lengths, ref).to(device, non_blocking=True)
        for name, column in columns.items()
        if len(column) and not isinstance(column[0], str)
    }
    own = torch.tensor([lengths[row] for row in rows], device=device)
    padded["attention_mask"] = torch.arange(padded[inputs].shape[1], device=device) < own[:, None]
    return MicroBatch(
        rows=tuple(rows),
        ids=tuple(ref.ids[row] for row in rows),
        input_ids=padded[inputs],
        lengths=own,
        columns=padded,
    )


def _padded(name: str, column: Column, rows: Sequence[int], lengths: Sequence[int], ref: BatchRef) -> Tensor:
    if isinstance(column, Tensor):
        return column[list(rows)]
    chosen = [column[row] for row in rows]
    for row, values in zip(rows, chosen, strict=True):
        if len(values) != lengths[row]:
            raise ValueError(f"column {name!r} of row {ref.ids[row]!r} has {len(values)} tokens, not {lengths[row]}")
    return pad_sequence(chosen, batch_first=True)  # type: ignore[arg-type]


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of several micro-batches as one, token tensors padded to the widest."""
    return {
        name: torch.cat([part[name] for part in parts])
        if parts[0][name].ndim == 1
        else pad_sequence([row for part in parts for row in part[name]], batch_first=True)
        for name in parts[0]
    }
