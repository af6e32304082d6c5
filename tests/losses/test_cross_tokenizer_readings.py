"""The cross-tokenizer losses in chunks of a few tokens, against the same from whole distributions, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.engine import heads
from surefoot.losses.cross_tokenizer import (
    FLOOR,
    PARTS,
    ChunkLoss,
    CrossTokenizerLoss,
    Gold,
    Projection,
    SameVocabulary,
    Spans,
    Target,
    merged,
)
from surefoot.losses.distill import Divergence, cells, log_mass_outside
from tests.losses.cross_steps import outputs, step

STUDENT, TEACHER, WIDTH = 11, 8, 6
JSD = Divergence("jsd", 0.3)


def gold(loss: Gold, logprobs: Tensor, own: Tensor, spans: Spans, target: Target) -> Tensor:
    """Merged, then compared: over the whole vocabulary, whose order is not that of any token."""
    student = merged(logprobs, own, spans, loss.merge)
    counterpart, k = loss.to_student[target.ids], target.ids.shape[1]
    same = counterpart >= 0
    ours = student.gather(1, counterpart.clamp(min=0))
    theirs = target.logprobs.exp().masked_fill(same, 0.0).sort(1, descending=True).values
    other = student[:, loss.others].exp().sort(1, descending=True).values
    width = max(other.shape[1], k)
    other, theirs = F.pad(other, (0, width - other.shape[1])), F.pad(theirs, (0, width - k))
    if not loss.whole:
        other = other.masked_fill(torch.arange(width) >= (~same).sum(1, keepdim=True), 0.0)
    cells_s, cells_t = ours.masked_fill(~same, FLOOR), target.logprobs.masked_fill(~same, FLOOR)
    if not loss.whole:
        rest = student.exp().sum(1) - ours.exp().masked_fill(~same, 0.0).sum(1) - other.sum(1)
        cells_s = torch.cat([cells_s, rest.clamp(min=math.exp(FLOOR)).log()[:, None]], 1)
        cells_t = torch.cat([cells_t, target.rest[:, None]], 1)
    divergence = loss.divergence(cells_s.clamp(min=FLOOR), cells_t.clamp(min=FLOOR))
    return loss.weights[0] * divergence + loss.weights[1] * (other - theirs).abs().sum(1)


def projection(loss: Projection, logprobs: Tensor, own: Tensor, spans: Spans, target: Target) -> Tensor:
    """The means of the whole distributions, times the matrix."""
    matrix = torch.zeros(STUDENT, TEACHER).index_put((loss.rows, loss.columns), loss.weights, accumulate=True)
    kept = (spans.means(logprobs.exp()) @ matrix).gather(1, target.ids)
    lost = ~loss.reached[target.ids]
    rest = torch.cat([target.logprobs.masked_fill(~lost, -torch.inf), target.rest[:, None]], 1).logsumexp(1)
    ours = torch.cat([kept, 1 - kept.sum(1, keepdim=True)], 1).clamp(min=math.exp(FLOOR)).log()
    theirs = torch.cat([target.logprobs.masked_fill(lost, FLOOR), rest[:, None]], 1)
    return loss.divergence(ours, theirs.clamp(min=FLOOR))


def same(loss: SameVocabulary, logprobs: Tensor, own: Tensor, spans: Spans, target: Target) -> Tensor:
    ours, theirs = logprobs.gather(1, target.ids), target.logprobs
    if not loss.whole:
        ours = cells(ours, log_mass_outside(logprobs, target.ids), tail=True)
        theirs = cells(theirs, target.rest, tail=True)
    return loss.divergence(ours, theirs)


PLAIN: dict[type, Any] = {Gold: gold, Projection: projection, SameVocabulary: same}


def plainly(loss: CrossTokenizerLoss, logits: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """From the logits of all tokens at once, row by row."""
    logits, total = logits.float(), torch.zeros(())
    norm = loss.counts(columns)
    for name, own_loss in loss.teachers.items():
        for row, chunk in enumerate(columns[f"{name}/chunk"]):
            at = chunk.nonzero()[:, 0]
            if not len(at):
                continue
            logprobs, spans = (logits[row, at] / loss.temperature).log_softmax(-1), Spans.of(chunk[at])
            own = logprobs.gather(1, columns["input_ids"][row, at][:, None])[:, 0]
            said = Target(*(columns[f"{name}/{part}"][row, at][spans.first] for part in PARTS))
            value = PLAIN[type(own_loss)](own_loss, logprobs, own, spans, said)
            value = value.sum() if loss.reduction == "chunk" else value.mean()
            total = total + loss.temperature**2 * columns[f"{name}/weight"][row] * value / norm["chunks"]
    mask = columns["loss_mask"] != 0
    nll = F.cross_entropy(logits[mask], columns["input_ids"][mask])
    return total + loss.ce_weight * loss.ce_scale * nll


def teachers(k: int | None) -> dict[str, dict[str, ChunkLoss]]:
    """Pairs of them; k: `None`: with their whole vocabularies."""
    pairs = torch.tensor([[0, 2, 3, 7, 9], [1, 0, 5, 6, 2]])
    options: dict[str, Any] = {"divergence": JSD, "whole": k is None}
    golds = {
        merge: Gold.of(pairs, (STUDENT, TEACHER), (0.8, 0.6), merge=merge, **options)  # type: ignore[arg-type]
        for merge in ("observed", "bayesian")
    }
    few = Gold.of(pairs.new_tensor([range(10), [*range(8), 3, 5]]), (STUDENT, TEACHER), merge="observed", **options)
    rows = torch.arange(STUDENT).repeat_interleave(2)[:-4]
    columns = torch.arange(len(rows)) * 5 % (TEACHER - 1)
    carried = Projection.of(JSD, rows, columns, torch.full((len(rows),), 0.5), TEACHER)
    return {
        "gold": {"a": golds["bayesian"], "b": golds["observed"]},
        "projection": {"a": few, "b": carried},
        "same": {"a": golds["observed"], "b": SameVocabulary(JSD, whole=k is None)},
    }


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token to a chunk."""
    monkeypatch.setattr(heads, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(heads, "CHUNK_LOGITS", 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.0, "ce_weight": 0.3},
        {"reduction": "sequence", "ce_weight": 0.3, "ce_scale": 2.0},
        {"reduction": "sequence", "temperature": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("k", [3, None])
@pytest.mark.parametrize("kind", ["gold", "projection", "same"])
def test_chunks_equal_the_plain_way(kind: str, k: int | None, options: dict[str, Any], bfloat16: bool) -> None:
    """Under autocast logits are rounded alike, and then so are products with their gradients."""
    torch.manual_seed(0)
    loss = CrossTokenizerLoss(teachers(k)[kind], **options)
    sizes = {"a": TEACHER, "b": STUDENT if kind == "same" else TEACHER}
    _, columns = step(student=STUDENT, teachers={name: (size, k or size) for name, size in sizes.items()})
    if kind == "same":  # each token is a chunk
        inside = columns["b/chunk"] > 0
        columns["b/chunk"] = inside.cumsum(1) * inside
    lm_head, hidden = nn.Linear(WIDTH, STUDENT), torch.randn(*columns["input_ids"].shape, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        out, logits = outputs(loss, hidden, columns, lm_head), lm_head(hidden)
    ours, theirs = loss(out, columns, norm=loss.counts(columns))[0], plainly(loss, logits, columns)
    assert float(theirs.detach()) > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    leaves = [hidden, *lm_head.parameters()]
    tolerance = 1e-2 if bfloat16 else 1e-6
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_what_is_kept_of_a_token_is_small() -> None:
    """With the teacher's k likeliest ids, 2k numbers at most; with all of them, a vocabulary."""
    for k, most in ((3, 6), (None, STUDENT + TEACHER)):
        for pair in teachers(k).values():
            for name, loss in pair.items():
                ids = torch.arange(k or TEACHER).expand(5, -1)
                assert loss.read(torch.randn(5, STUDENT).log_softmax(-1), ids).shape[1] <= most, name
