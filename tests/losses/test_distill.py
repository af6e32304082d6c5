"""Divergences of whole distributions and of the teacher's top k, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.losses.distill import (
    DIVERGENCES,
    DistillationLoss,
    Divergence,
    TeacherDivergences,
    cells,
    log_mass_outside,
    row_weights,
)
from surefoot.types import merge_metrics

FORMS = [Divergence(name, beta) for name, beta in product(DIVERGENCES, (0.0, 0.3, 1.0))]
STUDENT, TEACHER = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])


def kl(first: list[float], second: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (Divergence("forward_kl"), 0.25 * math.log(0.5) + 0.5 * math.log(2)),
        (Divergence("reverse_kl"), 0.5 * math.log(2) + 0.25 * math.log(0.5)),
        (Divergence("mixed_kl", 0.3), 0.25 * math.log(2)),
        (Divergence("jsd", 0.5), kl([0.25, 0.25, 0.5], [0.375, 0.25, 0.375])),
        # The mixture at 0.2: 0.2 of the teacher and 0.8 of the student.
        (
            Divergence("jsd", 0.2),
            0.2 * kl([0.25, 0.25, 0.5], [0.45, 0.25, 0.3]) + 0.8 * kl([0.5, 0.25, 0.25], [0.45, 0.25, 0.3]),
        ),
    ],
    ids=lambda value: f"{value.name} {value.beta}" if isinstance(value, Divergence) else "",
)
def test_by_hand(form: Divergence, expected: float) -> None:
    assert float(form(STUDENT.log(), TEACHER.log())) == pytest.approx(expected, rel=1e-6)


def test_which_way_is_which() -> None:
    """A teacher that is sure of one token: the forward KL asks for it, the reverse KL punishes all others."""
    sure, flat = torch.tensor([0.98, 0.01, 0.01]).log(), torch.tensor([1 / 3] * 3).log()
    forward, reverse = (float(Divergence(name)(flat, sure)) for name in ("forward_kl", "reverse_kl"))
    assert forward == pytest.approx(kl([0.98, 0.01, 0.01], [1 / 3] * 3), rel=1e-5)
    assert reverse == pytest.approx(kl([1 / 3] * 3, [0.98, 0.01, 0.01]), rel=1e-5)
    for beta, same in ((0.0, forward), (1.0, reverse)):
        assert float(Divergence("jsd", beta)(flat, sure)) == pytest.approx(same, rel=1e-6)
        assert float(Divergence("mixed_kl", beta)(flat, sure)) == pytest.approx(same, rel=1e-6)


def test_the_cells_of_a_top_k() -> None:
    logprobs, ids = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log(), torch.tensor([[0, 2]])
    kept, rest = logprobs.gather(-1, ids), log_mass_outside(logprobs, ids)
    torch.testing.assert_close(cells(kept, rest, tail=True).exp(), torch.tensor([[0.5, 0.2, 0.3]]))
    torch.testing.assert_close(cells(kept, rest, tail=False).exp(), torch.tensor([[5 / 7, 2 / 7]]))


def columns_of(teacher: Tensor, k: int) -> dict[str, Tensor]:
    kept, ids = teacher.topk(k, dim=-1)
    rest = log_mass_outside(teacher, ids)
    return {"teacher/topk_ids": ids, "teacher/topk_logprobs": kept, "teacher/topk_rest": rest}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name} {form.beta}")
@pytest.mark.parametrize("top_k", [None, 1, 4, 50])
@pytest.mark.parametrize("tail", [True, False])
def test_a_student_that_is_its_teacher_learns_nothing(form: Divergence, top_k: int | None, tail: bool) -> None:
    """Acceptance 1. At every position, confident ones and flat ones, to 1e-6, and k may be the whole vocabulary."""
    torch.manual_seed(0)
    logits = torch.randn(64, 50) * torch.linspace(0.1, 12, 64)[:, None]
    student = logits.clone().requires_grad_()
    made = Divergence(form.name, form.beta, top_k, tail)
    read: dict[str, Callable[[Tensor], Tensor]] = {"teacher": lambda hidden: hidden.log_softmax(-1)}
    columns = {"teacher/hidden": logits} if top_k is None else columns_of(logits.log_softmax(-1), top_k)
    found = TeacherDivergences(made, ("teacher",), read)(student.log_softmax(-1), columns)["teacher/divergence"]
    assert found.abs().max() < 1e-6
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-6


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name} {form.beta}")
def test_never_negative_and_always_finite(form: Divergence) -> None:
    """Between distributions that hardly meet, in value and in gradient."""
    torch.manual_seed(1)
    for scale, top_k, tail in product((1.0, 30.0, 300.0), (1, 3, 20), (True, False)):
        student = (torch.randn(100, 20) * scale).requires_grad_()
        teacher = (torch.randn(100, 20) * scale).log_softmax(-1)
        function = TeacherDivergences(Divergence(form.name, form.beta, top_k, tail), ("teacher",))
        found = function(student.log_softmax(-1), columns_of(teacher, top_k))["teacher/divergence"]
        assert found.isfinite().all()
        assert found.min() > -1e-4 * max(1.0, float(found.detach().max()))
        found.sum().backward()
        assert student.grad is not None
        assert student.grad.isfinite().all()


def distilled(form: Divergence, steps: int = 2000) -> tuple[float, dict[str, float]]:
    """Free logits of 8 tokens, vocabulary 10, by gradient until the loss is below 1e-4; the loss, and the metrics."""
    torch.manual_seed(2)
    logits = torch.randn(8, 10).requires_grad_()
    teacher = (2 * torch.randn(8, 10)).log_softmax(-1)
    function = TeacherDivergences(form, ("teacher",))
    loss, read = DistillationLoss(function), columns_of(teacher, form.top_k or 0)
    columns = {name: column[None] for name, column in read.items()}
    columns |= {"loss_mask": torch.ones(1, 8), "teacher/weight": torch.ones(1), "teacher/logprobs": torch.zeros(1, 8)}
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(steps):
        out = {name: value[None] for name, value in function(logits.log_softmax(-1), read).items()}
        value, metrics = loss({**out, "logprobs": torch.zeros(1, 8)}, columns, norm={"tokens": 8.0})
        if value < 1e-4:
            break
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return float(value.detach()), {name: metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_tail_cell_brings_the_kept_mass_too(name: str) -> None:
    """Acceptance 4, and fault G6: nothing is won by leaving the set."""
    loss, metrics = distilled(Divergence(name, 0.5, top_k=2))
    assert 0 <= loss < 1e-3
    assert metrics["kept_mass"] == pytest.approx(metrics["teacher_kept_mass"], abs=0.01)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_renormalised_forms_agree_inside_the_set_and_the_metric_shows_the_gap(name: str) -> None:
    loss, metrics = distilled(Divergence(name, 0.5, top_k=2, tail=False))
    assert 0 <= loss < 1e-3
    assert metrics["teacher_kept_mass"] - metrics["kept_mass"] > 0.2


# ------------------------------------------------------------------------------------------------------------ the loss


def batch() -> tuple[dict[str, Tensor], dict[str, Tensor], DistillationLoss]:
    torch.manual_seed(3)
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    out = {f"{t}/divergence": torch.rand(3, 4).requires_grad_() for t in "ab"} | {"logprobs": -torch.rand(3, 4)}
    columns = {"loss_mask": mask, "a/weight": torch.tensor([1.0, 0.25, 1]), "b/weight": torch.tensor([0, 0.75, 0])}
    columns |= {f"{t}/logprobs": -torch.rand(3, 4) for t in "ab"}
    return out, columns, DistillationLoss(TeacherDivergences(Divergence(), ("a", "b")))


def test_teachers_count_by_their_weight_on_the_row() -> None:
    out, columns, loss = batch()
    value, metrics = loss(out, columns, norm={"tokens": 5.0})
    a, b = out["a/divergence"].tolist(), out["b/divergence"].tolist()
    expected = a[0][1] + a[0][2] + sum(0.25 * a[1][t] + 0.75 * b[1][t] for t in (1, 2, 3))
    assert float(value.detach()) == pytest.approx(expected / 5, rel=1e-6)
    assert metrics["loss"].value == pytest.approx(expected / 5, rel=1e-6)
    assert metrics["loss/b"].value == pytest.approx(sum(b[1][1:]) / 3, rel=1e-6)
    assert metrics["loss/b"].weight == 3
    assert (metrics["num_tokens"].value, metrics["skipped_rows"].value) == (5, 1)
    assert metrics["student_nll"].value == pytest.approx(-float((out["logprobs"] * columns["loss_mask"]).sum()) / 5)


def test_any_split_gives_the_same_gradient_and_metrics() -> None:
    out, columns, loss = batch()
    whole, metrics = loss(out, columns, norm=loss.counts(columns))
    leaves = [out["a/divergence"], out["b/divergence"]]
    expected = torch.autograd.grad(whole, leaves)
    total, parts = torch.zeros(()), []
    for row in range(3):
        part: Any = ({n: v[row : row + 1] for n, v in side.items()} for side in (out, columns))
        value, found = loss(*part, norm={"tokens": 5.0})
        total, parts = total + value, [*parts, found]
    torch.testing.assert_close(torch.autograd.grad(total, leaves), expected)
    merged = merge_metrics(parts)
    assert {n: m.value for n, m in merged.items()} == pytest.approx({n: m.value for n, m in metrics.items()})


def test_nothing_to_train_is_a_zero() -> None:
    out, columns, loss = batch()
    out["a/divergence"].data[0, 0] = torch.nan  # outside the mask: in no sum
    value, metrics = loss(out, columns | {"loss_mask": torch.zeros(3, 4)}, norm={"tokens": 0.0})
    value.backward()  # type: ignore[no-untyped-call]
    assert float(value.detach()) == metrics["loss"].value == 0
    assert not any(out[f"{t}/divergence"].grad.any() for t in "ab")  # type: ignore[union-attr]


def test_weights_of_rows_by_their_source() -> None:
    teachers: Any = {"all": (3.0, []), "code": (1.0, ["code"]), "maths": (2.0, ["maths", "code"])}
    found = row_weights(["code", "", "maths"], teachers)
    assert found == {
        "all": [0.5, 1.0, 0.6],
        "code": [pytest.approx(1 / 6), 0, 0],
        "maths": [pytest.approx(1 / 3), 0, 0.4],
    }
    with pytest.raises(ConfigError, match="source is 'law', only code, maths"):
        row_weights(["law"], {"a": (1.0, ["maths"]), "b": (1.0, ["code"])})


@pytest.mark.parametrize(
    ("options", "words"),
    [({"name": "kl"}, "expected one of"), ({"beta": 1.5}, "between 0"), ({"top_k": 0}, "at least 1")],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Divergence(**options)
