"""The run's one folder: claimed for a new run, moved aside on `--overwrite` and back when the start fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from surefoot.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"
ATTEMPT_FILE = "attempt.json"


def claim(run_dir: Path, checkpoint_dir: Path, *, overwrite: bool) -> Iterator[Path]:
    """See that a new run may use both folders. Makes nothing. With `overwrite`, gives each folder that holds an old
    run, to be moved aside before the next one is looked at.

    Raises:
        CheckpointError: a folder is a file, holds another run (without `overwrite`), or files of something else.
    """
    for folder in dict.fromkeys((run_dir, checkpoint_dir)):
        try:
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"{folder} is a file; a run needs a folder of its own")
            found = sorted(p.name for p in folder.iterdir() if not _is_empty_shell(p)) if folder.exists() else []
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be used: {error.strerror}; name another folder") from error
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
        yield folder


def give_back(folder: Path) -> None:
    """After a start that failed: remove a folder with nothing but its lock file, so that it can be tried again. Who
    calls this holds the lock: another start may be using the folder."""
    if all(_is_of_a_start(path) for path in folder.iterdir()):
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
    try:
        what = "" if config.is_file() else f"it has no {CONFIG_FILE}" if run_dir.exists() else "there is no such folder"
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
    if what:
        raise ConfigError(f"{run_dir} is not a run: {what}. Name the run_dir of a run that `surefoot train` started")
    return config


def refuse_lost(run_dir: Path, checkpoint_dir: Path) -> None:
    """For a resume that finds no checkpoint: begin at step 0 only where this run's checkpoints would be.

    Raises:
        CheckpointError: the run did steps, and never used this folder for checkpoints.
    """
    metrics = run_dir / METRICS_FILE
    if not (checkpoint_dir / ATTEMPT_FILE).exists() and metrics.is_file() and metrics.stat().st_size:
        raise CheckpointError(
            f"{checkpoint_dir} has no checkpoint of the run in {run_dir}, which has done steps by its {METRICS_FILE}. "
            f"Set checkpointing.checkpoint_dir to where its checkpoints are, name one with --from, or start anew with "
            f"`surefoot train --overwrite`"
        )


def check_rescue_dir(rescue_dir: Path, run_dir: Path, checkpoint_dir: Path) -> None:
    """Raises `CheckpointError` when nothing could be rescued there: better now than when it is needed."""
    if rescue_dir.resolve() in (run_dir.resolve(), checkpoint_dir.resolve()):
        raise CheckpointError(
            f"checkpointing.rescue_dir is {rescue_dir}, where the run itself writes: that disk will have failed; "
            f"name a folder on another disk"
        )
    there = next((path for path in (rescue_dir, *rescue_dir.parents) if os.access(path, os.F_OK)), rescue_dir)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"checkpointing.rescue_dir is {rescue_dir}, and {there} is no folder that this user may write to"
        )


def _is_run(folder: Path) -> bool:
    """A `config.yaml` alone makes no run: many a project has one, beside its data."""
    others = (LOCK_FILE, METRICS_FILE, "checkpoints")
    config = (folder / CONFIG_FILE).is_file() and any((folder / name).exists() for name in others)
    return config or (folder / ATTEMPT_FILE).is_file()


def _is_empty_shell(path: Path) -> bool:
    """What a start that was killed leaves: its files, or a checkpoints folder with nothing else in it."""
    if path.is_dir() and not path.is_symlink():
        return path.name == "checkpoints" and all(_is_of_a_start(inner) for inner in path.iterdir())
    return _is_of_a_start(path)


def _is_of_a_start(path: Path) -> bool:
    """The lock, the file that proves that the folder can be written to, and half a configuration."""
    ours = path.name.startswith(LOCK_FILE) or path.name == f".{CONFIG_FILE}.tmp"
    return ours and path.is_file() and not path.is_symlink()


def move_aside(folder: Path) -> Path:
    """To the first free `<folder>.bak_<k>`, which is returned. Raises `CheckpointError` when that cannot be."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.bak_{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be moved aside to {target}: {error.strerror}") from error
    _log.warning("the old run is now at %s", target)
    return target


def move_back(aside: Path, folder: Path) -> None:
    """After a start that failed. Where that left something in the folder, the old run stays where it is."""
    try:
        aside.rename(folder)
    except OSError as error:
        _log.error("the old run stays at %s: it cannot be moved back to %s: %s", aside, folder, error.strerror)
    else:
        _log.warning("no new run has begun: the old one is back at %s", folder)
