"""Divergences, loss and gradient, against TRL 1.16: `generalized_jsd_loss`, its chunked divergence loss and its top-k
forms, to 1e-5 in float32. Ours go through the engine's head, in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from surefoot.engine import heads
from surefoot.losses.distill import DistillationLoss, Divergence, TeacherDivergences
from surefoot.types import Head
from tests.parity import trl_reference
from tests.parity.cases import DISTILL_CASES, DistillCase, distilled
from tests.parity.make_reference import read

REFERENCE = read("trl_distillation")


def theirs(name: str) -> Any:
    return trl_reference.distillation(DISTILL_CASES[name]) if trl_reference.installed() else REFERENCE[name]


def ours(case: DistillCase) -> tuple[torch.Tensor, ...]:
    data = distilled()
    head = Head(("logprobs",), case.temperature)
    student, teacher = (nn.Linear(weight.shape[1], 9, bias=False) for weight in (data.student_head, data.teacher_head))
    student.weight.data, teacher.weight.data = data.student_head.clone(), data.teacher_head.clone()
    hidden, own = data.student.clone().requires_grad_(), data.mask.flatten().nonzero().squeeze(1)
    targets = torch.zeros(len(own), dtype=torch.long)
    with torch.no_grad():
        outputs = Head(("topk", "hidden") if case.top_k else ("hidden",), case.temperature, k=case.top_k or 0)
        said = heads.token_outputs(data.teacher.flatten(0, 1)[own], targets, teacher, outputs)
    columns = {f"teacher/{name}": value for name, value in said.items()}
    readouts = {"teacher": lambda states: (teacher(states).detach() / case.temperature).log_softmax(-1)}
    form = Divergence("jsd", case.beta, case.top_k, case.tail)
    function = TeacherDivergences(form, ("teacher",), readouts)
    whole = Head(("logprobs",), head.temperature, function=function)
    made = heads.token_outputs(hidden.flatten(0, 1)[own], targets, student, whole, None, columns)
    rest = {"teacher/weight": torch.ones(1), "teacher/logprobs": torch.zeros(1, len(own))}
    rows = {name: column[None] for name, column in columns.items()} | rest | {"loss_mask": torch.ones(1, len(own))}
    loss = DistillationLoss(function)
    value, _ = loss({name: out[None] for name, out in made.items()}, rows, norm=loss.counts(rows))
    return value.detach(), *torch.autograd.grad(value, [hidden, student.weight])


@pytest.mark.parametrize("name", DISTILL_CASES)
def test_distillation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CHUNK_TOKENS", 2)
    monkeypatch.setattr(heads, "CHUNK_LOGITS", 0)
    expected, found = theirs(name), ours(DISTILL_CASES[name])
    for value, key in zip(found, ("loss", "gradient", "head_gradient"), strict=True):
        torch.testing.assert_close(value, torch.tensor(expected[key]), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not trl_reference.installed(), reason="TRL is not installed")
@pytest.mark.parametrize("name", DISTILL_CASES)
def test_the_committed_values_are_what_trl_computes(name: str) -> None:
    for key, value in theirs(name).items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(REFERENCE[name][key]), rtol=1e-5, atol=1e-6)
