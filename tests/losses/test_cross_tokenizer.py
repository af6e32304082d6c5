"""The losses between two vocabularies: by hand, at teacher = student, and however the rows are split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.losses.cross_tokenizer import (
    ChunkLoss,
    CrossTokenizerLoss,
    Gold,
    Projection,
    SameVocabulary,
    Spans,
    chunk_columns,
    mean_target,
    merged,
)
from surefoot.losses.distill import Divergence, TeacherDivergences
from surefoot.types import merge_metrics
from tests.losses.cross_steps import V, applied, spread, step, target

FORWARD = Divergence("forward_kl")
DIVERGENCES = [FORWARD, Divergence("reverse_kl"), Divergence("mixed_kl", 0.3), Divergence("jsd", 0.5)]


def losses(divergence: Divergence, *, whole: bool) -> dict[str, ChunkLoss]:
    """For a teacher with the student's vocabulary."""
    every, ones = torch.arange(V), torch.ones(V)
    return {
        "gold": Gold.of(torch.stack([every, every]), (V, V), divergence=divergence, whole=whole),
        "projection": Projection.of(divergence, every, every, ones, V),
        "same": SameVocabulary(divergence, whole=whole),
    }


@pytest.mark.parametrize("k", [2, V])
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda d: d.name)
def test_a_teacher_that_is_the_student_is_at_distance_0(divergence: Divergence, k: int) -> None:
    logprobs = torch.randn(9, V, generator=torch.Generator().manual_seed(0)).mul(3).log_softmax(-1)
    own, spans = logprobs[:, 1], Spans.of(torch.arange(9))
    for name, loss in losses(divergence, whole=k == V).items():
        leaf = logprobs.clone().requires_grad_()
        said = target(logprobs, k)
        found = loss(loss.read(leaf.log_softmax(-1), said.ids), own, spans, said)["loss"]
        assert found.shape == (9,)
        assert found.abs().max() < 1e-6, name
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
        assert gradient.abs().max() < 1e-6, name


def test_the_same_vocabulary_takes_the_loss_of_distillation() -> None:
    generator = torch.Generator().manual_seed(3)
    ours, theirs = (torch.randn(5, V, generator=generator).log_softmax(-1) for _ in range(2))
    said = target(theirs, 2)
    for divergence in DIVERGENCES:
        top = replace(divergence, top_k=2)
        columns = {"t/topk_ids": said.ids, "t/topk_logprobs": said.logprobs, "t/topk_rest": said.rest}
        expected = TeacherDivergences(top, ("t",))(ours, columns)["t/divergence"]
        same = SameVocabulary(divergence, whole=False)
        found = same(same.read(ours, said.ids), ours[:, 0], Spans.of(torch.arange(5)), said)["loss"]
        torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------------------------------------ by hand


def test_gold_merges_a_chunk_by_the_chain_rule() -> None:
    """Two tokens: 0.5 · what the second one's own probability 0.25 says, at the first token's distribution, or the
    other way round."""
    logprobs = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    spans = Spans.of(torch.tensor([7, 7]))
    own = logprobs[:, 0]
    torch.testing.assert_close(merged(logprobs, own, spans, "observed").exp(), torch.tensor([[0.125, 0.125]]))
    torch.testing.assert_close(merged(logprobs, own, spans, "bayesian").exp(), torch.tensor([[0.125, 0.375]]))


def test_gold_by_hand() -> None:
    """Token 0 is in both vocabularies: 0.5 log(0.5 / 0.25). The others, sorted: |0.5 − 0.3| + |0.25 − 0.2|. A third of
    the teacher's tokens has a counterpart."""
    gold = Gold.of(torch.tensor([[0], [2]]), (3, 3), divergence=FORWARD)
    student = torch.tensor([[0.25, 0.25, 0.5]]).log()
    teacher = target(torch.tensor([[0.2, 0.3, 0.5]]).log(), 3)
    found = gold(gold.read(student, teacher.ids), student[:, 0], Spans.of(torch.tensor([0])), teacher)
    assert float(found["matched"]) == pytest.approx(0.5 * math.log(2))
    assert float(found["unmatched"]) == pytest.approx(0.25)
    assert float(found["loss"]) == pytest.approx(0.5 * math.log(2) / 3 + 0.25 * 2 / 3)


