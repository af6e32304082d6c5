"""`make torture`: the long form of these tests, with a line for each case and torture and a table in the end.

    python -m tests.torture [--kills N] [--powercuts N] [--flips N] [--operations N]
                            [--only NAME] [--cases CASE,CASE] [--seed N]

N is for each case of `tests/helpers/runs.py`. Every random choice follows from the seed, which each failure names. Exit
status 1 when anything went wrong.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.helpers import mounts, runs
from tests.helpers.fork_server import ForkServer
from tests.torture import flipped_runs, moments, operations
from tests.torture.real_runs import Progress, Reference, Tally

Torture = Callable[[Progress], Tally]

HOWS = {"kill at operations": "kill", "kill without exchange": "kill without exchange", "fail operations": "fail"}
NAMES = (*HOWS, "kills", "power cuts", "flips")


def main() -> int:
    arguments = _arguments()
    console = Console()
    logging.getLogger("surefoot").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="surefoot-torture-", dir=shared if shared.is_dir() else None) as folder,
        ForkServer() as server,
    ):
        results = [
            _run(console, f"{case}: {name}", torture)
            for case in arguments.cases
            for name, torture in _tortures(server, Path(folder), case, arguments)
        ]
    console.print(_table(results))
    for title, tally, _ in results:
        for failure in tally.failures:
            console.print(f"[red]FAILED[/red] {title.partition(':')[0]}: {failure}", highlight=False, soft_wrap=True)
    return int(any(tally.failures for _, tally, _ in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture", description="Torture real runs; find what is lost."
    )
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs at random moments")
    parser.add_argument("--powercuts", type=int, default=100, help="power cuts at random moments (needs root)")
    parser.add_argument("--flips", type=int, default=300, help="single damages to a checkpoint's files")
    parser.add_argument("--operations", type=int, help="storage operations to kill or fail at; default: every one")
    parser.add_argument("--only", choices=NAMES, help="only this one")
    parser.add_argument("--cases", type=_cases, default=list(runs.CASES), help=f"of {', '.join(runs.CASES)}")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _cases(text: str) -> list[str]:
    cases = text.split(",")
    if unknown := [case for case in cases if case not in runs.CASES]:
        raise argparse.ArgumentTypeError(f"there is no case {', '.join(unknown)}; there are {', '.join(runs.CASES)}")
    return cases


def _tortures(
    server: ForkServer, folder: Path, case: str, arguments: argparse.Namespace
) -> Iterator[tuple[str, Torture]]:
    reference = Reference.made(server, folder / case, case)
    work, seed = folder / case / "work", arguments.seed
    every: dict[str, Torture] = {
        name: functools.partial(operations.torture, server, reference, work, how, arguments.operations, seed)
        for name, how in HOWS.items()
    }
    every["kills"] = functools.partial(moments.kill, server, reference, work, arguments.kills, seed)
    every["power cuts"] = functools.partial(moments.cut_power, server, reference, work, arguments.powercuts, seed)
    if reason := mounts.why_not():
        every["power cuts"] = lambda progress: Tally("power cuts", notes=f"skipped: {reason}")
    every["flips"] = functools.partial(flipped_runs.flip, reference, work, arguments.flips, seed)
    yield from ((name, torture) for name, torture in every.items() if arguments.only in (None, name))


def _run(console: Console, title: str, torture: Torture) -> tuple[str, Tally, float]:
    started_s = time.monotonic()
    with console.status(f"{title} …") as status:

        def progress(done: int) -> None:
            status.update(f"{title}: {done} done in {time.monotonic() - started_s:.0f} s")

        tally = torture(progress)
    seconds = time.monotonic() - started_s
    line = f"{title}: {tally.done} done, {len(tally.failures)} failed, {seconds:.0f} s"
    console.print(f"{line} ({tally.notes})" if tally.notes else line, highlight=False, soft_wrap=True)
    return title, tally, seconds


def _table(results: list[tuple[str, Tally, float]]) -> Table:
    table = Table("torture", "done", "failed", "seconds", "", title="What was done, and what was lost")
    for title, tally, seconds in results:
        failed = f"[red]{len(tally.failures)}[/red]" if tally.failures else "0"
        table.add_row(title, str(tally.done), failed, f"{seconds:.0f}", tally.notes)
    return table


if __name__ == "__main__":
    sys.exit(main())
