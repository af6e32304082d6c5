"""`surefoot train` and `surefoot resume`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from surefoot.config import RunConfig

OVERRIDES = typer.Argument([], help="dotted.key=value …")


def train(
    config: Path = typer.Argument(help="The run's YAML file."),
    overrides: list[str] = OVERRIDES,
    overwrite: bool = typer.Option(False, help="Move an old run in run_dir aside (to run_dir.bak_1 …) and start anew."),
) -> None:
    """Start a run in a new run_dir."""
    from surefoot.config_file import load_config

    loaded = load_config(config, overrides or ())
    if not overwrite:
        _refuse_used_folders(loaded)  # `build` would too, after some seconds
    with _before_it_begins():
        from surefoot import build  # after the configuration is known to be right: this import is heavy

        run = build.start(loaded, overwrite=overwrite)
    _turn(run)


def resume(
    run_dir: Path = typer.Argument(help="The folder of the run to continue."),
    overrides: list[str] = OVERRIDES,
    from_: Path | None = typer.Option(None, "--from", help="This checkpoint, instead of the newest that verifies."),
    allow: list[str] = typer.Option(
        [],
        help="Let this differ from the checkpoint: dataset, model, tokenizer, chat_template, algorithm, a key of the "
        "configuration, or a section with all keys beneath it, such as policy.lora. May be given several times.",
    ),
) -> None:
    """Continue a run from its newest checkpoint that verifies."""
    with _before_it_begins():
        from surefoot import build

        run = build.resume(run_dir, overrides or (), checkpoint=from_, allow=frozenset(allow))
    _turn(run)


def _refuse_used_folders(config: RunConfig) -> None:
    """Raises `CheckpointError` when a new run may not use its folders as they are. Makes nothing."""
    from surefoot.run_dir import claim

    run_dir, named = Path(config.run_dir).expanduser().absolute(), config.checkpointing.checkpoint_dir
    for _ in claim(run_dir, Path(named).expanduser() if named else run_dir / "checkpoints", overwrite=False):
        pass


@contextmanager
def _before_it_begins() -> Iterator[None]:
    """Ctrl-C while a run is being prepared is said here: typer would end the process without a word."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("interrupted before the run began; nothing was trained or saved", fg="red", err=True)
        raise typer.Exit(130) from None


def _turn(run: object) -> None:
    from surefoot import loop
    from surefoot.run import Run

    assert isinstance(run, Run)
    outcome = loop.train(run)
    typer.echo(f"{outcome.reason}; {outcome.steps} steps done, the run is at step {run.clock.step}")
    saved = run.checkpoints.get_latest_checkpoint_path()
    if saved is not None:
        config = run.kit.config
        done = {"max_num_steps": run.clock.step, "max_num_epochs": run.source.epoch + 1}
        further = "".join(f" {key}={2 * max(done[key], getattr(config, key))}" for key in loop.limits_reached(run))
        going_on = "to go on, for longer" if further else "to go on"
        typer.echo(f"saved as {saved}; {going_on}: surefoot resume {shlex.quote(config.run_dir)}{further}")
    raise typer.Exit(outcome.exit_code)