def test_gold_on_the_top_k_by_hand() -> None:
    """Of the teacher's two likeliest ids one has a counterpart, 0: 0.5 against 0.25, and one, 0.3, has none: the
    student's likeliest other, 0.5, is compared with it. One cell for the rest: 0.2 against 0.25."""
    gold = Gold.of(torch.tensor([[0], [2]]), (3, 3), (1.0, 1.0), divergence=FORWARD, whole=False)
    student = torch.tensor([[0.25, 0.25, 0.5]]).log()
    teacher = target(torch.tensor([[0.2, 0.3, 0.5]]).log(), 2)
    found = gold(gold.read(student, teacher.ids), student[:, 0], Spans.of(torch.tensor([0])), teacher)
    assert float(found["matched"]) == pytest.approx(0.5 * math.log(2) + 0.2 * math.log(0.2 / 0.25), abs=1e-6)
    assert float(found["unmatched"]) == pytest.approx(0.2)


def test_gold_with_a_vocabulary_without_counterpart_or_others() -> None:
    for k, whole in ((2, False), (4, True)):
        gold = Gold.of(torch.zeros(2, 0, dtype=torch.int64), (1, 4), divergence=FORWARD, whole=whole)
        teacher = target(torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), k)
        read = gold.read(torch.zeros(1, 1), teacher.ids)
        found = gold(read, torch.zeros(1), Spans.of(torch.tensor([0])), teacher)
        # Sorted: 1 against 0.4, then 0 against the teacher's other kept ones.
        assert float(found["unmatched"]) == pytest.approx(0.6 + (0.3 if k == 2 else 0.6))


def test_projection_by_hand() -> None:
    """The student's token 1 is the teacher's 1 and 2, half each; its token 2 is none of the teacher's. The chunk has
    two tokens of the student: means 0.3, 0.5, 0.2 become 0.3, 0.25, 0.25, and 0.2 that is nowhere."""
    loss = Projection.of(FORWARD, torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.5, 0.5]), 4)
    student = torch.tensor([[0.5, 0.4, 0.1], [0.1, 0.6, 0.3]]).log()
    teacher = torch.tensor([[0.2, 0.3, 0.4, 0.1]]).log()

    def found(k: int) -> float:
        said = target(teacher, k)
        read = loss.read(student, said.ids.expand(2, k))
        return float(loss(read, student[:, 0], Spans.of(torch.tensor([4, 4])), said)["loss"])

    # The teacher's token 3 is none of the student's: its 0.1 is compared with that 0.2.
    same = 0.2 * math.log(0.2 / 0.3) + 0.3 * math.log(0.3 / 0.25) + 0.4 * math.log(0.4 / 0.25)
    assert found(4) == pytest.approx(same + 0.1 * math.log(0.1 / 0.2), abs=1e-6)
    # Of the top 1 alone: 0.4 against 0.25, and the rest.
    assert found(1) == pytest.approx(0.4 * math.log(0.4 / 0.25) + 0.6 * math.log(0.6 / 0.75), abs=1e-6)


def test_the_mean_of_a_chunk_is_cut_to_the_likeliest_again() -> None:
    logprobs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [0.5, 0.25, 0.25]]).log()
    spans = Spans.of(torch.tensor([0, 0, 1]))
    said = target(logprobs, 2)
    found = mean_target(said, spans, 3)
    # Known of the first two: 0.6, 0.3, – and 0.2, –, 0.7, so the means are 0.4, 0.15, 0.35 and 0.1 that is outside.
    assert found.ids.tolist() == [[0, 2], [0, 1]]
    torch.testing.assert_close(found.logprobs.exp(), torch.tensor([[0.4, 0.35], [0.5, 0.25]]))
    torch.testing.assert_close(found.rest.exp(), torch.tensor([0.25, 0.25]))


