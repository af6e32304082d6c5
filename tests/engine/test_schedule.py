"""The learning rate, step by step, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from surefoot.config import SchedulerConfig
from surefoot.engine.schedule import decay_end, lr_at
from surefoot.errors import ConfigError


def rates(steps: list[int], total: int | None, **settings: object) -> list[float]:
    config = SchedulerConfig.model_validate(settings)
    return [lr_at(config, 2.0, step, decay_end(config, total)) for step in steps]


def test_constant_with_warm_up() -> None:
    assert rates([0, 1, 2, 3, 4, 900], None, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates([0, 1], None) == [2.0, 2.0]


def test_linear_and_cosine() -> None:
    # Warm-up of 2, then 8 steps of decay: half way at step 6.
    assert rates([1, 2, 6, 10, 50], 10, name="linear", warmup_steps=2) == [2.0, 2.0, 1.0, 0.0, 0.0]
    assert rates([1, 2, 6, 10, 50], 10, name="cosine", warmup_steps=2) == pytest.approx([2.0, 2.0, 1.0, 0.0, 0.0])
    # cos(π/4) = 0.7071: 2 · (1 + 0.7071) / 2 = 1.7071 after a quarter.
    assert rates([4], 10, name="cosine", warmup_steps=2) == pytest.approx([1.70710678])
    assert rates([6, 10], 10, name="linear", warmup_steps=2, min_lr_ratio=0.5) == [1.5, 1.0]


def test_decay_steps_come_before_the_runs_length() -> None:
    assert rates([4, 8], 100, name="linear", decay_steps=8) == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"linear .* scheduler.decay_steps, or max_num_steps"):
        rates([0], None, name="linear")


def test_a_run_shorter_than_its_warm_up() -> None:
    assert rates([0, 1, 2, 3], 2, name="cosine", warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 0.0])
    assert rates([3, 4], 2, name="linear", warmup_steps=4) == [2.0, 2.0]


def test_a_run_that_ends_within_its_warm_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert rates([0, 3], 4, name="cosine", warmup_steps=10) == [0.2, 0.8]
    assert "4 optimizer steps end within scheduler.warmup_steps (10)" in caplog.text
