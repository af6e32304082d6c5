"""`surefoot demo`: the main job, offline, on a laptop's CPU."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def demo(
    directory: Path = typer.Option(Path("demo"), "--dir", help="Where to put everything; an earlier demo moves aside."),
    every: bool = typer.Option(
        False,
        "--all",
        help="Then go on, each measured before and after: from the same SFT model to a reward model, DPO and PPO; with "
        "the GRPO model as teacher to two smaller ones, one of them with another tokenizer.",
    ),
    seed: int = typer.Option(0, min=0, help="Of the data, the weights and the order of the rows."),
) -> None:
    """Teach a tiny model sums by mostly wrong demonstrations, then let GRPO learn past them, twice: one of the two runs
    is killed while it saves, resumes, and ends the same, bit for bit."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported; everything here is local
    from rich.console import Console

    from surefoot.demo import story

    try:
        held = story.tell(directory, seed, Console(), further_stages=every)
    except KeyboardInterrupt:
        typer.secho(f"interrupted: all runs are stopped, what they wrote stays in {directory}", fg="red", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(not held)
