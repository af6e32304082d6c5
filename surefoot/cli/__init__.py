"""The command line. Each command imports what it needs when it runs, so that `surefoot --help` is quick."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import metadata

import typer

from surefoot import stop  # imported first: it notes when the process started
from surefoot.cli import ckpt, config, data, demo, evaluate, model, run, score
from surefoot.errors import SurefootError

# TorchInductor, tokenizers and OpenMP read these when they start.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {metadata.version('surefoot')}")
        raise typer.Exit


app = typer.Typer(
    name="surefoot",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(run.train)
app.command("resume")(run.resume)
app.command("eval")(evaluate.evaluate)
app.command("score")(score.score)
app.command("demo")(demo.demo)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print it and end."),
) -> None:
    """Post-trains language models and never loses the run."""


def main() -> None:
    """Entry point. An error raised on purpose is printed without a traceback."""
    assert stop.PROCESS_STARTED_S > 0
    _find_own_modules()
    try:
        app()
    except SurefootError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # a path that cannot be, no permission, a full disk under the output: it names the file
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(1)


def _find_own_modules() -> None:
    """A dotted path, such as a reward function's, may name a module in the working directory. It comes last, and so
    hides no installed one."""
    with suppress(OSError):  # the directory may be gone
        here = os.getcwd()  # noqa: PTH109 (a text is what belongs in sys.path)
        if here not in sys.path and not sys.flags.safe_path:
            sys.path.append(here)
