"""Batches of a prepared data set: in a new order each epoch for training, in file order for validation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from surefoot.config import RunConfig
from surefoot.data.cursor import Cursor
from surefoot.data.prepare import Dataset
from surefoot.errors import ConfigError
from surefoot.types import (
    BatchRef,
    Clock,
    Column,
    DataPlane,
    Kit,
    Metric,
    Metrics,
    Poll,
    Reader,
    Writer,
    merge_metrics,
)

_log = logging.getLogger(__name__)


class CursorSource:
    """What all sources over a data set share: a position in it, which is all that must be saved.

    Args:
        per_step: what a step draws, in words: "8 rows".

    Raises:
        ConfigError: `drop_last` leaves no step in an epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        groups_per_step: int,
        per_step: str,
        max_epochs: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.metrics: Metrics = {}
        self._dataset, self._max_epochs = dataset, max_epochs
        self._cursor = Cursor(dataset.num_groups, groups_per_step, seed, shuffle, drop_last)
        # What the meaning of an offset depends on.
        self._identity = {"dataset": dataset.fingerprint, "seed": seed, "shuffle": shuffle}
        if self._cursor.steps_per_epoch == 0:
            raise ConfigError(
                f"data.drop_last: true with {dataset.usable} in {dataset.name} and {per_step} per step leaves no step "
                f"to train; expected at most {len(dataset)} rows per step, or drop_last: false"
            )
        if groups_per_step > dataset.num_groups:
            _log.warning(
                "%s has %s, fewer than the %s of a step: every step is one short batch, the whole set",
                *(dataset.name, dataset.usable, per_step),
            )

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def steps_per_epoch(self) -> int | None:
        return self._cursor.steps_per_epoch

    @property
    def exhausted(self) -> str:
        cursor = self._cursor
        if self._max_epochs is None or cursor.epoch + cursor.epoch_is_done < self._max_epochs:
            return ""
        steps = "" if self.steps_per_epoch is None else f" of {self.steps_per_epoch} steps"
        return (
            f"the training data is used up: {self._max_epochs} epoch{'s' * (self._max_epochs > 1)}{steps} over "
            f"{self._dataset.usable} of {self._dataset.name}"
        )

    def close(self) -> None:
        """Nothing was started."""

    def settle(self) -> None:
        """A batch is whole when `take` returns."""

    def snapshot(self) -> Writer:
        state = {"epoch": self._cursor.epoch, "offset": self._cursor.offset, **self._identity}
        return lambda sink: sink.json("cursor.json", state)

    def restore(self, reader: Reader) -> None:
        """Go on at the saved position. A position in other data means nothing there: with another data set, seed or
        order, the saved epoch begins again, at row 0."""
        saved = reader.json("cursor.json")
        self._cursor.epoch, self._cursor.offset = int(saved["epoch"]), int(saved["offset"])
        changed = [
            f"{name} was {saved[name]}, now {value}" for name, value in self._identity.items() if saved[name] != value
        ]
        if changed:
            self._cursor.offset = 0
            _log.warning(
                "the order of the training rows is not the checkpoint's (%s): epoch %d starts again at row 0 of %s; "
                "rows that it had already trained are trained again",
                *(", ".join(changed), self._cursor.epoch, self._dataset.name),
            )


