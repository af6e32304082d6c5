"""A progress bar for work before the first step, such as tokenizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def preparing(console: Console, what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function to be told how much is done, and of how much. Draws nothing where there is no terminal."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
