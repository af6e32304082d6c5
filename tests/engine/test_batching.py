"""How rows become optimizer steps and micro-batches."""

from __future__ import annotations

import pytest
import torch

from surefoot.engine.batching import fill, groups_of, joined, micro_batches, optimizer_steps
from surefoot.types import BatchRef

CPU = torch.device("cpu")


def ref_of(groups: str, lengths: list[int] | None = None) -> BatchRef:
    """`aab` has two rows of group a and one of b."""
    lengths = lengths or [1] * len(groups)
    return BatchRef(
        tuple(f"{g}_{i}" for i, g in enumerate(groups)), tuple(groups), tuple(lengths), (0,) * len(groups), frozenset()
    )


def test_groups_stay_whole() -> None:
    groups = groups_of(ref_of("aabbbcd"))
    assert groups == [[0, 1], [2, 3, 4], [5], [6]]
    assert fill(groups, 2) == [[0, 1], [2, 3, 4], [5, 6]]  # a group of three is larger than the limit: it goes alone
    assert fill(groups, 5) == [[0, 1, 2, 3, 4], [5, 6]]
    assert fill([], 2) == []
    with pytest.raises(ValueError, match="next to each other"):
        groups_of(ref_of("aba"))


def test_optimizer_steps_keep_the_order() -> None:
    ref = ref_of("aabbccdd")
    assert optimizer_steps(ref, None) == [ref]
    assert [step.ids for step in optimizer_steps(ref, 4)] == [ref.ids[:4], ref.ids[4:]]
    assert [len(step) for step in optimizer_steps(ref, 6)] == [6, 2]


def test_rows_are_padded_on_the_right_and_the_longest_come_first() -> None:
    columns = {
        "input_ids": [torch.tensor([5, 6]), torch.tensor([1]), torch.tensor([7, 8, 9]), torch.tensor([3, 4])],
        "advantage": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "topk": [torch.full((n, 2), float(n)) for n in (2, 1, 3, 2)],
        "text": ["a", "b", "c", "d"],
    }
    batches = micro_batches(ref_of("abcd", [2, 1, 3, 2]), columns, "input_ids", 2, CPU)
    assert [batch.rows for batch in batches] == [(2, 0), (3, 1)]
    assert batches[0].ids == ("c_2", "a_0")
    assert batches[0].input_ids.tolist() == [[7, 8, 9], [5, 6, 0]]
    assert batches[1].lengths.tolist() == [2, 1]
    assert batches[0].columns["advantage"].tolist() == pytest.approx([0.3, 0.1])
    assert batches[0].columns["topk"].shape == (2, 3, 2)
    assert not batches[0].columns["topk"][1, 2].any()
    assert "text" not in batches[0].columns
    assert batches[0].columns["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    whole = joined([batch.columns for batch in batches])
    assert whole["input_ids"].tolist() == [[7, 8, 9], [5, 6, 0], [3, 4, 0], [1, 0, 0]]
    assert whole["advantage"].tolist() == pytest.approx([0.3, 0.1, 0.4, 0.2])
    assert whole["topk"].shape == (4, 3, 2)
    assert whole["attention_mask"].sum(1).tolist() == [3, 2, 2, 1]


def test_a_column_of_another_length_is_refused() -> None:
    columns = {"input_ids": [torch.tensor([5, 6])], "loss_mask": [torch.tensor([1.0])]}
    with pytest.raises(ValueError, match="'loss_mask' of row 'a_0' has 1 tokens, not 2"):
        micro_batches(ref_of("a", [2]), columns, "input_ids", 2, CPU)
