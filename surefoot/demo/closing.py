"""What the demo says before and after the training: the task, the examples, the closing table, what to try next."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from surefoot.demo import task
from surefoot.demo.compare import Comparison
from surefoot.demo.folder import NUM_STEPS, SAVE_PERIOD, DemoFolder
from surefoot.demo.watch import WatchedRun
from surefoot.report.text import duration, number, size
from surefoot.report.timeline import Timeline

_MOST_BEFORE, _LEAST_AFTER = 0.1, 0.8
_NUM_EXAMPLES = 6
_NUM_DIFFERENCES = 10


def failures(killed: WatchedRun, comparison: Comparison, before: float, after: float) -> list[str]:
    """What kept the demo from showing what it is to show; empty when all is well."""
    found = []
    if before >= _MOST_BEFORE:
        found.append(
            f"the untrained model answers {before:.1%} of the held-out sums, expected under {_MOST_BEFORE:.0%}"
        )
    if after <= _LEAST_AFTER:
        found.append(f"the trained model answers {after:.1%} of the held-out sums, expected over {_LEAST_AFTER:.0%}")
    if not killed.kills:
        found.append("no save could be caught, so the second run was never killed")
    more = len(comparison.differences) - _NUM_DIFFERENCES
    found += [f"the two runs differ: {difference}" for difference in comparison.differences[:_NUM_DIFFERENCES]]
    return [*found, f"the two runs differ in {more} more places"] if more > 0 else found


def print_task(console: Console, folder: DemoFolder, rows: Sequence[task.Row]) -> None:
    num_train = sum(1 for _ in folder.train.open(encoding="utf-8"))
    example = f"{task.question(rows[0])}{task.expected_answer(rows[0])}"
    _say(
        console,
        "Task",
        f"two-digit sums such as {example}, {num_train:,} to learn from, {len(rows)} held out in both orders",
    )
    _say(console, "Files", f"{folder.train.parent}, {folder.tokenizer} (trained on them), {folder.config}")


def print_score(console: Console, when: str, share: float) -> None:
    _say(console, when, f"{share:.1%} of the held-out sums right, by greedy decoding and exact match")


def print_runs(console: Console, arguments: Sequence[Sequence[str]]) -> None:
    _say(console, "Two runs", "the same twice, side by side; the second will be killed while it saves")
    for words in arguments:
        console.print(Text(f"  $ surefoot {' '.join(words)}", "cyan"), soft_wrap=True)


def print_examples(console: Console, rows: Sequence[task.Row], before: Sequence[str], after: Sequence[str]) -> None:
    """The wrong answers first, if there are any, then right ones."""
    table = Table(box=box.SIMPLE_HEAD, title="Held-out sums", title_justify="left", title_style="bold")
    for name in ("question", "untrained model", "trained model", ""):
        table.add_column(name)
    by_fault = sorted(range(len(rows)), key=lambda i: after[i] == task.expected_answer(rows[i]))
    for i in by_fault[:_NUM_EXAMPLES]:
        expected = task.expected_answer(rows[i])
        mark = Text("right", "green") if after[i] == expected else Text(f"wrong: {expected}", "red")
        table.add_row(task.question(rows[i]), Text(before[i], "dim"), Text(after[i], "bold"), mark)
    console.print(table)


def print_summary(
    console: Console,
    straight: WatchedRun,
    killed: WatchedRun,
    comparison: Comparison,
    timeline: Timeline,
    rows: Sequence[task.Row],
    before: Sequence[str],
    after: Sequence[str],
) -> None:
    table = Table(
        box=box.SIMPLE_HEAD, title="What happened", title_justify="left", title_style="bold", show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    scores = f"{task.exact_match(before, rows):.1%} -> [bold]{task.exact_match(after, rows):.1%}[/bold]"
    table.add_row("held-out exact match", f"{scores} of {len(rows)} sums")
    losses, validations = straight.values("train"), straight.values("val")
    ends = f"{number(losses[0])} -> {number(statistics.fmean(losses[-SAVE_PERIOD:]))}"
    table.add_row("loss", f"{ends} in training, {number(validations[-1])} on held-out sums")
    rate = f"{statistics.fmean(1 / timing['step_s'] for timing in straight.timings()):.0f} steps/s"
    table.add_row("steps", f"{straight.step:,} in each run, one thread each, {rate}")
    table.add_row("saves", _saves_text(straight))
    for kill in killed.kills:
        when = "while it was being written" if kill.in_mid_save else "just after it was committed"
        table.add_row("SIGKILL", f"at the save of step {kill.step}, {when}")
    table.add_row(
        "resume",
        f"from step {killed.resumed_from}, the newest checkpoint that verified",
    )
    table.add_row("killed run = other run", _comparison_text(comparison))
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in timeline.totals.items())
    table.add_row("time", f"{duration(timeline.elapsed_s())}: {phases}")
    console.print(table)


def _saves_text(run: WatchedRun) -> str:
    """A save shows in the line of the step that it held up, the next one; the last save in none."""
    timings = run.timings()
    held_up = [timing["save_s"] for timing in timings[SAVE_PERIOD::SAVE_PERIOD]]
    written = [timing for timing in timings if "save_bytes" in timing]
    seconds = statistics.fmean(timing["save_background_s"] for timing in written)
    each = f"{size(written[-1]['save_bytes'])} in {duration(seconds)} in the background"
    count = f"{NUM_STEPS // SAVE_PERIOD} in each run, the best three kept"
    return f"{count}; one holds training up for {duration(statistics.median(held_up))} and writes {each}"


def _comparison_text(comparison: Comparison) -> Text:
    what = (
        f"{comparison.num_tensors} tensors of weights and optimizer ({size(comparison.num_bytes)}), "
        f"{comparison.num_files} files of the last checkpoint, {comparison.num_lines:,} lines of metrics"
    )
    if comparison.same:
        return Text.assemble(("bit for bit", "bold green"), f": {what}")
    return Text.assemble((f"{len(comparison.differences)} differences", "bold red"), f" in {what}")


def print_end(console: Console, folder: DemoFolder, found: Sequence[str]) -> None:
    if found:
        for failure in found:
            console.print(Text(f"FAILED: {failure}", "bold red"), soft_wrap=True)
        return
    _say(console, "Next", f"the folder {folder.root} is yours to play with")
    weights = folder.root / "killed" / "checkpoints" / f"step_{NUM_STEPS}" / "policy" / "weights"
    for command, does in _next_commands(folder.root, weights).items():
        console.print(Text.assemble(("  $ ", "dim"), (command, "cyan"), (f"   {does}", "dim")), soft_wrap=True)


def _next_commands(root: Path, weights: Path) -> dict[str, str]:
    checkpoints = weights.parents[2]
    return {
        f"surefoot ckpt ls {checkpoints}": "what is there, and which run it belongs to",
        f"surefoot ckpt verify {weights.parents[1]}": "every byte against the manifest",
        f"surefoot train {root / 'sft.yaml'} run_dir={root / 'again'} seed=1": "train it yourself; Ctrl-C saves and stops",
        f"surefoot resume {root / 'again'}": "and goes on where it stopped",
        f"tensorboard --logdir {root}": "the curves",
    }


def _say(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<17}", "bold"), text), soft_wrap=True)
