"""The walk over the data: order, epochs, short batches, and going on after a crash."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.cursor import Cursor
from surefoot.data.prepare import Dataset, prepare
from surefoot.data.source import DatasetSource, iterate
from surefoot.data_plane.memory import MemoryPlane
from surefoot.errors import ConfigError
from surefoot.types import BatchRef, Clock, Source
from tests.helpers import tokenizers as tiny

LIVE: Future[int] = Future()


class Written:
    """What a source writes into a checkpoint, kept as the JSON text that a file would hold."""

    def __init__(self, source: DatasetSource) -> None:
        self.files: dict[str, str] = {}
        source.settle()
        source.snapshot()(self)  # type: ignore[arg-type]

    def json(self, path: str, value: Any = None) -> Any:
        if value is None:
            return json.loads(self.files[path])
        self.files[path] = json.dumps(value)
        return None


def dataset_of(folder: Path, rows: int, first: int = 0) -> Dataset:
    path = folder / f"{first}-{rows}.jsonl"
    path.write_text("".join(json.dumps({"text": f"the row {first + i}"}) + "\n" for i in range(rows)))
    source = DatasetConfig(path=str(path))
    return prepare(source, DataConfig(train=source), tiny.byte_level(), 64)


def source_of(dataset: Dataset, rows_per_step: int, **options: Any) -> tuple[DatasetSource, MemoryPlane]:
    plane = MemoryPlane()
    return DatasetSource(dataset, plane, seed=options.pop("seed", 1), rows_per_step=rows_per_step, **options), plane


def no_poll() -> None:
    pass


def take(source: DatasetSource, plane: MemoryPlane) -> tuple[BatchRef, list[int]] | None:
    ref = source.take(Clock(), no_poll)
    if ref is None:
        return None
    rows = plane.get(ref, ["row_index"])["row_index"]
    assert isinstance(rows, torch.Tensor)
    source.retire(ref, LIVE)
    return ref, rows.tolist()


def taken(source: DatasetSource, plane: MemoryPlane, steps: int = 1000) -> list[list[int]]:
    batches = (take(source, plane) for _ in range(steps))
    return [batch[1] for batch in batches if batch is not None]


# -------------------------------------------------------------------------------------------------------------- cursor


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**40), st.booleans(), st.booleans())
def test_each_epoch_gives_each_row_once(rows: int, per_step: int, seed: int, shuffle: bool, drop_last: bool) -> None:
    cursor = Cursor(rows, per_step, seed, shuffle, drop_last)
    if cursor.steps_per_epoch == 0:
        assert drop_last
        assert rows < per_step
        return
    for epoch in range(3):
        steps = [cursor.take() for _ in range(cursor.steps_per_epoch)]
        assert {step[0] for step in steps} == {epoch}
        assert [step[1] for step in steps] == [i * per_step for i in range(len(steps))]
        drawn = torch.cat([step[2] for step in steps]).tolist()
        assert len(set(drawn)) == len(drawn) == (rows - rows % per_step if drop_last else rows)
        assert shuffle or drawn == sorted(drawn)
        assert cursor.epoch_is_done


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 40))
def test_a_cursor_set_to_a_position_goes_on_as_the_one_it_came_from(rows: int, per_step: int, steps: int) -> None:
    straight = Cursor(rows, per_step, seed=3)
    for _ in range(steps):
        straight.take()
    resumed = Cursor(rows, per_step, seed=3, epoch=straight.epoch, offset=straight.offset)
    for _ in range(5):
        a, b = straight.take(), resumed.take()
        assert (a[0], a[1], a[2].tolist()) == (b[0], b[1], b[2].tolist())


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    torch.manual_seed(0)
    first = Cursor(50, 7, seed=3).order(2).tolist()
    torch.manual_seed(1)
    assert Cursor(50, 9, seed=3).order(2).tolist() == first
    assert Cursor(50, 7, seed=4).order(2).tolist() != first
    assert Cursor(50, 7, seed=3).order(1).tolist() != first
    assert Cursor(6, 2, seed=42).order(0).tolist() == ORDER_OF_SIX


# If this changes, a resumed run no longer sees the rows that the straight run would have seen.
ORDER_OF_SIX = [5, 0, 3, 1, 2, 4]


# -------------------------------------------------------------------------------------------------------------- source


def test_a_batch_has_its_columns_and_its_receipt(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, 5)
    source, plane = source_of(dataset, 2, shuffle=False)
    contract: Source = source
    ref = contract.take(Clock(), no_poll)
    assert ref is not None
    assert ref.ids == ("e0_d0_g0", "e0_d1_g0")
    assert (ref.groups, ref.versions) == (("e0_d0", "e0_d1"), (0, 0))
    assert ref.fields == {"input_ids", "loss_mask", "row_index"}
    columns = plane.get(ref, ["input_ids", "loss_mask", "row_index"])
    for i in range(2):
        assert columns["input_ids"][i].tolist() == dataset.ids(i).tolist()  # type: ignore[union-attr]
        assert columns["loss_mask"][i].tolist() == dataset.loss_mask(i).tolist()  # type: ignore[union-attr]
        assert ref.lengths[i] == len(dataset.ids(i)) == len(dataset.loss_mask(i))
    source.retire(ref, LIVE)
    assert len(plane) == 0
    source.close()
    source.close()


def test_epochs_and_short_batches(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, 5)
    source, plane = source_of(dataset, 2, shuffle=False, max_epochs=2)
    assert source.steps_per_epoch == 3
    seen = []
    while (batch := take(source, plane)) is not None:
        seen.append((source.epoch, batch[0].groups[0], batch[1]))
    assert seen == [(e, f"e{e}_d{d}", rows) for e in (0, 1) for d, rows in ((0, [0, 1]), (2, [2, 3]), (4, [4]))]
    assert take(source, plane) is None
    assert source.exhausted.startswith("the training data is used up: 2 epochs of 3 steps over 5 usable rows of")
    dropping, plane = source_of(dataset, 2, shuffle=False, max_epochs=2, drop_last=True)
    assert dropping.steps_per_epoch == 2
    assert taken(dropping, plane) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_fewer_epochs_than_were_begun_end_it_at_once(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, 5)
    source, plane = source_of(dataset, 2, max_epochs=2)
    taken(source, plane, 4)
    fewer, plane = source_of(dataset, 2, max_epochs=1)
    fewer.restore(Written(source))  # type: ignore[arg-type]
    assert take(fewer, plane) is None


def test_a_batch_larger_than_the_data_is_one_short_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_of(tmp_path, 5)
    with caplog.at_level(logging.WARNING):
        source, plane = source_of(dataset, 8, max_epochs=2)
    assert "5 usable rows, fewer than the 8 rows of a step" in caplog.text
    assert [sorted(rows) for rows in taken(source, plane)] == [[0, 1, 2, 3, 4]] * 2


def test_steps_are_counted_over_the_rows_that_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "x" * (300 if i % 30 else 1), "completion": "yes"} for i in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=str(path))
    dataset = prepare(config, DataConfig(train=config), tiny.byte_level(), 64)
    assert dataset.counts.dropped == {"nothing to train within 64 tokens": 96}
    source, plane = source_of(dataset, 8, max_epochs=1)
    assert "4 usable rows, fewer than the 8 rows of a step" in caplog.text
    assert [sorted(rows) for rows in taken(source, plane)] == [[0, 30, 60, 90]]
    with pytest.raises(ConfigError, match="drop_last: true with 4 usable rows"):
        source_of(dataset, 8, drop_last=True)


def test_dropping_the_only_batch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drop_last: true with 5 usable rows .* and 8 rows per step leaves no step"):
        source_of(dataset_of(tmp_path, 5), 8, drop_last=True)


def test_a_poll_that_raises_leaves_the_position(tmp_path: Path) -> None:
    source, plane = source_of(dataset_of(tmp_path, 5), 2)
    first = Written(source).files

    def failed() -> None:
        raise RuntimeError("a save failed")

    with pytest.raises(RuntimeError):
        source.take(Clock(), failed)
    assert Written(source).files == first
    assert len(plane) == 0


def test_resuming_inside_the_second_epoch_gives_the_rows_of_the_straight_run(tmp_path: Path) -> None:
    """10 rows, 2 per step, 3 epochs, a crash at step 7 of 15; and at every other step."""
    dataset = dataset_of(tmp_path, 10)
    straight = taken(*source_of(dataset, 2, max_epochs=3))
    assert len(straight) == 15
    for crash in range(16):
        source, plane = source_of(dataset, 2, max_epochs=3)
        before = taken(source, plane, crash)
        saved = Written(source)
        resumed, plane = source_of(dataset, 2, max_epochs=3)
        resumed.restore(saved)  # type: ignore[arg-type]
        assert resumed.epoch == source.epoch
        assert before + taken(resumed, plane) == straight
    assert straight[:5] != straight[5:10]


@pytest.mark.parametrize(("rows", "first"), [(3, 0), (20, 100)])
def test_other_data_starts_at_its_first_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: int, first: int
) -> None:
    source, plane = source_of(dataset_of(tmp_path, 20), 2, shuffle=False)
    taken(source, plane, 5)
    other, plane = source_of(dataset_of(tmp_path, rows, first), 2, shuffle=False)
    with caplog.at_level(logging.WARNING):
        other.restore(Written(source))  # type: ignore[arg-type]
    assert "the order of the training rows is not the checkpoint's (dataset was" in caplog.text
    assert taken(other, plane, 1) == [[0, 1]]
    assert other.epoch == 0


def test_another_order_starts_the_epoch_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_of(tmp_path, 6)
    source, plane = source_of(dataset, 2, seed=1)
    taken(source, plane, 4)
    other, plane = source_of(dataset, 2, seed=2)
    with caplog.at_level(logging.WARNING):
        other.restore(Written(source))  # type: ignore[arg-type]
    assert "seed was 1, now 2" in caplog.text
    assert other.epoch == 1
    assert sorted(row for rows in taken(other, plane, 3) for row in rows) == list(range(6))


def test_validation_gives_every_row_in_order_and_leaves_nothing(tmp_path: Path) -> None:
    dataset, plane = dataset_of(tmp_path, 7), MemoryPlane()
    seen = []
    for ref in iterate(dataset, plane, 3):
        assert len(plane) == len(ref)
        seen.append(plane.get(ref, ["row_index"])["row_index"].tolist())  # type: ignore[union-attr]
    assert seen == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(plane) == 0
    stopped = iterate(dataset, plane, 3)
    next(stopped)
    stopped.close()  # type: ignore[attr-defined]
    assert len(plane) == 0


# --------------------------------------------------------------------------------------------------------------- pairs


def pairs_of(folder: Path, pairs: int, **further: Any) -> Dataset:
    path = folder / "pairs.jsonl"
    rows = [{"prompt": f"q{i}", "chosen": "x", "rejected": "y" * (i + 1), **further} for i in range(pairs)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=str(path))
    return prepare(config, DataConfig(train=config), tiny.byte_level(), 64, rows="pairs")


def test_the_sides_of_a_pair_stay_together_the_chosen_one_first(tmp_path: Path) -> None:
    dataset = pairs_of(tmp_path, 5, margin=1.5)
    source, plane = source_of(dataset, 4, max_epochs=2)
    assert source.steps_per_epoch == 3
    for epoch in range(2):
        seen = []
        for draw in (0, 2, 4):
            ref = source.take(Clock(), no_poll)
            assert ref is not None
            groups = [f"e{epoch}_d{draw + i}" for i in range(len(ref) // 2)]
            assert ref.groups == tuple(group for group in groups for _ in range(2))
            assert ref.ids == tuple(f"{group}_g{i}" for group in groups for i in range(2))
            assert ref.fields == {"input_ids", "loss_mask", "row_index", "margin"}
            columns = plane.get(ref, sorted(ref.fields))
            rows = columns["row_index"].tolist()  # type: ignore[union-attr]
            assert rows[::2] == rows[1::2]
            assert columns["margin"].tolist() == [1.5] * len(ref)  # type: ignore[union-attr]
            for i, row in enumerate(rows):
                assert columns["input_ids"][i].tolist() == dataset.ids(2 * row + i % 2).tolist()  # type: ignore[union-attr]
                assert ref.lengths[i] == len(columns["loss_mask"][i])
            seen += rows[::2]
            source.retire(ref, LIVE)
        assert sorted(seen) == list(range(5))
    assert source.take(Clock(), no_poll) is None
    assert "2 epochs of 3 steps over 5 usable pairs" in source.exhausted


def test_resuming_among_pairs(tmp_path: Path) -> None:
    dataset = pairs_of(tmp_path, 7)
    straight = taken(*source_of(dataset, 4, max_epochs=2))
    assert [len(rows) for rows in straight] == [4, 4, 4, 2] * 2
    for crash in range(len(straight) + 1):
        source, plane = source_of(dataset, 4, max_epochs=2)
        before = taken(source, plane, crash)
        resumed, plane = source_of(dataset, 4, max_epochs=2)
        resumed.restore(Written(source))  # type: ignore[arg-type]
        assert before + taken(resumed, plane) == straight


def test_validation_of_pairs(tmp_path: Path) -> None:
    dataset, plane = pairs_of(tmp_path, 3), MemoryPlane()
    seen = []
    for ref in iterate(dataset, plane, 4):
        assert "margin" not in ref.fields
        seen.append([row_id.rpartition("_d")[2] for row_id in ref.ids])
    assert seen == [["0_g0", "0_g1", "1_g0", "1_g1"], ["2_g0", "2_g1"]]
    assert len(plane) == 0


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    dataset = pairs_of(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"train_global_batch_size: 5 rows do not hold whole pairs of .*pairs\.jsonl"):
        source_of(dataset, 5)
    with pytest.raises(ConfigError, match="val_batch_size: 1 rows do not hold whole pairs"):
        next(iterate(dataset, MemoryPlane(), 1))


def test_pairs_are_counted_as_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = pairs_of(tmp_path, 3)
    source, plane = source_of(dataset, 4, max_epochs=1)
    assert [len(rows) for rows in taken(source, plane)] == [4, 2]
    assert source.exhausted.endswith(f": 1 epoch of 2 steps over 3 usable pairs of {dataset.name}")
    with pytest.raises(
        ConfigError, match=r"with 3 usable pairs in .* and 4 pairs \(8 rows\) per step .* at most 6 rows"
    ):
        source_of(dataset, 8, drop_last=True)
    source_of(dataset, 8)
    assert "has 3 usable pairs, fewer than the 4 pairs (8 rows) of a step" in caplog.text
