from __future__ import annotations

import itertools
import math
import random

import pytest

from surefoot.checkpoint.policy import SavePolicy
from surefoot.checkpoint.retention import Candidate, Retention


def survivors(retention: Retention, metrics: dict[int, float | None], **kwargs: bool) -> list[int]:
    return sorted(retention.survivors([Candidate(step, value) for step, value in metrics.items()], **kwargs))


def test_without_a_limit_all_periodic_steps_stay_and_the_newest_of_the_others() -> None:
    retention = Retention(save_period=10)
    assert survivors(retention, dict.fromkeys((5, 10, 15, 20, 25))) == [10, 20, 25]


def test_top_k_without_a_metric_is_the_newest_k() -> None:
    assert survivors(Retention(2, keep_top_k=2), dict.fromkeys((2, 4, 6, 8))) == [6, 8]


def test_rules_add_up() -> None:
    """Best periodic: 10. Newest two: 35, 40. Best of all: 15, which is not periodic."""
    retention = Retention(10, keep_top_k=1, metric_name="val:loss", ft_keep_latest_k=2)
    metrics = {5: 0.9, 10: 0.2, 15: 0.1, 20: 0.3, 30: 0.4, 35: 0.5, 40: 0.6}
    assert survivors(retention, metrics) == [10, 15, 35, 40]


@pytest.mark.parametrize("higher", [True, False])
def test_of_equals_the_newer_is_better_whatever_the_order_of_listing(higher: bool) -> None:
    retention = Retention(1, keep_top_k=1, metric_name="val:x", higher_is_better=higher)
    for order in itertools.permutations((2, 10, 30)):
        best = retention.best([Candidate(step, 0.5) for step in order])
        assert best is not None
        assert best.step == 30


@pytest.mark.parametrize("higher", [True, False])
def test_no_value_is_worse_than_any_value(higher: bool) -> None:
    retention = Retention(1, keep_top_k=1, metric_name="val:x", higher_is_better=higher)
    worst = -1e300 if higher else 1e300
    assert [c.step for c in retention.ranked([Candidate(1), Candidate(2, worst), Candidate(3)])] == [2, 3, 1]
    assert survivors(retention, {1: None, 2: worst, 3: None}) == [2, 3]


def test_the_newest_is_only_kept_by_the_rules_when_that_is_asked_for() -> None:
    retention = Retention(2, keep_top_k=1, metric_name="val:x", ft_keep_latest_k=1)
    assert survivors(retention, {2: 0.1, 4: 0.9}, exclude_latest=False) == [2, 4]  # the newest one for fault tolerance
    assert survivors(retention, {}) == []


@pytest.mark.parametrize(
    ("found", "value"),
    [
        (0.5, 0.5), (3, 3.0), (None, None), (math.nan, None), (math.inf, None), ("0.5", None), (True, None),
    ],
)  # fmt: skip
def test_what_counts_as_a_metric(found: object, value: float | None) -> None:
    retention = Retention(1, metric_name="val:x")
    assert retention.metric({"val:x": found}) == value
    assert retention.metric({}) is None


def test_newest_and_best_always_survive() -> None:
    rng = random.Random(0)
    for _ in range(300):
        retention = Retention(
            rng.randint(1, 5), rng.choice([None, 1, 2]), "val:x", rng.random() < 0.5, ft_keep_latest_k=rng.randint(1, 3)
        )
        metrics = {step: rng.choice([None, rng.random()]) for step in rng.sample(range(1, 30), rng.randint(1, 8))}
        kept = survivors(retention, metrics)
        best = retention.best([Candidate(step, value) for step, value in metrics.items()])
        assert best is not None
        assert {max(metrics), best.step} <= set(kept) <= set(metrics)
        assert len(kept) <= retention.most_kept(len(metrics))


def test_most_kept() -> None:
    assert Retention(1).most_kept(7) == 7
    assert Retention(1).most_kept(None) == 1
    assert Retention(1, keep_top_k=2, ft_keep_latest_k=3).most_kept(None) == 5
    assert Retention(1, keep_top_k=2, ft_keep_latest_k=3).most_kept(4) == 4
    assert Retention(1, keep_top_k=2, metric_name="val:x").most_kept(100) == 4


def test_when_to_save() -> None:
    policy = SavePolicy(save_period=4, ft_save_period=3)
    assert [step for step in range(13) if policy.due(step)] == [3, 4, 6, 8, 9, 12]
    assert policy.num_saves(10) == 6  # 3, 4, 6, 8, 9 and the last
    assert policy.num_saves(0) == 0


def test_a_save_period_that_misses_validations_is_told() -> None:
    policy = SavePolicy(save_period=4)
    assert policy.missed_validations("val:acc", 2) is None
    assert policy.missed_validations("train:loss", 0) is None
    assert policy.missed_validations(None, 3) is None
    for val_period, words in ((3, "every 3 steps"), (8, "every 8 steps"), (0, "Set val_period")):
        assert words in (policy.missed_validations("val:acc", val_period) or "")
