"""A frozen model that is not there: its outputs on all rows were computed before the first step, and are looked up."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from surefoot.engine.frozen import require_same_frozen
from surefoot.errors import DataError, NonFiniteError
from surefoot.types import BatchRef, Cache, DataPlane, Engine, Head, Metrics, Objective, Reader, Writer

_log = logging.getLogger(__name__)

CHUNK_ROWS = 256  # of one file; what an interruption loses at most


class Rows(Protocol):
    """A `surefoot.data.Dataset`."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    def __len__(self) -> int: ...

    def ids(self, i: int) -> Tensor: ...


class Precomputed:
    """Implements `types.Engine` for rows whose outputs are known. A row is recognised by its token ids, from which all
    that a causal model says of it follows: one of other data is an error, never another row's outputs.

    Args:
        fingerprint: of the model's weights; what a checkpoint holds of this engine.
        head: what is computed; for each output a number or several per token.
    """

    def __init__(self, fingerprint: str, head: Head, plane: DataPlane) -> None:
        self.fingerprint, self._head, self._plane = fingerprint, head, plane
        self._digest = ""  # of the first set's outputs: the training set's
        self._starts: dict[bytes, int] = {}  # of a row's numbers in each of `_outputs`, by the row's token ids
        self._outputs: dict[str, Tensor] = {}  # [all tokens of all rows, ...]

    def fill(
        self,
        sets: Sequence[Rows],
        cache_of: Callable[[Rows], AbstractContextManager[Cache]],
        model: Callable[[], AbstractContextManager[Engine]],
        progress: Callable[[int, int], None],
    ) -> None:
        """Take all rows' outputs from the cache, and compute what is not there.

        Args:
            model: opens the real engine; called at most once, and only when something is to be computed.
            progress: told how many rows are done, and of how many.
        """
        total, done, computed, end = sum(len(rows) for rows in sets), 0, 0, 0
        size = sum(len(rows.tokens) for rows in sets)
        with ExitStack() as stack:
            opened = functools.cache(lambda: stack.enter_context(model()))
            for rows in sets:
                with cache_of(rows) as cache:
                    for name, ids in _chunks(rows):
                        found = cache.read(name)
                        if found is None:
                            if not computed:
                                _log.info(
                                    "computing log-probs of a frozen model: %d sequences to go at most", total - done
                                )
                            found = self._computed(opened(), ids, rows.group_size)
                            _require_finite(found, ids, name)
                            cache.write(name, found)
                            computed += len(ids)
                        end = self._keep(ids, found, end, size)
                        done += len(ids)
                        progress(done, total)
                self._digest = self._digest or _digest(self._outputs[name][:end] for name in self._head.names)
        _log.info("log-probs of the frozen model: %d sequences computed, %d from the cache", computed, total - computed)

    def _computed(self, engine: Engine, ids: Sequence[Tensor], group_size: int) -> dict[str, Tensor]:
        """Groups stay together, as in training: where a micro-batch is one group, sums are rounded the same."""
        groups = tuple(f"precomputed_d{i // group_size}" for i in range(len(ids)))
        names = tuple(f"{group}_g{i % group_size}" for i, group in enumerate(groups))
        ref = BatchRef(names, groups, tuple(len(row) for row in ids), (0,) * len(ids), frozenset())
        ref = self._plane.put(ref, {self._head.inputs: list(ids)})
        try:
            engine.infer(ref, self._head, {output: output for output in self._head.names})
            columns = self._plane.get(ref, self._head.names)
        finally:
            self._plane.drop(ref)
        return {output: torch.cat([torch.as_tensor(row) for row in column]) for output, column in columns.items()}

    def _keep(self, ids: Sequence[Tensor], found: Mapping[str, Tensor], start: int, size: int) -> int:
        """Returns where these rows' numbers end; `size`: of all rows."""
        end = start + sum(len(row) for row in ids)
        for output, values in found.items():
            if output not in self._outputs:
                self._outputs[output] = values.new_zeros(size, *values.shape[1:])
            self._outputs[output][start:end] = values
        for row in ids:
            self._starts.setdefault(_key(row), start)  # the training set comes first, whatever else has the same row
            start += len(row)
        return end

    def infer(self, ref: BatchRef, head: Head, into: Mapping[str, str]) -> BatchRef:
        """Raises `DataError` for a row whose outputs were not computed."""
        if head != self._head:
            raise ValueError(f"{self._head} was computed before the first step, and {head} is asked for")
        rows = self._plane.get(ref, [head.inputs])[head.inputs]
        spans = [self._span(row, name) for row, name in zip(rows, ref.ids, strict=True)]
        return self._plane.put(
            ref, {name: [self._outputs[output][span] for span in spans] for output, name in into.items()}
        )

    def _span(self, row: Tensor, name: str) -> slice:
        start = self._starts.get(_key(row))
        if start is None:
            raise DataError(
                f"row {name} ({len(row)} tokens) is in no data set that the frozen model's log-probs were computed for "
                "before the first step: compute them at each step"
            )
        return slice(start, start + len(row))

    def evaluate(self, ref: BatchRef, objective: Objective) -> Metrics:
        raise ValueError("this engine's outputs are precomputed: there is no model to evaluate")

    def train(self, ref: BatchRef, objective: Objective) -> Metrics:
        raise ValueError("this engine is frozen: it cannot be trained")

    def vocabulary_logprobs(self, hidden: Tensor, head: Head) -> Tensor:
        raise ValueError("this engine's outputs are precomputed: there is no model to compute whole distributions with")

    def weights(self) -> Mapping[str, Tensor]:
        raise ValueError("this engine's outputs are precomputed: its weights are not in memory")

    def assign(self, weights: Mapping[str, Tensor]) -> None:
        raise ValueError("this engine's outputs are precomputed: nothing can be assigned to it")

    def settle(self) -> None:
        pass

    def snapshot(self) -> Writer:
        state = {"weights": self.fingerprint, "outputs": self._digest}
        return lambda sink: sink.json("frozen.json", state)

    def restore(self, reader: Reader) -> None:
        require_same_frozen(reader, self.fingerprint)
        saved = reader.json("frozen.json").get("outputs")
        if self._digest and saved != self._digest:
            _log.warning(
                "the frozen model's log-probs were computed anew, and rounded otherwise than those before the resume: "
                "the run goes on, not bit for bit"
            )


def _chunks(rows: Rows) -> Iterator[tuple[str, list[Tensor]]]:
    """The rows of each file, and its name."""
    for first in range(0, len(rows), CHUNK_ROWS):
        ids = [rows.ids(i) for i in range(first, min(first + CHUNK_ROWS, len(rows)))]
        yield f"rows_{first}_{first + len(ids)}", ids


def _require_finite(found: Mapping[str, Tensor], ids: Sequence[Tensor], name: str) -> None:
    """Raises `NonFiniteError` that names the row: the first with a NaN or an infinity in it."""
    for output, values in found.items():
        start = 0
        for i, row in enumerate(ids):
            if not values[start : start + len(row)].isfinite().all():
                raise NonFiniteError(
                    f"the frozen model's {output} are not all finite in sequence {int(name.split('_')[1]) + i} of the "
                    f"data set ({len(row)} tokens): its weights or its precision do not suit these tokens"
                )
            start += len(row)


def _digest(parts: Iterable[Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.numpy().data)
    return digest.hexdigest()


def _key(ids: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(ids.numpy().tobytes())
