"""The value loss: arithmetic by hand, alignment, explained variance through any split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.losses.value import ValueLoss, state_values
from surefoot.types import Loss, Metrics, merge_metrics

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]


def table(dtype: torch.dtype = torch.float64, spread: float = 1.0, mean: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    width = 2 + max(LENGTHS)
    places = torch.arange(width)
    mask = torch.stack([(places >= 2) & (places < 2 + n) for n in LENGTHS])
    normal = [torch.randn(8, width, generator=generator, dtype=torch.float64) for _ in range(3)]
    returns = (mean + spread * normal[0]) * mask
    columns = {"returns": returns, "old_values": (returns + 0.5 * normal[1]) * mask}
    columns["scalar"] = torch.nn.functional.pad(columns["old_values"] + 0.3 * normal[2], (0, 1))[:, 1:]
    return {**{name: column.to(dtype) for name, column in columns.items()}, "loss_mask": mask.float()}


def run(loss: ValueLoss, columns: dict[str, Tensor], size: int = 8) -> tuple[Tensor, Tensor, Metrics]:
    scalars = columns["scalar"].clone().requires_grad_()
    norm: dict[str, float] = {}
    cuts = [slice(start, start + size) for start in range(0, len(scalars), size)]
    parts = [{name: column[cut] for name, column in columns.items()} for cut in cuts]
    for part in parts:
        for name, count in loss.counts(part).items():
            norm[name] = norm.get(name, 0.0) + count
    found = [loss({"scalar": scalars[cut]}, part, norm=norm) for cut, part in zip(cuts, parts, strict=True)]
    total = torch.stack([value for value, _ in found]).sum()
    total.backward()
    assert scalars.grad is not None
    return total.detach(), scalars.grad, merge_metrics([metrics for _, metrics in found])


def test_by_hand() -> None:
    """Values 1, 2 and 3 for the states before tokens 1, 2 and 3, c = 0.5; the last token's scalar, 9, is no such state.
    v = 1, old 1, R = 3: 4. v = 2, old 1, R = 3: clipped to 1.5, 2.25 instead of 1, no gradient. v = 3, old 1, R = 1:
    clipped to 1.5, 0.25 but 4 counts."""
    columns = {
        "scalar": torch.tensor([[1.0, 2.0, 3.0, 9.0]]),
        "loss_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0]]),
        "old_values": torch.tensor([[7.0, 1.0, 1.0, 1.0]]),
        "returns": torch.tensor([[7.0, 3.0, 3.0, 1.0]]),
    }
    loss: Loss = ValueLoss(cliprange=0.5)
    assert loss.fields == ("loss_mask", "old_values", "returns")
    value, gradient, metrics = run(loss, columns)  # type: ignore[arg-type]
    assert float(value) == pytest.approx((4 + 2.25 + 4) / 2 / 3)
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, 0.0, 2.0, 0.0]]) / 3)
    # Returns 3, 3, 1: variance 8/9. Errors of the old values 2, 2, 0: variance 8/9. Nothing is explained.
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {
            **{"loss": float(value), "values": 2.0, "returns": 7 / 3, "clip_ratio": 1 / 3},
            **{"explained_variance": 0.0, "num_tokens": 3, "skipped_rows": 0},
        },
        rel=1e-6,
        abs=1e-12,
    )
    assert float(run(ValueLoss(), columns)[0]) == pytest.approx((4 + 1 + 4) / 2 / 3)


def test_a_value_has_not_seen_its_token() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert state_values(rows).tolist() == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]
    assert state_values(rows[0]).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_any_split_gives_one_gradient(cliprange: float | None, dtype: torch.dtype, tolerance: float) -> None:
    """And one explained variance: 1 − Var(R − v_old) / Var(R) of all tokens at once, which no mean over the parts'
    own would give."""
    loss, columns = ValueLoss(cliprange), table(dtype)
    value, gradient, metrics = run(loss, columns)
    own = columns["loss_mask"] != 0
    returns, old = (columns[name][own].double() for name in ("returns", "old_values"))
    explained = float(1 - (returns - old).var() / returns.var())
    for size in (8, 4, 2, 1):
        other, other_gradient, merged = run(loss, columns, size)
        assert float(other) == pytest.approx(float(value), rel=tolerance)
        assert float((other_gradient - gradient).norm() / gradient.norm()) <= tolerance
        assert {n: m.value for n, m in merged.items()} == pytest.approx({n: m.value for n, m in metrics.items()})
        assert merged["explained_variance"].value == pytest.approx(explained, rel=tolerance)
    assert 0 < explained < 1
    parts = [run(loss, {n: c[row : row + 2] for n, c in columns.items()})[2] for row in (2, 4, 6)]
    assert abs(merge_metrics(parts)["explained_variance"].value - explained) > 1e-3


def test_explained_variance_of_perfect_equal_and_no_returns() -> None:
    perfect = {**table(mean=50.0, spread=0.1)}
    perfect["old_values"] = perfect["returns"]
    assert run(ValueLoss(), perfect)[2]["explained_variance"].value == pytest.approx(1)
    assert "explained_variance" not in run(ValueLoss(), table(spread=0.0, mean=0.1))[2]
    assert "explained_variance" not in run(ValueLoss(), {**table(), "loss_mask": torch.zeros(8, 10)})[2]


def test_nothing_to_train_on() -> None:
    columns = {**table(), "loss_mask": torch.zeros(8, 10)}
    assert not any(ValueLoss().counts(columns).values())
    value, gradient, metrics = run(ValueLoss(0.2), columns, 2)
    assert float(value) == 0 and not gradient.any()
    assert metrics["skipped_rows"].value == 8
    assert all(math.isfinite(metric.value) for metric in metrics.values())


@pytest.mark.parametrize("cliprange", [0.0, -1.0, math.nan])
def test_refused(cliprange: float) -> None:
    with pytest.raises(ConfigError, match="cliprange must be above 0"):
        ValueLoss(cliprange)
