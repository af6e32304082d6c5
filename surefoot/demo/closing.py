"""What the demo says at its end: examples, what happened, whether it is what was to be shown, what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from surefoot.demo import task
from surefoot.demo.compare import Comparison
from surefoot.demo.folder import NUM_STEPS, SAVE_PERIOD
from surefoot.demo.watch import WatchedRun
from surefoot.report.text import duration, number, size

_MOST_BEFORE, _LEAST_AFTER = 0.1, 0.8
_NUM_EXAMPLES = 6
_NUM_DIFFERENCES = 10


@dataclass(frozen=True)
class Result:
    """Attributes:
    before, after: the untrained and the trained model's answers to the held-out rows.
    seconds: of each part of the demo.
    """

    rows: Sequence[task.Row]
    before: Sequence[str]
    after: Sequence[str]
    straight: WatchedRun
    killed: WatchedRun
    comparison: Comparison
    seconds: dict[str, float]

    def failures(self) -> list[str]:
        """What kept the demo from showing what it is to show; empty when all is well."""
        before, after = task.exact_match(self.before, self.rows), task.exact_match(self.after, self.rows)
        found = [f"the two runs differ: {difference}" for difference in self.comparison.differences[:_NUM_DIFFERENCES]]
        if (more := len(self.comparison.differences) - _NUM_DIFFERENCES) > 0:
            found.append(f"the two runs differ in {more:,} more places")
        if before >= _MOST_BEFORE:
            found.append(
                f"the untrained model has {before:.1%} of the held-out sums right, not under {_MOST_BEFORE:.0%}"
            )
        if after <= _LEAST_AFTER:
            found.append(f"the trained model has {after:.1%} of the held-out sums right, not over {_LEAST_AFTER:.0%}")
        if not self.killed.kills:
            found.append("no save could be caught, so the second run was never killed")
        return found


def examples(result: Result) -> Table:
    """The trained model's wrong answers first, if there are any, then right ones."""
    table = Table(box=box.SIMPLE_HEAD, title="Held-out sums", title_justify="left", title_style="bold")
    for name in ("question", "untrained model", "trained model", ""):
        table.add_column(name, no_wrap=True, max_width=30)
    answered = list(zip(result.rows, result.before, result.after, strict=True))
    answered.sort(key=lambda item: item[2] == task.expected_answer(item[0]))
    for row, before, after in answered[:_NUM_EXAMPLES]:
        expected = task.expected_answer(row)
        mark = Text("right", "green") if after == expected else Text(f"wrong: {expected}", "red")
        table.add_row(task.question(row), Text(before, "dim"), Text(after, "bold"), mark)
    return table


def summary(result: Result) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="What happened", title_justify="left", title_style="bold", show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    before, after = (task.exact_match(answers, result.rows) for answers in (result.before, result.after))
    losses, validations = result.straight.values("train"), result.straight.values("val")
    rate = NUM_STEPS / sum(timing["wall_s"] for timing in result.straight.timings())
    table.add_row(
        "held-out sums right", f"{before:.1%} -> [bold green]{after:.1%}[/], exact match of {len(result.rows)}"
    )
    table.add_row(
        "loss", f"{number(losses[0])} -> {number(fmean(losses[-50:]))}, on held-out sums {number(validations[-1])}"
    )
    table.add_row("steps", f"{NUM_STEPS:,} of 32 rows in each run, {rate:.0f} steps/s on one thread each")
    table.add_row("saves", _saves(result.straight))
    for kill in result.killed.kills:
        table.add_row("SIGKILL", f"{'while' if kill.in_mid_save else 'just after'} step {kill.step} was being written")
    table.add_row("resumed", f"from step {result.killed.resumed_from}, the newest checkpoint that verifies")
    table.add_row("killed run = other run", _verdict(result.comparison))
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in result.seconds.items())
    table.add_row("time", f"{duration(sum(result.seconds.values()))}: {parts}")
    return table


def _saves(run: WatchedRun) -> str:
    """A save shows in the line of the step that it held up, the next one; the last save shows in none."""
    timings = run.timings()
    held_up = median(timing["save_s"] for timing in timings[SAVE_PERIOD::SAVE_PERIOD])
    written = [timing for timing in timings if "save_bytes" in timing]
    background = f"{size(written[-1]['save_bytes'])} in {duration(median(t['save_background_s'] for t in written))}"
    count = NUM_STEPS // SAVE_PERIOD
    return f"{count} in each run; one holds training up for {duration(held_up)} and writes {background} meanwhile"


def _verdict(comparison: Comparison) -> Text:
    what = (
        f"{comparison.num_tensors} tensors of weights and optimizer ({size(comparison.num_bytes)}), all "
        f"{comparison.num_files} files of state, {comparison.num_lines:,} lines of metrics"
    )
    if comparison.same:
        return Text.assemble(("bit for bit", "bold green"), f": {what}")
    return Text.assemble((f"{len(comparison.differences):,} differences", "bold red"), f" in {what}")


def print_next(console: Console, root: Path) -> None:
    checkpoints = root / "killed" / "checkpoints"
    commands = {
        f"surefoot ckpt ls {checkpoints}": "what is on disk",
        f"surefoot ckpt verify {checkpoints / f'step_{NUM_STEPS}'}": "every byte against the manifest",
        f"surefoot train {root / 'sft.yaml'} run_dir={root / 'again'} seed=1": "Ctrl-C saves and stops it",
        f"surefoot resume {root / 'again'}": "and this goes on",
    }
    console.print(Text("Next, try", "bold"))
    for command, does in commands.items():
        console.print(Text.assemble("  ", (command, "cyan"), (f"   {does}", "dim")), soft_wrap=True)
