"""The checkpoint directory: who may use it, whether it can hold what is coming, and what is in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from surefoot.checkpoint import storage
from surefoot.checkpoint.commit import step_of
from surefoot.checkpoint.lineage import Attempt
from surefoot.checkpoint.manifest import Manifest, read_manifest, structure_problems
from surefoot.checkpoint.reader import LocalReader
from surefoot.errors import CheckpointError, CorruptCheckpoint

LOCK = ".lock"
STATUS_FILE = "latest_checkpoint_status.json"
TRAINING_INFO_FILE = "training_info.json"
TMP_PREFIX = "tmp_"


class DirectoryLock:
    """One run per directory, which is made if need be. The kernel drops the lock when the process ends, however it
    ends; forked children do not inherit it.

    Raises:
        CheckpointError: another process holds it (the message names its pid), or the directory cannot be used.
    """

    _held: ClassVar[weakref.WeakSet[DirectoryLock]] = weakref.WeakSet()

    def __init__(self, directory: Path) -> None:
        self._acquire(directory)
        while not self._is_in_place(directory):
            self.release()
            self._acquire(directory)
        with suppress(OSError):  # the lock is held all the same; whoever writes next will see
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        DirectoryLock._held.add(self)

    def _acquire(self, directory: Path) -> None:
        path = directory / LOCK
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(directory, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            self._close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(f"{path} cannot be locked: {error.strerror}") from error
            raise CheckpointError(
                f"{directory} is in use by another run (pid {holder}). Wait for it to end, or choose another directory."
            ) from None

    def _is_in_place(self, directory: Path) -> bool:
        """Between opening and locking, a start that failed may have removed the file, and another one made it anew."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(directory / LOCK))
        except OSError:
            return False

    def release(self) -> None:
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing would not do: a child may be forking just now
            self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    @classmethod
    def _forget_in_child(cls) -> None:
        """The child's copy of the descriptor would keep the lock after the parent's death."""
        for lock in cls._held:
            if lock._descriptor >= 0:
                lock._close()


def lock_all(directories: Iterable[Path]) -> ExitStack:
    """The locks of all directories, until what is returned is closed; or of none. Raises as `DirectoryLock` does."""
    with ExitStack() as locks:
        for directory in directories:
            locks.callback(DirectoryLock(directory).release)
        return locks.pop_all()


os.register_at_fork(after_in_child=DirectoryLock._forget_in_child)


def prove_usable(directory: Path) -> None:
    """Prove that files can be written, synced and renamed in the directory. Its lock is held.

    Raises:
        CheckpointError: not so, with the reason.
    """
    probe, renamed = (directory / f"{LOCK}.probe{end}" for end in ("", "_renamed"))
    try:
        probe.unlink(missing_ok=True)
        storage.write_new_file(probe, b"probe")
        probe.replace(renamed)
        storage.sync_directory(directory)
        renamed.unlink()
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoints cannot be written to {directory}: {error.strerror or error}. "
        f"Set run_dir and checkpointing.checkpoint_dir to directories that this user may write to."
    )


def check_space(directory: Path, state_bytes: int, most_kept: int, already: int = 0) -> None:
    """Refuse a run whose checkpoints will not fit: those kept, and one being written beside them.

    Args:
        state_bytes: of one checkpoint.
        already: bytes of this run's checkpoints that are there and will give way or be kept.

    Raises:
        CheckpointError: too little space is free.
    """
    needed = state_bytes * (most_kept + 1) - already
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(
            f"{directory} has {free / 2**30:.2f} GiB free, and {needed / 2**30:.2f} GiB are needed for {most_kept} "
            f"checkpoints to keep and one being written, {state_bytes / 2**30:.2f} GiB each. "
            f"Free some space, or keep fewer (checkpointing.keep_top_k, save_period)."
        )


