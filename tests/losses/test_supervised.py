"""NLL against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from surefoot.losses.supervised import NLL
from surefoot.types import Loss, merge_metrics

LOGPROBS = torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, 0.0]])
MASK = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])


def test_the_mean_over_trained_tokens() -> None:
    loss: Loss = NLL()
    columns = {"loss_mask": MASK}
    assert loss.counts(columns) == {"tokens": 3.0}
    logprobs = LOGPROBS.clone().requires_grad_()
    value, metrics = loss({"logprobs": logprobs}, columns, norm={"tokens": 3.0})
    assert float(value.detach()) == pytest.approx((1 + 2 + 4) / 3)
    value.backward()
    assert torch.equal(logprobs.grad, -MASK / 3)  # type: ignore[arg-type]
    assert (metrics["loss"].value, metrics["loss"].weight) == (pytest.approx(7 / 3), 3.0)
    assert metrics["num_tokens"].value == 3


def test_shares_add_up_and_metrics_merge() -> None:
    """Row by row with the norm of both: the same number, and the same mean, not the mean of means (1.5 + 4) / 2."""
    parts = [
        NLL()({"logprobs": LOGPROBS[r : r + 1]}, {"loss_mask": MASK[r : r + 1]}, norm={"tokens": 3.0}) for r in (0, 1)
    ]
    assert sum(float(value) for value, _ in parts) == pytest.approx(7 / 3)
    merged = merge_metrics([metrics for _, metrics in parts])
    assert merged["loss"].value == pytest.approx(7 / 3)
    assert merged["num_tokens"].value == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    value, _ = NLL()({"logprobs": LOGPROBS}, {"loss_mask": MASK.to(dtype)}, norm={"tokens": 3.0})
    assert float(value) == pytest.approx(7 / 3)


def test_nothing_to_train_on() -> None:
    """C5, E3: loss 0 with a gradient of 0, never NaN, and counted."""
    columns = {"loss_mask": torch.zeros(2, 3)}
    logprobs = LOGPROBS.clone().requires_grad_()
    value, metrics = NLL()({"logprobs": logprobs}, columns, norm=NLL().counts(columns))
    value.backward()
    assert float(value.detach()) == 0
    assert not logprobs.grad.any()  # type: ignore[union-attr]
    assert metrics["skipped_rows"].value == 2
    assert merge_metrics([metrics, metrics])["loss"].value == 0