class DatasetSource(CursorSource):
    """A `surefoot.types.Source` over a `Dataset`. `position`: what `CursorSource` takes by name.

    Each row of a batch gets three columns: `input_ids` (int64, ragged), `loss_mask` (float32, aligned with the tokens:
    1 where the token is trained) and `row_index` (int64 [rows], the row's place in the file, from 0). Preferences come
    as pairs of rows, the chosen one ("…_g0") before the rejected one ("…_g1"), with `margin` (float32 [rows], that of
    the pair) where the file has it; likewise other rows with `source` (texts).

    Raises:
        ConfigError: `drop_last` leaves no batch in an epoch, or a step does not hold whole pairs.
    """

    def __init__(self, dataset: Dataset, plane: DataPlane, *, rows_per_step: int, **position: Any) -> None:
        groups = _whole_groups(dataset, rows_per_step, "policy.train_global_batch_size")
        per_step = f"{rows_per_step} rows" if dataset.group_size == 1 else f"{groups} pairs ({rows_per_step} rows)"
        super().__init__(dataset, groups_per_step=groups, per_step=per_step, **position)
        self._plane = plane

    def take(self, clock: Clock, poll: Poll) -> BatchRef | None:
        poll()
        if self.exhausted:
            return None
        epoch, draw, indices = self._cursor.take()
        return _put(self._dataset, self._plane, indices, [f"e{epoch}_d{draw + i}" for i in range(len(indices))])

    def retire(self, ref: BatchRef, live: Future[int]) -> None:
        self._plane.drop(ref)


def training_source(kit: Kit) -> DatasetSource:
    """Over the training set, as the run's configuration says."""
    run: RunConfig = kit.config
    return DatasetSource(
        kit.train_data,
        kit.plane,
        seed=run.seed,
        rows_per_step=run.policy.train_global_batch_size,
        max_epochs=run.max_num_epochs,
        shuffle=run.data.shuffle,
        drop_last=run.data.drop_last,
    )


def validate(kit: Kit, poll: Poll, rows_per_batch: int, measure: Callable[[BatchRef], Metrics]) -> dict[str, Metric]:
    """What `measure` finds on the batches of each validation set, as "<set>/<metric>", and over all sets, as
    "<metric>"."""
    by_set: dict[str, dict[str, Metric]] = {}
    for name, dataset in kit.validation_data.items():
        batches = []
        for batch in iterate(dataset, kit.plane, rows_per_batch):
            poll()
            batches.append(measure(batch))
        by_set[name] = merge_metrics(batches)
    found = {f"{name}/{key}": metric for name, metrics in by_set.items() for key, metric in metrics.items()}
    return found | merge_metrics(by_set.values())


def iterate(dataset: Dataset, plane: DataPlane, rows_per_batch: int) -> Iterator[BatchRef]:
    """All rows once, in file order, for validation. A batch is dropped when the next one is asked for.

    Raises:
        ConfigError: a batch does not hold whole pairs.
    """
    per_batch = _whole_groups(dataset, rows_per_batch, "val_batch_size")
    for start in range(0, dataset.num_groups, per_batch):
        indices = torch.arange(start, min(start + per_batch, dataset.num_groups))
        ref = _put(dataset, plane, indices, [f"v{dataset.fingerprint}_d{i}" for i in indices.tolist()])
        try:
            yield ref
        finally:
            plane.drop(ref)


def _whole_groups(dataset: Dataset, rows: int, setting: str) -> int:
    groups, rest = divmod(rows, dataset.group_size)
    if rest:
        raise ConfigError(f"{setting}: {rows} rows do not hold whole pairs of {dataset.name}: expected an even number")
    return groups


def _put(dataset: Dataset, plane: DataPlane, indices: Tensor, groups: list[str]) -> BatchRef:
    """`indices` [groups]: which groups of the data set, and `groups`: what they are called in the batch."""
    size = dataset.group_size
    rows = (indices[:, None] * size + torch.arange(size)).flatten()
    ids = [dataset.ids(i) for i in rows.tolist()]
    columns: dict[str, Column] = {
        "input_ids": ids,
        "loss_mask": [dataset.loss_mask(i) for i in rows.tolist()],
        "row_index": dataset.row_index[rows],
    }
    if dataset.sources:
        columns["source"] = [dataset.sources[i] for i in rows.tolist()]
    if dataset.margins is not None:
        columns["margin"] = dataset.margins[rows]
    names = tuple(f"{group}_g{i}" for group in groups for i in range(size))
    members = tuple(group for group in groups for _ in range(size))
    lengths = tuple(len(row) for row in ids)
    return plane.put(BatchRef(names, members, lengths, (0,) * len(ids), frozenset()), columns)
