"""How numbers and events read on a console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from surefoot.types import SaveEvent

# Shown first, where there are more metrics than room.
_FIRST = ("loss", "reward", "accuracy", "kl", "grad_norm", "lr")
_SPARKS = "▁▂▃▄▅▆▇█"


def headline(metrics: Mapping[str, float], limit: int) -> list[tuple[str, float]]:
    """The metrics that say most, `limit` of them at most: the well-known names first, then in the order measured."""
    known = [name for name in _FIRST if name in metrics]
    return [(name, metrics[name]) for name in (known + [n for n in metrics if n not in known])[:limit]]


def loss_of(metrics: Mapping[str, float]) -> tuple[str, float]:
    """The metric to draw: "loss", else the first whose name ends in it, else NaN."""
    names = ["loss"] if "loss" in metrics else [name for name in metrics if name.endswith("loss")]
    return (names[0], metrics[names[0]]) if names else ("loss", math.nan)


def number(value: float) -> str:
    """
    >>> number(1.23456), number(2e-5), number(3.0), number(123456.0)
    ('1.2346', '2.00e-05', '3', '123,456')
    """
    size = abs(value)
    if not math.isfinite(value):
        return f"{value}"
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1e4 or value.is_integer() else f"{value:.4f}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0312), duration(4.25), duration(75), duration(7384), duration(200000)
    ('31 ms', '4.2 s', '1:15', '2:03:04', '2 d 7:33:20')
    """
    if seconds < 60:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def size(num_bytes: float) -> str:
    """
    >>> size(999), size(1_234_000_000)
    ('999 B', '1.2 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def sparkline(values: Sequence[float]) -> str:
    """Each value as a bar between the least and the greatest of them; a gap where it is not finite.

    >>> sparkline([1.0, 2.0, 3.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def event_text(event: SaveEvent) -> str:
    if event.kind == "writing":
        return f"writing step {event.step:,}"
    if event.kind == "finished":
        return f"step {event.step:,} saved: {size(event.num_bytes)} in {duration(event.seconds)}"
    if event.kind == "failed":
        return f"FAILED step {event.step:,}: {event.message}"
    return f"pruned step {event.step:,}" if event.kind == "pruned" else event.message


EVENT_STYLES = {"writing": "yellow", "finished": "green", "failed": "bold red", "pruned": "dim", "warning": "yellow"}
