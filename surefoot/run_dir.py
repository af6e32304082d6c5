"""The run's one folder: claimed for a new run, moved aside on `--overwrite`, given back when a start fails."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from surefoot.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"


def claim(run_dir: Path, checkpoint_dir: Path, *, overwrite: bool) -> None:
    """See that a new run may use both folders. Makes nothing; moves an old run aside only if told to.

    Raises:
        CheckpointError: a folder is a file, holds another run (without `overwrite`), or files of something else.
    """
    for folder in dict.fromkeys((run_dir, checkpoint_dir)):
        if not folder.exists():
            continue
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; a run needs a folder of its own")
        found = sorted(path.name for path in folder.iterdir() if not _is_empty_shell(path))
        if not found:
            continue
        shown = ", ".join(found[:5]) + (" …" if len(found) > 5 else "")
        if not _is_run(folder):
            raise CheckpointError(
                f"{folder} holds files that are not a run's ({shown}); name an empty or new folder as run_dir"
            )
        if not overwrite:
            raise CheckpointError(
                f"{folder} holds a run ({shown}). Continue it with `surefoot resume {run_dir}`, or start anew with "
                f"--overwrite, which moves the old run aside and deletes nothing"
            )
        _move_aside(folder)


def give_back(run_dir: Path, checkpoint_dir: Path) -> None:
    """After a start that failed: remove its lock files and empty folders, so that it can be tried again."""
    for folder in (checkpoint_dir, run_dir):
        if folder.is_dir() and all(_is_of_a_start(path) for path in folder.iterdir()):
            with suppress(OSError):
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()


def require_run(run_dir: Path) -> Path:
    """The configuration file of an existing run.

    Raises:
        ConfigError: there is no run.
    """
    config = run_dir / CONFIG_FILE
    if not config.is_file():
        what = "there is no such folder" if not run_dir.exists() else f"it has no {CONFIG_FILE}"
        raise ConfigError(f"{run_dir} is not a run: {what}. Name the run_dir of a run that `surefoot train` started")
    return config


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / "attempt.json").is_file()


def _is_empty_shell(path: Path) -> bool:
    """What a start that was killed leaves: its files, or a checkpoints folder with nothing else in it."""
    if path.is_dir() and not path.is_symlink():
        return path.name == "checkpoints" and all(_is_of_a_start(inner) for inner in path.iterdir())
    return _is_of_a_start(path)


def _is_of_a_start(path: Path) -> bool:
    """The lock, the file that proves that the folder can be written to, and half a configuration."""
    ours = path.name.startswith(LOCK_FILE) or path.name == f".{CONFIG_FILE}.tmp"
    return ours and path.is_file() and not path.is_symlink()


def _move_aside(folder: Path) -> None:
    number = 1
    while (target := folder.with_name(f"{folder.name}.bak_{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be moved aside to {target}: {error.strerror}") from error
    _log.warning("the old run is now at %s", target)
