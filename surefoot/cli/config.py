"""`surefoot config`: look at a run's configuration without running it."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Show or check a configuration.", no_args_is_help=True)

CONFIG = typer.Argument(help="The run's YAML file.")
OVERRIDES = typer.Argument([], help="dotted.key=value …")


@app.command()
def show(config: Path = CONFIG, overrides: list[str] = OVERRIDES) -> None:
    """Print the effective configuration, defaults included."""
    from surefoot.config_file import config_as_yaml, load_config

    typer.echo(config_as_yaml(load_config(config, overrides or ())), nl=False)


@app.command()
def check(config: Path = CONFIG, overrides: list[str] = OVERRIDES) -> None:
    """Validate the configuration and end; exit status 2 when it cannot be run."""
    from surefoot.config_file import load_config

    loaded = load_config(config, overrides or ())
    typer.echo(f"{config} is valid: algorithm {loaded.algorithm}, run_dir {loaded.run_dir}")