def test_what_a_teacher_says_lies_at_each_token_of_a_chunk() -> None:
    """Two turns: of the first, the student's token 2 and the teacher's 1 are in no chunk, for both were cut."""
    out = {"logprobs": torch.tensor([-1.0, -9, -2, -3]), "topk_rest": torch.tensor([-5.0, 0, -6, -7])}
    out |= {
        "topk_ids": torch.tensor([[4], [0], [3], [5]]),
        "topk_logprobs": torch.tensor([[-0.1], [0], [-0.2], [-0.3]]),
    }
    mask, ours, theirs = (
        torch.tensor([0.0, 1, 1, 1, 0, 1, 1]),
        torch.tensor([7, 7, 0, 8, 9]),
        torch.tensor([7, 0, 8, 9]),
    )
    found = chunk_columns(mask, ours, theirs, out, SameVocabulary(FORWARD))
    assert found["chunk"].tolist() == [0, 1, 1, 0, 0, 2, 3]
    assert found["topk_ids"][:, 0].tolist() == [0, 4, 4, 0, 0, 3, 5]
    assert found["topk_rest"].tolist() == [0, -5, -5, 0, 0, -6, -7]
    assert float(found["likelihood"]) == pytest.approx((-1 - 2 - 3) / 4)
    none = chunk_columns(mask, ours * 0, theirs * 0, out, SameVocabulary(FORWARD))
    assert not none["chunk"].any() and float(none["likelihood"]) == -math.inf


# ---------------------------------------------------------------------------------------------------- the whole loss


def whole_loss(**options: Any) -> CrossTokenizerLoss:
    some = torch.tensor([0, 2, 3])
    gold = Gold.of(torch.stack([some, some.flip(0)]), (V, V), divergence=Divergence("jsd", 0.5), whole=False)
    projection = Projection.of(FORWARD, torch.arange(V), torch.arange(V).flip(0), torch.ones(V), V)
    return CrossTokenizerLoss({"a": gold, "b": projection}, **options)


def gradient(
    loss: CrossTokenizerLoss, logits: Tensor, columns: Mapping[str, Tensor], rows_at_a_time: int, padding: int = 0
) -> tuple[float, Tensor]:
    """Rows split as given, each part cut to its own width and padded again."""
    parts = [slice(i, i + rows_at_a_time) for i in range(0, len(logits), rows_at_a_time)]
    norm: dict[str, float] = {}
    cut = []
    for part in parts:
        width = int(columns["loss_mask"][part].sum(1).max()) + 1
        own = {
            name: _padded(column[part, :width], padding) if column.ndim > 1 else column[part]
            for name, column in columns.items()
        }
        cut.append((part, width, own))
        for key, count in loss.counts(own).items():
            norm[key] = norm.get(key, 0.0) + count
    leaf = logits.clone().requires_grad_()
    total = 0.0
    for part, width, own in cut:
        value, _ = applied(loss, _padded(leaf[part, :width], padding), own, norm)
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
    assert leaf.grad is not None
    return total, leaf.grad


def _padded(values: Tensor, padding: int) -> Tensor:
    return torch.cat([values, values.new_zeros(len(values), padding, *values.shape[2:])], 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.0, "ce_weight": 0.3},
        {"reduction": "sequence"},
        {"reduction": "sequence", "ce_weight": 0.3, "ce_scale": 2.0},
    ],
    ids=str,
)
def test_splits_and_padding_change_nothing(options: dict[str, Any]) -> None:
    logits, columns = step()
    loss = whole_loss(**options)
    value, whole = gradient(loss, logits, columns, 8)
    assert value > 0 and float(whole.abs().sum()) > 0
    for rows_at_a_time, padding in ((4, 0), (2, 3), (1, 0)):
        other, found = gradient(loss, logits, columns, rows_at_a_time, padding)
        assert other == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-7)


