"""Bradley–Terry: arithmetic by hand, the place of the score, splits, empty pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.losses.reward import RewardLoss, last_scores
from surefoot.types import Loss, Metrics, merge_metrics

# Two pairs; each row's score is its last real one. What stands elsewhere must not count.
SCALARS = torch.tensor([[9.0, 2.0, 0.0], [9.0, 9.0, 0.5], [-1.0, 0.0, 0.0], [9.0, 1.0, 0.0]])
ATTENTION = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
MARGINS = torch.tensor([0.5, 0.5, 0.0, 0.0])


def table(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"scalar": SCALARS.to(dtype), "attention_mask": ATTENTION, "loss_mask": ATTENTION, "margin": MARGINS}


def run(loss: RewardLoss, columns: dict[str, Tensor], size: int = 4) -> tuple[Tensor, Tensor, Metrics]:
    scalars = columns["scalar"].clone().requires_grad_()
    norm, parts, measured = loss.counts(columns), [], []
    for start in range(0, len(scalars), size):
        cut = {name: column[start : start + size] for name, column in columns.items()}
        value, metrics = loss({"scalar": scalars[start : start + size]}, cut, norm=norm)
        parts.append(value)
        measured.append(metrics)
    total = torch.stack(parts).sum()
    total.backward()
    assert scalars.grad is not None
    return total.detach(), scalars.grad, merge_metrics(measured)


def nll(x: float) -> float:
    return math.log1p(math.exp(-x))


def test_by_hand() -> None:
    """Scores 2 and 0.5, −1 and 1. Differences 1.5 and −2, beyond the margins 1 and −2; sums 2.5 and 0."""
    loss: Loss = RewardLoss(margins=True, centring=0.1)
    assert loss.fields == ("loss_mask", "margin")
    assert loss.counts(table()) == {"pairs": 2.0}
    value, gradient, metrics = run(loss, table())  # type: ignore[arg-type]
    assert float(value) == pytest.approx((nll(1.0) + 0.1 * 2.5**2 + nll(-2.0)) / 2)
    # d/ds of the second pair: ∓σ(2) / 2, its centring term is 0.
    up = 1 / (1 + math.exp(-2.0)) / 2
    torch.testing.assert_close(gradient[2:], torch.tensor([[-up, 0.0, 0.0], [0.0, up, 0.0]]))
    assert not gradient[:2][ATTENTION[:2] == 0].any()
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx(
        {
            "loss": float(value),
            "accuracy": 0.5,
            "margin": -0.25,
            "scores/chosen": 0.5,
            "scores/rejected": 0.75,
            "num_tokens": 8.0,
            "skipped_pairs": 0.0,
        }
    )
    plain = run(RewardLoss(), table())[0]
    assert float(plain) == pytest.approx((nll(1.5) + nll(-2.0)) / 2)


@pytest.mark.parametrize(("left", "right"), [(0, 2), (2, 0), (1, 3)])
def test_padding_on_any_side_changes_nothing(left: int, right: int) -> None:
    """E5: the place follows from the attention mask; token ids, where pad may be eos, are never looked at."""
    loss = RewardLoss(margins=True, centring=0.1)
    columns = {
        name: torch.nn.functional.pad(column, (left, right)) if column.ndim == 2 else column
        for name, column in table().items()
    }
    (value, gradient, _), (padded, padded_gradient, _) = run(loss, table()), run(loss, columns)
    assert torch.equal(padded, value)
    assert torch.equal(padded_gradient[:, left : left + 3], gradient)


def test_rows_padded_on_the_left() -> None:
    scalars, attention = SCALARS.clone(), ATTENTION.clone()
    for row, own in enumerate(ATTENTION.sum(1).tolist()):
        scalars[row], attention[row] = scalars[row].roll(3 - own), attention[row].roll(3 - own)
    assert torch.equal(last_scores(scalars, attention), last_scores(SCALARS, ATTENTION))
    assert last_scores(scalars, attention).tolist() == [2.0, 0.5, -1.0, 1.0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_any_split_gives_one_gradient(dtype: torch.dtype, tolerance: float) -> None:
    loss = RewardLoss(margins=True, centring=0.1)
    (value, gradient, metrics), (other, other_gradient, merged) = (run(loss, table(dtype), size) for size in (4, 2))
    assert float(other) == pytest.approx(float(value), rel=tolerance)
    assert float((other_gradient - gradient).norm() / gradient.norm()) <= tolerance
    assert {n: m.value for n, m in merged.items()} == pytest.approx({n: m.value for n, m in metrics.items()})


@pytest.mark.parametrize("empty_row", [2, 3])
def test_a_pair_with_nothing_to_train_on_is_left_out(empty_row: int) -> None:
    columns = {**table(), "loss_mask": ATTENTION.clone()}
    columns["loss_mask"][empty_row] = 0
    value, gradient, metrics = run(RewardLoss(), columns)
    assert float(value) == pytest.approx(nll(1.5))
    assert not gradient[2:].any()
    assert metrics["skipped_pairs"].value == 1
    columns["loss_mask"] = torch.zeros(4, 3)
    value, gradient, metrics = run(RewardLoss(centring=0.1), columns)
    assert (float(value), float(gradient.abs().sum()), metrics["loss"].value) == (0.0, 0.0, 0.0)


def test_refused() -> None:
    for centring in (-0.1, math.nan):
        with pytest.raises(ConfigError, match="centring must be 0 or above"):
            RewardLoss(centring=centring)
    with pytest.raises(ValueError, match="found 3 rows"):
        RewardLoss().counts({"loss_mask": torch.ones(3, 2)})
