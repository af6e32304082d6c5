"""The key-value cache of the running batch, and attention over it.

What makes a sample's bits independent of its neighbours: a row attends to a part of the cache whose length follows from
its own length alone (`bucket`), and all products see one of the numbers of rows that were found to give the same bits
(`row_counts`). Rows of one bucket lie next to each other, the longest first, so that each bucket is one call. Attention
is written as batched products and a softmax: PyTorch's fused kernel gives other bits in another place of the batch when
it runs on several threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.generation.requests import Request

_SMALLEST = 16
# Prefill makes the scores of this many queries of a row at a time.
_QUERIES = 256


def bucket(length: int, smallest: int = _SMALLEST) -> int:
    """The next of 16, 32, 48, 64, 96, 128, 192, 256, 384, …: at most half as long again.

    >>> [bucket(n) for n in (1, 17, 49, 65, 100, 129)]
    [16, 32, 64, 96, 128, 192]
    """
    power = 1 << max(length - 1, smallest - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 and power > 2 * smallest else power


def arrange(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Give the requests the slots 0, 1, …, those with the most keys first. Returns the moves, from slot to slot, of
    those that had another; as few as possible."""
    moves, start = [], 0
    for _, run in groupby(sorted(requests, key=lambda r: -r.keys), key=lambda r: r.keys):
        rows = list(run)
        span = range(start, start + len(rows))
        taken = {row.slot for row in rows}
        free = iter([slot for slot in span if slot not in taken])
        for row in rows:
            if row.slot not in span:
                slot = next(free)
                if row.slot >= 0:
                    moves.append((row.slot, slot))
                row.slot = slot
        start = span.stop
    return moves


class KVCache:
    """Keys and values of `slots` sequences, allocated once.

    Args:
        limit: the most tokens of a sequence; rounded up to 16, so that every row begins at a multiple of 64 bytes.

    Attributes:
        row_counts: the numbers of rows that may be computed, in order; the last is `slots`.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, limit: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.heads, self.limit, self.head_dim = slots, heads, limit, head_dim
        self.length = limit + -limit % 16
        shape = (layers, 2, slots, heads, self.length, head_dim)
        try:
            # Zeros: a masked key counts nothing, unless what lies there is no number.
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise ModelError(
                f"the sampler's cache for {slots} sequences of {self.length} tokens needs {size:.1f} GiB, more than "
                "there is: lower its slots or max_total_sequence_length"
            ) from error
        # Where in the cache, seen as [all, head_dim], the first token's keys and values of each slot and head go.
        places = torch.arange(2 * slots * heads, device=device).view(2, slots, heads) * self.length
        self.first = places.transpose(0, 1).reshape(slots, 2 * heads)
        self.flat = [layer.view(-1, head_dim) for layer in self.data]
        self.row_counts = [slots]

    def rows_for(self, count: int) -> int:
        """How many rows to compute for so many."""
        return min(rows for rows in self.row_counts if rows >= count)

    def load(self, slot: int, kv: Tensor) -> None:
        """Put a prompt's keys and values, [layers, 2, heads, tokens, head_dim], into a slot."""
        self.data[:, :, slot, :, : kv.shape[3]] = kv

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` tokens from slot to slot, all at once."""
        found = [self.data[:, :, source, :, :length].clone() for source, _ in moves]
        for (_, target), kv in zip(moves, found, strict=True):
            self.data[:, :, target, :, :length] = kv


class Decode:
    """Attention of one new token for each of the first `rows` slots.

    Args:
        positions: [rows], where each slot's token goes.
        keys: of each running request, in the order of slots; rows after these have no part in anything.
    """

    def __init__(self, cache: KVCache, positions: Tensor, keys: Sequence[int]) -> None:
        self._cache, self._rows = cache, len(positions)
        self._index = cache.first[: self._rows] + positions[:, None]
        self._parts = []
        places = torch.arange(max(keys), device=positions.device)
        masks = cache.data.new_zeros(()).where(places <= positions[:, None], -math.inf)[:, None]
        start = 0
        for length, run in groupby(keys):
            stop = start + len(list(run))
            count = cache.rows_for(stop - start)
            first = min(start, self._rows - count)  # some neighbours are computed with them, and not used
            mask = masks[first : first + count, :, :length].expand(-1, cache.heads, -1).reshape(-1, 1, length)
            self._parts.append((slice(start, stop), slice(first, first + count), length, mask))
            start = stop

    def __call__(self, layer: int, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        """Store the new keys and values and attend.

        Args:
            q: [rows, query heads, head_dim].
            kv: [rows, 2 * heads, head_dim], keys before values.

        Returns:
            [rows, query heads * head_dim].
        """
        cache = self._cache
        cache.flat[layer].index_put_((self._index,), kv)
        keys, values = cache.data[layer]
        q = q.reshape(self._rows, cache.heads, -1, cache.head_dim)
        out = torch.zeros_like(q)
        for part, computed, length, mask in self._parts:
            found = attend(
                q[computed].flatten(0, 1),
                keys[computed, :, :length].flatten(0, 1),
                values[computed, :, :length].flatten(0, 1),
                mask,
                scale,
            )
            skip = part.start - computed.start
            out[part] = found.view(-1, *q.shape[1:])[skip : skip + part.stop - part.start]
        return out.flatten(1)


class Prefill:
    """Attention of whole prompts, padded on the right; keeps their keys and values.

    Args:
        rows, tokens: shape of the prompts.
    """

    def __init__(self, rows: int, tokens: int) -> None:
        self._rows, self._tokens = rows, tokens
        self.kept: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        """As `Decode`, with [rows * tokens] in place of [rows]."""
        rows, tokens, head_dim = self._rows, self._tokens, q.shape[-1]
        both = kv.view(rows, tokens, 2, -1, head_dim).permute(2, 0, 3, 1, 4).contiguous()
        self.kept.append(both)  # [2, rows, heads, tokens, head_dim]
        heads = both.shape[2]
        keys, values = both.flatten(1, 2)
        queries = q.reshape(rows, tokens, heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        parts = []
        for start in range(0, tokens, _QUERIES):
            part = queries[:, :, :, start : start + _QUERIES]
            count, stop = part.shape[3], start + part.shape[3]
            mask = torch.full((count, stop), -math.inf, dtype=q.dtype, device=q.device).triu_(start + 1)
            mask = mask.repeat(part.shape[2], 1)
            found = attend(part.reshape(rows * heads, -1, head_dim), keys[:, :stop], values[:, :stop], mask, scale)
            parts.append(found.view(rows, heads, -1, count, head_dim))
        return torch.cat(parts, 3).permute(0, 3, 1, 2, 4).reshape(rows * tokens, -1)

    def kv(self, row: int, tokens: int) -> Tensor:
        """One prompt's keys and values, [layers, 2, heads, tokens, head_dim]."""
        return torch.stack([layer[:, row, :, :tokens] for layer in self.kept])


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * q keysᵀ + mask) values.

    Args:
        q: [batch, queries, head_dim].
        keys, values: [batch, keys, head_dim].
        mask: broadcasts to [batch, queries, keys].
    """
    scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)
