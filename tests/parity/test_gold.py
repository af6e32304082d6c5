"""Loss and gradient of gold against TRL 1.16's `ULDLoss`, to 1e-5 in float32.

TRL computes them here where it is installed; else the committed values of `make_reference.py` stand in.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.alignment import Tokens, align
from surefoot.losses.cross_tokenizer import CrossTokenizerLoss, Gold, Spans, merged
from surefoot.losses.distill import Divergence
from tests.losses.cross_steps import applied
from tests.parity import trl_reference
from tests.parity.cases import GOLD_CASES, GOLD_VOCABULARIES, GoldCase, GoldSide, gold_rows
from tests.parity.make_reference import read

GOLD = read("trl_gold")


def theirs(name: str) -> Any:
    return trl_reference.gold(GOLD_CASES[name]) if trl_reference.installed() else GOLD[name]


def chunks(sides: tuple[GoldSide, GoldSide]) -> tuple[Tensor, Tensor]:
    """[rows, tokens] of each side: 0, or the chunk's number from 1 on."""
    masks = [side.labels != -100 for side in sides]
    ends = [
        Tokens.of([offsets[m, 1] for offsets, m in zip(side.offsets, mask, strict=True)])
        for side, mask in zip(sides, masks, strict=True)
    ]
    found = align(*ends)
    numbers = [torch.zeros_like(mask, dtype=torch.int64) for mask in masks]
    for number, mask, own in zip(numbers, masks, (found.first, found.second), strict=True):
        number[mask] = own + 1
    return numbers[0], numbers[1]


def ours(case: GoldCase) -> tuple[Tensor, Tensor]:
    student, teacher = gold_rows()
    first, second = chunks((student, teacher))
    names, other_names = GOLD_VOCABULARIES
    pairs = [(i, other_names[n]) for n, i in names.items() if n in other_names and case.hybrid]
    same = torch.tensor(pairs, dtype=torch.int64)
    weights = case.weights if case.hybrid else (0.0, 1.0)
    gold = Gold.of(
        same.reshape(-1, 2).t(),
        (len(names), len(other_names)),
        weights,
        divergence=Divergence("jsd", case.beta),
        merge=case.merge,
    )
    loss = CrossTokenizerLoss({"t": gold}, case.temperature, "sequence", ce_weight=case.ce_weight)
    shape = (*first.shape, len(other_names))
    columns = {
        "input_ids": student.ids,
        "loss_mask": (student.labels != -100).float(),
        "t/weight": torch.ones(len(first)),
        "t/chunk": first,
        "t/topk_ids": torch.arange(len(other_names)).expand(shape),
        "t/topk_logprobs": torch.zeros(shape),
        "t/topk_rest": torch.full(first.shape, -1e4),
    }
    for row in range(len(first)):  # what the teacher says of a chunk lies at its first token on our side
        own = second[row] > 0
        logprobs = (teacher.logits[row, own] / case.temperature).log_softmax(-1)
        spoken = logprobs.gather(1, teacher.ids[row, own][:, None])[:, 0]
        said = merged(logprobs, spoken, Spans.of(second[row, own]), case.merge)
        for number in range(1, int(first[row].max()) + 1):
            columns["t/topk_logprobs"][row, first[row].tolist().index(number)] = said[number - 1]
    logits = student.logits.clone().requires_grad_()
    value, _ = applied(loss, logits, columns)
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize("name", GOLD_CASES)
def test_gold(name: str) -> None:
    """Ours is T² times theirs: with a higher temperature gradients do not fade."""
    expected, case = theirs(name), GOLD_CASES[name]
    value, gradient = (part / case.temperature**2 for part in ours(case))
    torch.testing.assert_close(value, torch.tensor(expected["loss"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"]), rtol=1e-5, atol=1e-5)


def test_the_cases_have_chunks_of_several_tokens_on_either_side() -> None:
    first, second = chunks(gold_rows())
    assert first.tolist() == [[0, 0, 1, 2, 2, 3, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 2]]
    assert second.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 2, 0, 0], [0, 1, 2, 0, 0, 0, 0]]
