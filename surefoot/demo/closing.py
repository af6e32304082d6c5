"""The closing table: what happened, and whether it is what was to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from surefoot.demo import task
from surefoot.demo.compare import Comparison
from surefoot.demo.watch import WatchedRun
from surefoot.report.text import duration, size

_NUM_DIFFERENCES = 10


class Fact(NamedTuple):
    """A row. `held`: whether it is as it was to be; `None` where anything goes."""

    label: str
    text: str
    held: bool | None = None


class Outcome(NamedTuple):
    """What came of one measure of one stage. `before` is empty where there is no such number."""

    stage: str
    what: str
    before: str
    after: str
    expected: str
    held: bool


def answers(rows: Sequence[task.Row], before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> list[Fact]:
    """Several answers of two models to each of some rows; a dash where one says nothing."""
    return [
        Fact(task.question(row), " -> ".join(" ".join(text or "-" for text in texts) for texts in (old, new)))
        for row, old, new in zip(rows, before, after, strict=True)
    ]


def training(run: WatchedRun) -> list[Fact]:
    rewards, timings = run.values("train", "reward"), run.timings()
    num = max(1, len(rewards) // 20)
    rate = 1 / fmean(timing["step_s"] for timing in timings)
    held_up = max(timing.get("save_s", 0.0) for timing in timings)
    written = [timing["save_background_s"] for timing in timings if "save_background_s" in timing]
    meanwhile = f", and took {duration(median(written))} meanwhile" if written else ""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in run.shares().items())
    return [
        Fact("reward", f"{fmean(rewards[:num]):.2f} -> {fmean(rewards[-num:]):.2f} in {len(rewards):,} steps"),
        Fact("speed", f"{rate:.1f} steps/s on one thread, in each run"),
        Fact("time goes to", shares),
        Fact("saves", f"held training up for {duration(held_up)} at most{meanwhile}"),
    ]


def killing(run: WatchedRun) -> list[Fact]:
    kills = [f"step {step} {'was half-written' if cut else 'had just been written'}" for step, cut in run.kills.items()]
    return [
        Fact("SIGKILL", ", then ".join(kills) or "no save could be caught", any(run.kills.values())),
        Fact("resumed", f"from step {run.resumed_from}, the newest checkpoint that verifies"),
    ]


def comparing(found: Comparison) -> list[Fact]:
    verdict = f"{len(found.differences):,} differences in" if found.differences else "the same, bit for bit:"
    what = f"{found.num_files} files of weights, optimizer and states ({size(found.num_bytes)})"
    both = Fact("both runs", f"{verdict} {what}, {found.num_lines:,} lines of metrics", not found.differences)
    return [both, *(Fact("differs", name) for name in found.differences[:_NUM_DIFFERENCES])]


def table(facts: Sequence[Fact]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, title="What happened", show_header=False)
    for label, text, held in facts:
        style = {None: "", True: "bold green", False: "bold red"}[held]
        rows.add_row(Text(label, "dim"), Text(f"FAILED: {text}" if held is False else text, style))
    return rows


def outcomes(results: Sequence[Outcome]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, title="What each method did")
    for name in ("run", "on held-out sums"):
        rows.add_column(name, style="dim")
    for name in ("before", "after", "expected"):
        rows.add_column(name, justify="right")
    for *texts, held in results:
        rows.add_row(*texts, Text("held", "bold green") if held else Text("FAILED", "bold red"))
    return rows