def test_metrics_are_those_of_the_whole_step_however_it_is_split() -> None:
    logits, columns = step()
    loss = whole_loss(ce_weight=0.5, ce_scale=1.5)
    norm = loss.counts(columns)
    value, whole = applied(loss, logits, columns, norm)
    parts = [
        applied(loss, logits[i : i + 2], {n: c[i : i + 2] for n, c in columns.items()}, norm)[1] for i in range(0, 8, 2)
    ]
    merged_parts = merge_metrics(parts)
    for name, metric in whole.items():
        assert merged_parts[name].value == pytest.approx(metric.value, rel=1e-5), name
    assert whole["loss"].value == pytest.approx(float(value), rel=1e-6)
    counts = [0.7 * whole["loss/a"].weight, 1.3 * whole["loss/b"].weight]  # all chunks, by their teachers' weights
    mean = (counts[0] * whole["loss/a"].value + counts[1] * whole["loss/b"].value) / sum(counts)
    assert norm["chunks"] == pytest.approx(sum(counts))
    assert whole["loss"].value == pytest.approx(mean + 0.75 * whole["nll"].value, rel=1e-5)
    assert whole["distillation"].value == pytest.approx(whole["loss"].value - 0.75 * whole["nll"].value, rel=1e-4)


def test_reductions() -> None:
    """Two rows, of one chunk and of three: the mean of four chunks, or of the two rows' means."""
    logits, columns = step()
    logits, columns = logits[:2], {name: column[:2] for name, column in columns.items()}
    columns["b/chunk"] = torch.tensor([[0, 1, 0, 0, 0, 0, 0], [0, 1, 2, 2, 3, 0, 0]])
    spread(columns, "b")
    loss = CrossTokenizerLoss({"b": whole_loss().teachers["b"]})
    columns["b/weight"] = torch.ones(2)
    parts = []
    for row in range(2):
        own = {name: column[row : row + 1] for name, column in columns.items()}
        parts.append(float(applied(loss, logits[row : row + 1], own)[0]))
    by_chunk = float(applied(loss, logits, columns)[0])
    by_row = replace(loss, reduction="sequence")
    assert by_chunk == pytest.approx((parts[0] + 3 * parts[1]) / 4, rel=1e-5)
    assert float(applied(by_row, logits, columns)[0]) == pytest.approx(sum(parts) / 2, rel=1e-5)
    assert loss.counts(columns) == {"chunks": 4.0}
    assert by_row.counts(columns) == {"chunks": 2.0}


def test_rows_without_chunks_count_for_nothing() -> None:
    logits, columns = step(rows=2)
    for name in ("a", "b"):
        columns[f"{name}/chunk"].zero_()
    loss = whole_loss()
    norm = loss.counts(columns)
    assert not any(norm.values())
    leaf = logits.requires_grad_()
    value, metrics = applied(loss, leaf, columns)
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == 0.0 and leaf.grad is not None and not leaf.grad.any()
    assert metrics["skipped_rows"].value == 2
    assert math.isfinite(metrics["loss"].value)


def test_a_teacher_without_weight_has_no_part_in_a_row() -> None:
    """Each row has the one teacher that teaches it best: one mean over all rows' chunks."""
    logits, columns = step()
    best = torch.tensor([1.0, 0, 0, 0, 1, 0, 1, 0])
    columns |= {"a/weight": best, "b/weight": 1 - best}
    loss = whole_loss()
    value, metrics = applied(loss, logits, columns)
    chunks = {name: columns[f"{name}/chunk"].amax(1) for name in "ab"}
    assert loss.counts(columns)["chunks"] == int(torch.where(best > 0, chunks["a"], chunks["b"]).sum())
    assert metrics["loss/a"].weight == int(chunks["a"][best > 0].sum())
    columns["a/topk_logprobs"][best == 0] = torch.nan
    assert float(applied(loss, logits, columns)[0]) == float(value)


def test_temperature_multiplies_by_its_square() -> None:
    logits, columns = step()
    cold, warm = whole_loss(), whole_loss(temperature=3.0)
    values = [float(applied(loss, logits * loss.temperature, columns)[0]) for loss in (cold, warm)]
    assert values[1] == pytest.approx(9 * values[0], rel=1e-5)


def test_probabilities_that_vanish_stay_finite() -> None:
    logits = torch.full((1, 3, V), -1e4)
    logits[..., 0] = 1e4
    _, columns = step(rows=1)
    columns = {name: column[:, :3] if column.ndim > 1 else column for name, column in columns.items()}
    leaf = logits.requires_grad_()
    loss = whole_loss()
    value, _ = applied(loss, leaf, columns)
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(value) and leaf.grad is not None and torch.isfinite(leaf.grad).all()
