"""The closing table: where the time went, and what the saves cost."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surefoot.report.text import duration, size
from surefoot.report.timeline import Saves, Timeline


def summary_table(timeline: Timeline, saves: Saves) -> RenderableType:
    """Rows are phases, the longest first; "other" is what no phase covered, so the shares add up to 100 %."""
    elapsed_s = timeline.elapsed_s()
    phases = sorted(timeline.totals.items(), key=lambda item: -item[1])
    phases.append(("other", max(0.0, elapsed_s - sum(timeline.totals.values()))))
    table = Table(box=box.SIMPLE_HEAD, title="Where the time went", title_justify="left", title_style="bold")
    table.add_column("phase")
    for column in ("time", "share", "per step"):
        table.add_column(column, justify="right")
    for name, seconds in [*phases, ("total", elapsed_s)]:
        if name == "total":
            table.add_section()
        share = seconds / elapsed_s if elapsed_s > 0 else 0.0
        table.add_row(name, duration(seconds), f"{share:.1%}", duration(seconds / max(1, timeline.turns)))
    return Group(table, Text(saves_text(saves, timeline.totals.get("save", 0.0))))


def saves_text(saves: Saves, held_up_s: float) -> str:
    """How many saves, for how long they held training up, and what was written in the background how fast."""
    if not saves.finished and not saves.failed:
        return "Saves: none"
    failed = f", {saves.failed} FAILED" if saves.failed else ""
    each = f" ({duration(held_up_s / saves.finished)} each)" if saves.finished > 1 else ""
    rate = f" at {saves.num_bytes / 1e6 / saves.background_s:,.0f} MB/s" if saves.background_s > 0 else ""
    return (
        f"Saves: {saves.finished} finished{failed}, holding training up for {duration(held_up_s)}{each}\n"
        f"       {size(saves.num_bytes)} written in the background in {duration(saves.background_s)}{rate}"
    )
