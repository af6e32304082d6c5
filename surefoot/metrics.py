"""Measured numbers, which say themselves how they reduce. Imports nothing internal; taken from `surefoot.types`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured number and how it reduces over micro-batches, optimizer steps and ranks.

    `mean` is weighted by `weight` (tokens, rows, groups: whatever the mean is taken over); `last` keeps the newest.

    >>> merge_metrics([{"loss": Metric(2.0, weight=3)}, {"loss": Metric(6.0, weight=1)}])["loss"].value
    3.0
    """

    value: float
    weight: float = 1.0
    reduce: Literal["mean", "sum", "max", "min", "last"] = "mean"


Metrics: TypeAlias = Mapping[str, Metric]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Reduce several measurements into one, each metric by its own rule. The order of first appearance is kept.

    Raises:
        ValueError: one name comes with two reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _reduce(name, merged[name], metric) if name in merged else metric
    return merged


def _reduce(name: str, a: Metric, b: Metric) -> Metric:
    if a.reduce != b.reduce:
        raise ValueError(f"metric {name!r} reduces as {a.reduce} in one place and as {b.reduce} in another")
    if a.reduce == "last":
        return b
    if a.reduce == "mean":
        weight = a.weight + b.weight
        value = (a.value * a.weight + b.value * b.weight) / weight if weight else 0.0
        return Metric(value, weight, "mean")
    if math.isnan(a.value) or math.isnan(b.value):  # max() and min() would lose a NaN, depending on the order
        return Metric(math.nan, a.weight + b.weight, a.reduce)
    value = {"sum": a.value + b.value, "max": max(a.value, b.value), "min": min(a.value, b.value)}[a.reduce]
    return Metric(value, a.weight + b.weight, a.reduce)
