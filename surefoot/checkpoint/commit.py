"""How a finished temporary directory becomes a checkpoint, and how an old one leaves without ever being half there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.checkpoint import storage
from surefoot.errors import CheckpointError

TRASH = ".trash"
_SWAP = ".swap_"  # where the old one waits while a file system that cannot exchange two names swaps them
_STEP = re.compile(r"step_([0-9]+)")
_SWAPPED = re.compile(re.escape(_SWAP) + r"(step_[0-9]+)")

_TRASHED = re.compile(rf"(tmp_|{re.escape(_SWAP)})?step_\d+\.\d+")


def step_of(name: str) -> int | None:
    """The step in exactly `step_<digits>`, else `None`."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def commit(temporary: Path, final: Path, retire: Callable[[Path], None]) -> None:
    """Give a complete, synced directory its final name and make that name survive a power cut.

    If `final` exists, the two are exchanged in one atomic step, and `retire` gets the old one once the exchange is
    durable. Where the file system cannot do that, two renames do it, and `recover_swaps` mends what a crash between
    them leaves.

    Raises:
        OSError: after a failure the old checkpoint, if there was one, is still there under one of the two names.
    """
    parent = final.parent
    if not os.path.lexists(final):
        storage.rename(temporary, final)
        storage.sync_directory(parent)
    elif storage.exchange(temporary, final):
        storage.sync_directory(parent)
        retire(temporary)
    else:
        waiting = parent / f"{_SWAP}{final.name}"
        storage.rename(final, waiting)
        storage.sync_directory(parent)
        storage.rename(temporary, final)
        storage.sync_directory(parent)
        retire(waiting)


def recover_swaps(directory: Path) -> list[Path]:
    """Mend swaps that a crash cut in two: the old checkpoint goes back to its name if nothing has taken it, else into
    the trash. Returns what was put back."""
    restored = []
    for path in sorted(directory.iterdir()):
        match = _SWAPPED.fullmatch(path.name)
        if not match:
            continue
        final = directory / match[1]
        if os.path.lexists(final):
            to_trash(path)
        else:
            storage.rename(path, final)
            storage.sync_directory(directory)
            restored.append(final)
    return restored


def to_trash(path: Path) -> Path:
    """Move a directory out of sight, durably: deleting may only begin once its name can no longer come back."""
    trash = path.parent / TRASH
    if not os.path.lexists(trash):
        storage.make_directory(trash)
        storage.sync_directory(path.parent)
    if trash.is_symlink() or not trash.is_dir():
        raise CheckpointError(f"{trash} is not a folder; Surefoot needs this name for what it deletes")
    target = trash / f"{path.name}.{time.time_ns()}"
    storage.rename(path, target)
    storage.sync_directory(trash)
    storage.sync_directory(path.parent)
    return target


def empty_trash(directory: Path) -> None:
    """Delete what lies in the trash. Links in it are removed, never followed."""
    trash = directory / TRASH
    if trash.is_dir() and not trash.is_symlink():
        for path in sorted(trash.iterdir()):
            if _TRASHED.fullmatch(path.name):
                storage.remove_tree(path)


def set_aside(path: Path, name: str) -> Path:
    """Rename something that is not ours to delete to the first free `<name>.bak_<k>`."""
    for number in range(1, 1_000_000):
        target = path.with_name(f"{name}.bak_{number}")
        if not os.path.lexists(target):
            storage.rename(path, target)
            storage.sync_directory(path.parent)
            return target
    raise CheckpointError(f"{path} cannot be set aside: a million names are taken")
