"""How numbers, events and the closing summary read on a console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Column, Table

from surefoot.report.timeline import Timeline
from surefoot.types import SaveEvent

_SHOWN = {"loss", "perplexity", "reward", "pass@1", "kl", "grad_norm", "lr"}
_SHOWN |= {"accuracy", "accuracies", "margin", "margins"}
_BARS = "▁▂▃▄▅▆▇█"


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with a well-known name, or all where there is none. A single validation set is not shown twice.

    >>> headline({"loss": 1.5, "num_tokens": 40.0, "heldout/loss": 1.5})
    {'loss': 1.5}
    >>> headline({"reward": 1.5, "reward/length": 0.5, "heldout/reward": 1.5, "heldout/reward/length": 0.5})
    {'reward': 1.5}
    """
    single = len({name.partition("/")[0] for name in metrics if name.partition("/")[2] in metrics}) == 1
    shown = {name: value for name, value in metrics.items() if name.rpartition("/")[2] in _SHOWN} or metrics
    return {n: v for n, v in shown.items() if not (single and "/" in n and metrics.get(n.partition("/")[2]) == v)}


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
    >>> duration(0.0312), duration(4.25), duration(75), duration(200000)
    ('31 ms', '4.2 s', '0:01:15', '2 days, 7:33:20')
    """
    if seconds < 60:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds)))


def size(num_bytes: float) -> str:
    """
    >>> size(1_234_000_000)
    '1.2 GB'
    """
    return decimal(int(num_bytes))


def sparkline(values: Sequence[float]) -> str:
    """Each value as a bar between the least and the greatest of them; a gap where it is not finite.

    >>> sparkline([1.0, 2.0, 3.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def rollout_text(rollout: Mapping[str, Any]) -> str:
    """The advantage only where there is one.

    >>> rollout_text({"reward": 1.0, "advantage": 0.5, "prompt": "17+75=", "completion": "92"})
    "reward 1  advantage +0.50  '17+75=' -> '92'"
    """
    asked, said = (shortened(str(rollout[name]), 50) for name in ("prompt", "completion"))
    advantage = f"  advantage {rollout['advantage']:+.2f}" if "advantage" in rollout else ""
    return f"reward {number(rollout['reward'])}{advantage}  {asked!r} -> {said!r}"


def shortened(text: str, width: int) -> str:
    """The end of a text matters as much as its beginning.

    >>> shortened("a b c d e f g h", 9)
    'a b … g h'
    """
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[:half]}…{text[-half:]}"


def event_text(event: SaveEvent) -> str:
    return {
        "writing": f"writing step {event.step:,}",
        "finished": f"step {event.step:,} saved: {size(event.num_bytes)} in {duration(event.seconds)}",
        "failed": f"FAILED step {event.step:,}: {event.message}",
        "pruned": f"step {event.step:,}",
    }[event.kind]


def summary(timeline: Timeline, saves: Sequence[SaveEvent]) -> RenderableType:
    """Where the time went and what the finished saves cost. Phases come the longest first; "other" is the rest."""
    elapsed_s = timeline.elapsed_s()
    phases = sorted(timeline.totals.items(), key=lambda item: -item[1])
    phases += [("other", elapsed_s - sum(timeline.totals.values())), ("total", elapsed_s)]
    numbers = (Column(name, justify="right") for name in ("time", "share", "per step"))
    table = Table(
        "phase", *numbers, box=box.SIMPLE_HEAD, title="Where the time went", title_justify="left", title_style="bold"
    )
    for name, seconds in phases:
        share = seconds / elapsed_s if elapsed_s > 0 else 0.0
        table.add_row(name, duration(seconds), f"{share:.1%}", duration(seconds / max(1, timeline.turns)))
    if not saves:
        return Group(table, "Saves: none")
    num_bytes, seconds = sum(event.num_bytes for event in saves), sum(event.seconds for event in saves)
    held_up_s = timeline.totals.get("save", 0.0)
    return Group(
        table,
        f"Saves: {len(saves)} finished, holding training up for {duration(held_up_s)}",
        f"       {size(num_bytes)} written in the background in {duration(seconds)}",
    )