def refuse_used(directory: Path) -> None:
    """For a new run: nothing may be there.

    Raises:
        CheckpointError: names what was found.
    """
    found = sorted(path.name for path in directory.iterdir() if not path.name.startswith(LOCK))
    if found:
        ours = any(step_of(name.removeprefix(TMP_PREFIX)) is not None for name in found)
        what = "another run's checkpoints" if ours else "files of something else"
        raise CheckpointError(
            f"{directory} holds {what} ({', '.join(found[:5])}{' …' if len(found) > 5 else ''}). "
            f"Resume that run, start with --overwrite to move it aside, or choose another directory."
        )


@dataclass(frozen=True)
class CheckpointInfo:
    """One `step_N` directory as a listing sees it: manifest and sizes checked, contents not read.

    Attributes:
        state: "complete"; "left_behind" on a branch that a resume did not go on from, or another run's; "broken".
        reason: why it is not "complete".
    """

    path: Path
    step: int
    state: Literal["complete", "left_behind", "broken"]
    reason: str = ""
    manifest: Manifest | None = None
    training_info: dict[str, Any] = field(default_factory=dict)


def inspect_checkpoint(path: Path, step: int) -> CheckpointInfo:
    try:
        if path.is_symlink() or not path.is_dir():
            raise CorruptCheckpoint(f"{path} is not a directory")
        manifest = read_manifest(path)
        problems = structure_problems(path, manifest)
        if manifest.step != step:
            problems.append(f"its manifest is that of step {manifest.step}")
        if problems:
            return CheckpointInfo(path, step, "broken", "; ".join(problems[:5]), manifest)
        info = LocalReader(path, manifest).json(TRAINING_INFO_FILE)
    except (CheckpointError, ValueError) as error:
        return CheckpointInfo(path, step, "broken", str(error))
    return CheckpointInfo(path, step, "complete", "", manifest, info if isinstance(info, dict) else {})


def scan(directory: Path) -> list[CheckpointInfo]:
    """Every `step_<digits>` in the directory, by step, without regard to lineage. What a run prunes meanwhile is left
    out."""
    if not directory.is_dir():
        return []
    steps = [(step_of(path.name), path) for path in directory.iterdir()]
    found = [inspect_checkpoint(path, step) for step, path in sorted((s, p) for s, p in steps if s is not None)]
    return [info for info in found if info.state != "broken" or os.path.lexists(info.path)]


def in_line(found: Sequence[CheckpointInfo], attempt: Attempt) -> list[CheckpointInfo]:
    """The same checkpoints, those marked that do not belong to the current line."""
    marked = []
    for info in found:
        manifest = info.manifest
        if info.state == "complete" and manifest is not None:
            number = manifest.attempt.number
            if manifest.run_id != attempt.run_id:
                info = CheckpointInfo(info.path, info.step, "left_behind", "another run wrote it", manifest)
            elif not attempt.owns(manifest.attempt, info.step):
                reason = f"attempt {number} wrote it, and the run went on from an earlier step, or in another copy"
                info = CheckpointInfo(info.path, info.step, "left_behind", reason, manifest, info.training_info)
        marked.append(info)
    return marked


def stale_temporaries(directory: Path) -> list[tuple[Path, int]]:
    """What saves that failed or were cut short left for inspection, with their steps."""
    found = [(path, step_of(path.name.removeprefix(TMP_PREFIX))) for path in sorted(directory.iterdir())]
    return [(path, step) for path, step in found if step is not None and path.name.startswith(TMP_PREFIX)]


def is_unfinished(path: Path) -> bool:
    """Whether a `tmp_step_N` is ours: a folder with what each save writes first."""
    return not path.is_symlink() and (path / TRAINING_INFO_FILE).is_file()


def last_saved(directory: Path) -> int | None:
    """The step that the status file names; `None` where there is no such file or it says nothing."""
    try:
        step = json.loads((directory / STATUS_FILE).read_bytes())["step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def write_status(directory: Path, final: Path, manifest: Manifest, metrics: dict[str, Any]) -> None:
    """Say which checkpoint finished last. Written only after the commit."""
    body = {
        "step": manifest.step,
        "path": str(final),
        "metrics": metrics,
        "num_bytes": manifest.num_bytes,
        "created": manifest.created,
    }
    storage.write_small_file(directory / STATUS_FILE, (json.dumps(body, indent=1) + "\n").encode())
