"""The plane in memory: rows in, the same rows out, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

from surefoot.data_plane.memory import MemoryPlane
from surefoot.types import BatchRef
from tests.helpers.memory_store import saved


def ref_of(*ids: str) -> BatchRef:
    return BatchRef(ids, tuple(i.partition("_g")[0] for i in ids), (1,) * len(ids), (0,) * len(ids), frozenset())


def test_columns_come_back_as_they_went_in() -> None:
    plane, ref = MemoryPlane(), ref_of("a_g0", "a_g1", "b_g0")
    tokens = [torch.tensor([1, 2]), torch.tensor([3]), torch.empty(0, dtype=torch.long)]
    out = plane.put(ref, {"input_ids": tokens, "reward": torch.tensor([0.5, 1.5, -1.0]), "text": ["x", "", "é"]})
    assert out.fields == {"input_ids", "reward", "text"}
    assert out.ids == ref.ids
    got = plane.get(out, ["text", "reward", "input_ids"])
    assert list(got) == ["text", "reward", "input_ids"]
    assert got["text"] == ["x", "", "é"]
    assert torch.equal(got["reward"], torch.tensor([0.5, 1.5, -1.0]))
    assert all(a is b for a, b in zip(got["input_ids"], tokens, strict=True))


def test_rows_are_found_by_id_in_any_order() -> None:
    plane = MemoryPlane()
    plane.put(ref_of("a_g0", "b_g0"), {"x": torch.tensor([1, 2])})
    plane.put(ref_of("c_g0"), {"x": torch.tensor([3])})
    assert plane.get(ref_of("c_g0", "a_g0"), ["x"])["x"].tolist() == [3, 1]  # type: ignore[union-attr]
    plane.put(ref_of("b_g0"), {"x": torch.tensor([9]), "y": ["new"]})
    assert plane.get(ref_of("b_g0"), ["x", "y"]) == {"x": torch.tensor([9]), "y": ["new"]}


def test_a_wrong_number_of_rows_stores_nothing() -> None:
    plane = MemoryPlane()
    with pytest.raises(ValueError, match="'y' has 1 rows where the batch has 2"):
        plane.put(ref_of("a_g0", "b_g0"), {"x": torch.tensor([1, 2]), "y": ["only one"]})
    assert len(plane) == 0


def test_what_is_missing_is_named() -> None:
    plane = MemoryPlane()
    plane.put(ref_of("a_g0"), {"x": torch.tensor([1]), "z": ["z"]})
    with pytest.raises(KeyError, match=r"row 'a_g0' has no column 'y': it has x, z"):
        plane.get(ref_of("a_g0"), ["y"])
    with pytest.raises(KeyError, match=r"row 'b_g0' has no column 'x': the row is not here"):
        plane.get(ref_of("b_g0"), ["x"])


def test_dropped_rows_are_gone() -> None:
    plane, ref = MemoryPlane(), ref_of("a_g0", "b_g0")
    plane.put(ref, {"x": torch.tensor([1, 2])})
    plane.drop(ref.rows(0, 1))
    plane.drop(ref.rows(0, 1))
    assert len(plane) == 1
    with pytest.raises(KeyError, match="a_g0"):
        plane.get(ref, ["x"])


def test_live_rows_survive_a_checkpoint() -> None:
    plane, ref = MemoryPlane(), ref_of("a_g0", "a_g1", "b_g0")
    plane.put(
        ref,
        {
            "input_ids": [torch.tensor([1, 2]), torch.tensor([3]), torch.empty(0, dtype=torch.long)],
            "topk": [torch.rand(2, 3), torch.rand(1, 3), torch.rand(0, 3)],
            "reward": torch.tensor([0.5, 1.5, -1.0], dtype=torch.float64),
            "flag": torch.tensor([True, False, True]),
            "text": ["x", "", "é"],
        },
    )
    plane.put(ref.rows(2, 3), {"extra": torch.tensor([7])})
    plane.put(ref.rows(0, 1), {"mixed": [torch.ones(2)]})
    plane.put(ref.rows(1, 2), {"mixed": [torch.ones(2, dtype=torch.bfloat16)]})
    before = plane.get(
        ref,
        [
            "input_ids",
            "topk",
            "reward",
            "flag",
            "text",
        ],
    )
    reader = saved(plane)
    plane.drop(ref)
    other = MemoryPlane()
    other.put(ref_of("stale_g0"), {"x": torch.tensor([1])})
    other.restore(reader)
    assert len(other) == 3
    after = other.get(ref, list(before))
    for name, column in before.items():
        assert type(after[name]) is type(column)
        for a, b in zip(after[name], column, strict=True):
            assert a == b if isinstance(a, str) else (torch.equal(a, b) and a.dtype == b.dtype)
    assert other.get(ref.rows(2, 3), ["extra"])["extra"].tolist() == [7]  # type: ignore[union-attr]
    assert other.get(ref.rows(1, 2), ["mixed"])["mixed"][0].dtype == torch.bfloat16  # type: ignore[union-attr]


def test_an_empty_plane_and_one_of_text_alone() -> None:
    for columns in ({}, {"text": ["only"]}):
        plane = MemoryPlane()
        if columns:
            plane.put(ref_of("a_g0"), columns)
        other = MemoryPlane()
        other.restore(saved(plane))
        assert len(other) == len(plane)


def test_a_snapshot_is_of_its_moment() -> None:
    plane, ref = MemoryPlane(), ref_of("a_g0")
    value = torch.tensor([1.0, 2.0])
    plane.put(ref, {"x": [value]})
    from tests.helpers.memory_store import MemoryReader, MemorySink

    write, sink = plane.snapshot(), MemorySink()
    value.zero_()
    plane.drop(ref)
    write(sink)  # type: ignore[arg-type]
    plane.restore(MemoryReader(sink.contents))  # type: ignore[arg-type]
    assert plane.get(ref, ["x"])["x"][0].tolist() == [1.0, 2.0]  # type: ignore[union-attr]
