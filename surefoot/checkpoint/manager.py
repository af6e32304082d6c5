"""The checkpoint manager: saves in the background, commits atomically, and lets no failure go unseen.

One save: `offer` asks the policy, settles and captures every part, and `save` hands the writers to a background
thread, which runs them through a sink, writes the manifest, commits `tmp_step_N` as `step_N`, updates the status file
and queues the pruning. A failure on the way is recorded and raised by the loop's next poll. What is not here: object
stores, several ranks, copy-on-write capture.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel

from surefoot.checkpoint import commit, directory, lineage, resume, storage
from surefoot.checkpoint.background import Finalization
from surefoot.checkpoint.directory import CheckpointInfo
from surefoot.checkpoint.manifest import MANIFEST_FILE, Fingerprint, Manifest, encode_manifest, read_manifest
from surefoot.checkpoint.plain import as_yaml, plain_json
from surefoot.checkpoint.policy import SavePolicy
from surefoot.checkpoint.processes import give_way
from surefoot.checkpoint.reader import LocalReader
from surefoot.checkpoint.retention import Candidate, Retention
from surefoot.checkpoint.sink import LocalSink
from surefoot.checkpoint.verify import open_verified
from surefoot.config import CheckpointingConfig
from surefoot.errors import CheckpointError, SaveFailed
from surefoot.types import Saveable, SaveEvent, Writer

_log = logging.getLogger(__name__)
_CONFIG_FILE = "config.yaml"


class _Draft:
    """A checkpoint being made: where it is written, and what went through its sink."""

    def __init__(self, folder: Path, step: int, training_info: Mapping[str, Any]) -> None:
        self.path = folder / f"tmp_step_{step}"
        self.step = step
        self.training_info: dict[str, Any] = plain_json(dict(training_info))
        self.sink = LocalSink(self.path)
        self.started_s = time.monotonic()

    @property
    def final(self) -> Path:
        return self.path.with_name(f"step_{self.step}")


class CheckpointManager:
    """Saves, keeps and finds checkpoints. Making one touches nothing; `open` takes hold of the directory for a run.

    Two threads may use it: the loop, and a pump that waits for finalizations. `save_lock` is what a save and the loop's
    poll share; whoever holds it may call anything here but `offer` and `rescue`, which take it themselves.

    Args:
        config: the `checkpointing` section, or a mapping with its keys.
        run_dir: for the default `checkpoint_dir`, `<run_dir>/checkpoints`.
        run_config_text: the effective configuration, written to each checkpoint's `config.yaml`.
        fingerprints: of what the run is made of; recorded in each manifest.
        listener: told what happens; may be called from the background thread.
    """

    def __init__(
        self,
        config: CheckpointingConfig | Mapping[str, Any],
        *,
        run_dir: str | Path | None = None,
        run_config_text: str | None = None,
        fingerprints: Mapping[str, Fingerprint] | None = None,
        listener: Callable[[SaveEvent], None] | None = None,
    ) -> None:
        self.config = _as_config(config)
        self.checkpoint_dir = _directory_of(self.config, run_dir)
        self._folders = dict.fromkeys([*([] if run_dir is None else [Path(run_dir)]), self.checkpoint_dir])
        self.policy = SavePolicy(self.config.save_period, self.config.ft_save_period)
        self.retention = Retention(
            self.config.save_period,
            self.config.keep_top_k,
            self.config.metric_name,
            self.config.higher_is_better,
            self.config.ft_keep_latest_k,
        )
        self.fingerprints = dict(fingerprints or {})
        self.save_lock = threading.Lock()
        self._run_config_text = run_config_text
        self._listener = listener
        self._directory_lock: ExitStack | None = None
        self._attempt: lineage.Attempt | None = None
        self._attempt_notes: tuple[str, ...] = ()
        self._drafts: dict[Path, _Draft] = {}
        self._work: Finalization | None = None
        self._consuming = threading.Lock()  # so that a failure is raised once, whoever asks
        self._renaming = threading.Lock()  # commits and pruning see a directory that holds still
        self._deleting = threading.Lock()
        self._pruner: ThreadPoolExecutor | None = None
        self._failed: set[Path] = set()  # temporary directories that are never tried again
        self._unsure: set[int] = set()  # steps whose commit failed half-way; the next start verifies them
        self._reported: set[tuple[int, str]] = set()

    # ------------------------------------------------------------------------------------------- a run takes hold

    def open(self, resume: bool, *, state_bytes: int = 0, num_saves: int | None = None) -> None:
        """Lock the directory and the run's, prove that it can be used, and clean up what a crash left.

        Args:
            resume: go on with the run that is there; else nothing may be there.
            state_bytes: size of one checkpoint, for the check of free space; 0 where not known yet (`check_space`).
            num_saves: how many saves the whole run makes, if known.

        Raises:
            CheckpointError: another run uses it, it holds something, it cannot be written to, or it is too small.
        """
        self._directory_lock = self._directory_lock or directory.lock_all(self._folders)
        try:
            directory.prove_usable(self.checkpoint_dir)
            if not resume:
                directory.refuse_used(self.checkpoint_dir)
            for path in commit.recover_swaps(self.checkpoint_dir):
                self._warn(path, "was half-way through being replaced when the run ended; the old one is back")
            newest = max((info.step for info in self._complete()), default=-1)
            for path, step in directory.stale_temporaries(self.checkpoint_dir):
                if step <= newest and directory.is_unfinished(path):
                    commit.to_trash(path)
                else:
                    self._warn(path, "is from a save that did not finish; it is kept until that step is saved again")
            commit.empty_trash(self.checkpoint_dir)
            self.check_space(state_bytes, num_saves)
        except OSError as error:
            self._unlock()
            raise CheckpointError(f"{self.checkpoint_dir} cannot be cleaned up after the last run: {error}") from error
        except BaseException:
            self._unlock()
            raise

    def check_space(self, state_bytes: int, num_saves: int | None = None) -> None:
        """Raises `CheckpointError` when the checkpoints that will be kept, and one more, do not fit."""
        already = sum(info.manifest.num_bytes for info in self._complete() if info.manifest)
        directory.check_space(self.checkpoint_dir, state_bytes, self.retention.most_kept(num_saves), already)

    def choose_resume(self, explicit: str | Path | None = None) -> resume.ResumePoint:
        """The checkpoint to go on from: the one named, or the newest of the line that verifies.

        Raises:
            CheckpointError: the one named is not there.
            CorruptCheckpoint: the one named is broken, or there are checkpoints and none is sound.
        """
        attempt = self.attempt
        if explicit is not None:
            if not os.path.lexists(explicit):
                there = ", ".join(info.path.name for info in self.list_checkpoints()) or "none"
                raise CheckpointError(f"there is no checkpoint {explicit}. In {self.checkpoint_dir}: {there}")
            return resume.ResumePoint(open_verified(Path(explicit)), (), self._attempt_notes)
        point = resume.newest_sound(self.checkpoint_dir, self.list_checkpoints(), attempt)
        return resume.ResumePoint(point.reader, point.skipped, self._attempt_notes)

    def start_attempt(self, point: resume.ResumePoint | None = None) -> None:
        """Put on record, before anything else is written, what this run goes on from.

        Raises:
            CheckpointError: it cannot be written.
        """
        found = directory.scan(self.checkpoint_dir)
        used = [entry.attempt for info in found if info.manifest for entry in info.manifest.lineage]
        current = self.attempt if used or (self.checkpoint_dir / lineage.ATTEMPT_FILE).exists() else None
        used += [entry.attempt for entry in current.lineage] if current else []
        point = point or resume.ResumePoint(None)
        self._attempt = resume.next_attempt(self.checkpoint_dir, current, point, max(used, default=0))
        try:
            lineage.write_attempt(self.checkpoint_dir, self._attempt)
        except OSError as error:
            raise CheckpointError(f"{self.checkpoint_dir / lineage.ATTEMPT_FILE} cannot be written: {error}") from error

    @property
    def attempt(self) -> lineage.Attempt:
        """The attempt that is going on, as far as the directory tells."""
        if self._attempt is None:
            self._attempt, self._attempt_notes = lineage.find_attempt(
                self.checkpoint_dir,
                [info.manifest.attempt for info in directory.scan(self.checkpoint_dir) if info.manifest],
            )
            for note in self._attempt_notes:
                _log.warning(note)
        return self._attempt

    # -------------------------------------------------------------------------------------------------- saving

    def offer(self, step: int, training_info: Mapping[str, Any], parts: Mapping[str, Saveable], final: bool) -> None:
        """Save if the policy says that this step is due, or if it is the run's `final` one, and it is not saved yet.

        Waits for the save before, settles and captures all parts, and returns while they are written.

        Raises:
            SaveFailed: the save before this one failed, or with `is_async: false` this one.
        """
        if not self.config.enabled or not (final or self.policy.due(step)):
            return
        with self.save_lock:
            self.finalize_pending()
            if not self._is_saved(step):
                self.save(step, training_info, _captured(parts))

    def rescue(self, step: int, training_info: Mapping[str, Any], parts: Mapping[str, Saveable]) -> Path | None:
        """Save synchronously under `rescue_dir`, where nothing is ever replaced. `None` when none is configured."""
        if self.config.rescue_dir is None:
            return None
        with self.save_lock:
            self.wait_for_finalization()
            top = Path(self.config.rescue_dir).absolute()
            folders = itertools.chain([top], (top / f"rescue_{number}" for number in itertools.count(1)))
            folder = next(folder for folder in folders if not (folder / f"step_{step}").exists())
            lock = directory.DirectoryLock(folder)
            try:
                writers = _captured(parts)
                draft = _Draft(folder, step, training_info)
                self._write(draft, writers)
                self._complete_draft(draft)
            finally:
                lock.release()
        return draft.final

    def save(self, step: int, training_info: Mapping[str, Any], writers: Mapping[str, Writer]) -> None:
        """Start a save whose parts are written by `writers`, each in its own folder; returns while they run, or with
        `is_async: false` when they are done."""
        self.finalize_pending()
        draft = _Draft(self.checkpoint_dir, step, training_info)
        run = self._finalize_later if self.config.is_async else self._finalize_now
        run(draft, lambda: self._write(draft, writers))

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, Any], run_config: Mapping[str, Any] | BaseModel | None = None
    ) -> Path:
        """A fresh `tmp_step_N` with `training_info.json` and `config.yaml`; a stale one goes to the trash."""
        if self._work is not None and self._work.step == step:
            self.finalize_pending()
        draft = _Draft(self.checkpoint_dir, step, training_info)
        self._begin(draft, run_config)
        self._drafts[draft.path] = draft
        return draft.path

    def sink(self, path: str | Path) -> LocalSink:
        """What is written through it is hashed on its way. `path`: from `init_tmp_checkpoint`."""
        return self._draft(path).sink

    def begin_finalization(self, path: str | Path, wait_fn: Callable[[], None] | None = None) -> None:
        """Return at once; in the background wait for the writers, take in what others wrote, write the manifest,
        commit, update the status file, queue the pruning.

        Raises:
            SaveFailed: the finalization before this one, waited for first, failed.
        """
        self.finalize_pending()
        self._finalize_later(self._draft(path), wait_fn)

    def finalize_checkpoint(self, path: str | Path, wait_fn: Callable[[], None] | None = None) -> None:
        """The same, synchronously, pruning included.

        Raises:
            SaveFailed: from what went wrong.
        """
        self.finalize_pending()
        self._finalize_now(self._draft(path), wait_fn)

    def raise_if_finalization_failed(self) -> None:
        """Raise a failure that has been recorded, once. Never waits for a save that is still running.

        Raises:
            SaveFailed: from what the background work raised.
        """
        if self._work is not None:
            self._raise_recorded()

    def _raise_recorded(self) -> None:
        work = self._work
        if work is None or not work.failed:
            return
        with self._consuming:
            if self._work is not work:
                return
            self._work = None
        work.join()
        headline = "Background checkpoint finalization failed"
        raise self._failure(headline, work.step, work.path, work.error) from work.error

    def finalize_pending(self) -> None:
        """Wait for the save in flight, not for pruning, and raise its failure."""
        self.wait_for_finalization()
        self._raise_recorded()

    def wait_for_finalization(self) -> None:
        """Wait for the save in flight. Neither raises its failure nor clears it."""
        work = self._work
        if work is not None:
            work.join()

    @property
    def has_pending_finalization(self) -> bool:
        work = self._work
        return work is not None and not work.ended

    def shutdown(self) -> None:
        """Wait for the save in flight and for pruning, and let go of the directory. Safe to call twice; the manager
        stays usable.

        Raises:
            SaveFailed: the save in flight failed.
        """
        try:
            self.finalize_pending()
        finally:
            pruner, self._pruner = self._pruner, None
            if pruner is not None:
                pruner.shutdown(wait=True)
            self._unlock()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        try:
            self.shutdown()
        except Exception as failure:
            if error is None:
                raise
            _log.error("while the run ended with %r, its last save failed too: %s", error, failure)
        return False

    # ------------------------------------------------------------------------------------------ what is there

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """Every `step_N` by step: complete, left behind, or broken. Checks manifests and sizes, not contents."""
        found = directory.scan(self.checkpoint_dir)
        return directory.in_line(found, self.attempt) if found else []

    def get_latest_checkpoint_path(self) -> Path | None:
        complete = self._complete()
        return complete[-1].path if complete else None

    def get_best_checkpoint_path(self) -> Path | None:
        """By `metric_name`, the newer of equals; the newest where no metric is named or none has a value."""
        complete = self._complete()
        best = self.retention.best(self._candidates(complete))
        return next((info.path for info in complete if best and info.step == best.step), None)

    def load_training_info(self, path: str | Path | None) -> dict[str, Any] | None:
        """Raises `CorruptCheckpoint` when the file does not agree with the manifest."""
        if path is None:
            return None
        folder = Path(path)
        value: dict[str, Any] = LocalReader(folder, read_manifest(folder)).json(directory.TRAINING_INFO_FILE)
        return value

    @staticmethod
    def get_resume_paths(path: str | Path | None, model_component: str = "policy") -> tuple[Path | None, Path | None]:
        """The folders of a model's weights and optimizer; the latter is `None` where it was not saved."""
        if path is None:
            return None, None
        weights, optimizer = (Path(path) / model_component / name for name in ("weights", "optimizer"))
        return weights, optimizer if optimizer.is_dir() else None

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Delete what no rule keeps. Only complete checkpoints of the current line count, and only they are deleted."""
        with self._renaming:
            _, gone = self.plan_pruning(exclude_latest)
            for info in gone:
                commit.to_trash(info.path)
        with self._deleting:
            commit.empty_trash(self.checkpoint_dir)
        for info in gone:
            self._tell(SaveEvent("pruned", info.step, str(info.path)))

    def plan_pruning(self, exclude_latest: bool = True) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
        """The complete checkpoints that a rule keeps, and those that none does."""
        complete = self._complete()
        kept = self.retention.survivors(self._candidates(complete), exclude_latest)
        return [i for i in complete if i.step in kept], [i for i in complete if i.step not in kept]

    # ----------------------------------------------------------------------------------------------- internals

    def _write(self, draft: _Draft, writers: Mapping[str, Writer]) -> None:
        """All of it where the writers run: making and syncing even small files may take long."""
        self._begin(draft, None)
        for name, writer in writers.items():
            writer(draft.sink.under(name))

    def _begin(self, draft: _Draft, run_config: Any) -> None:
        """The temporary directory, with what is known from the start."""
        folder = draft.path.parent
        if self._directory_lock is None or folder != self.checkpoint_dir:
            folder.mkdir(parents=True, exist_ok=True)
        elif not (folder / directory.LOCK).exists():
            raise CheckpointError(f"{folder} was deleted or unmounted since the run began: it is not what was locked")
        with self._renaming:  # a save may begin while another one does, in its own thread
            if folder == self.checkpoint_dir and not (folder / lineage.ATTEMPT_FILE).exists():
                lineage.write_attempt(folder, self.attempt)
        if os.path.lexists(draft.path):
            commit.to_trash(draft.path)
        storage.make_directory(draft.path)
        self._failed.discard(draft.path)
        draft.sink.json(directory.TRAINING_INFO_FILE, draft.training_info)
        config = self._run_config_text if run_config is None else as_yaml(run_config)
        if config is not None:
            draft.sink.bytes(_CONFIG_FILE, config.encode())

    def _draft(self, path: str | Path) -> _Draft:
        given = Path(path).absolute()
        step = commit.step_of(given.name.removeprefix("tmp_"))
        if step is None or not given.name.startswith("tmp_") or given.parent != self.checkpoint_dir:
            raise CheckpointError(f"{given} is no tmp_step_<N> in {self.checkpoint_dir}; init_tmp_checkpoint makes one")
        if given in self._failed:
            raise CheckpointError(f"{given} is what a failed save left; init_tmp_checkpoint starts a new one")
        return self._drafts.setdefault(given, _Draft(given.parent, step, {}))

    def _finalize_later(self, draft: _Draft, wait_fn: Callable[[], None] | None) -> None:
        def work() -> None:
            give_way()
            self._finalize(draft, wait_fn)
            self._prune_later()

        self._work = Finalization(draft.path, draft.step, work)

    def _finalize_now(self, draft: _Draft, wait_fn: Callable[[], None] | None) -> None:
        try:
            self._finalize(draft, wait_fn)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._failure("Checkpoint finalization failed", draft.step, draft.path, error) from error
        self._prune_and_warn()

    def _finalize(self, draft: _Draft, wait_fn: Callable[[], None] | None) -> None:
        self._tell(SaveEvent("writing", draft.step, str(draft.path)))
        try:
            if wait_fn is not None:
                wait_fn()
            manifest = self._complete_draft(draft)
            directory.write_status(self.checkpoint_dir, draft.final, manifest, draft.training_info)
        except BaseException as error:
            self._failed.add(draft.path)
            self._tell(SaveEvent("failed", draft.step, str(draft.path), message=_in_words(error)))
            raise
        finally:
            self._drafts.pop(draft.path, None)
        seconds = time.monotonic() - draft.started_s
        self._tell(SaveEvent("finished", draft.step, str(draft.final), seconds, manifest.num_bytes))

    def _complete_draft(self, draft: _Draft) -> Manifest:
        """From files on the disk to a committed checkpoint."""
        draft.sink.adopt_rest()
        manifest = Manifest(
            draft.step,
            self.attempt.run_id,
            self.attempt.lineage,
            tuple(draft.sink.entries.values()),
            dict(self.fingerprints),
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        data = encode_manifest(manifest)
        storage.write_new_file(draft.path / MANIFEST_FILE, data)
        draft.sink.sync_directories()
        with self._renaming:
            there = directory.inspect_checkpoint(draft.final, draft.step)
            ours = there.state == "complete" and there.manifest is not None and there.manifest.run_id == manifest.run_id
            inode = draft.path.stat().st_ino
            try:
                commit.commit(draft.path, draft.final, lambda old: self._retire(old, draft.final, ours))
            except BaseException:
                if draft.final.exists() and draft.final.stat().st_ino == inode:
                    self._unsure.add(draft.step)
                raise
            self._unsure.discard(draft.step)
        return manifest

    def _retire(self, old: Path, final: Path, ours: bool) -> None:
        """The new checkpoint is safe; what stood in its place goes. Not being able to is no failure of the save."""
        try:
            if ours:
                commit.to_trash(old)
            else:
                aside = commit.set_aside(old, final.name)
                self._warn(final, f"was no sound checkpoint; what was there is now {aside}")
        except (OSError, CheckpointError) as error:
            self._warn(old, f"was replaced by {final} but cannot be moved away: {error}")

    def _prune_later(self) -> None:
        if self._pruner is None:
            self._pruner = ThreadPoolExecutor(1, thread_name_prefix="prune", initializer=give_way)
        self._pruner.submit(self._prune_and_warn)

    def _prune_and_warn(self) -> None:
        try:
            self.remove_old_checkpoints()
        except Exception as error:
            self._warn(self.checkpoint_dir, f"old checkpoints could not be removed: {_in_words(error)}")

    def _complete(self) -> list[CheckpointInfo]:
        """The complete checkpoints of the line, by step; each broken one is reported once."""
        found = self.list_checkpoints()
        for info in found:
            if info.state == "broken":
                self._warn_once(info.step, info.path, f"is not counted as a checkpoint: {info.reason}")
        return [info for info in found if info.state == "complete" and info.step not in self._unsure]

    def _candidates(self, complete: list[CheckpointInfo]) -> list[Candidate]:
        candidates = [Candidate(info.step, self.retention.metric(info.training_info)) for info in complete]
        for info, candidate in zip(complete, candidates, strict=True):
            if self.config.metric_name and candidate.metric is None:
                name, measured = self.config.metric_name, info.training_info
                found = f"{name} is {measured[name]}" if name in measured else f"no {name} was measured at its step"
                self._warn_once(info.step, info.path, f"ranks worst: {found}")
        return candidates

    def _is_saved(self, step: int) -> bool:
        info = directory.inspect_checkpoint(self.checkpoint_dir / f"step_{step}", step)
        return step not in self._unsure and directory.in_line([info], self.attempt)[0].state == "complete"

    def _failure(self, headline: str, step: int, path: Path, error: BaseException) -> SaveFailed:
        try:
            safe, committed = str(self.get_latest_checkpoint_path() or "none"), self._is_saved(step)
        except Exception as problem:
            safe, committed = f"unknown, {self.checkpoint_dir} cannot be read ({problem})", False
        final = path.with_name(f"step_{step}")
        if step in self._unsure:
            left, state = final, "has its name but may not survive a power cut; the next start verifies it"
        elif path.exists():
            left, state = path, "is not committed; it stays for inspection until that step is saved again"
        elif committed:
            left, state = final, "is committed, what comes after failed"
        else:
            left, state = path, "was not even begun"
        message = f"{headline} at step {step}: {_in_words(error)}\n{left} {state}. Newest safe checkpoint: {safe}."
        return SaveFailed(message, step=step, path=str(left))

    def _warn(self, path: Path, message: str) -> None:
        _log.warning("%s %s", path, message)

    def _warn_once(self, step: int, path: Path, message: str) -> None:
        if (step, message) not in self._reported:
            self._reported.add((step, message))
            self._warn(path, message)

    def _tell(self, event: SaveEvent) -> None:
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception:
                _log.exception("a listener failed on %s", event)

    def _unlock(self) -> None:
        lock, self._directory_lock = self._directory_lock, None
        if lock is not None:
            lock.close()


def _as_config(config: CheckpointingConfig | Mapping[str, Any]) -> CheckpointingConfig:
    if isinstance(config, CheckpointingConfig):
        return config
    return CheckpointingConfig.model_validate({k: str(v) if isinstance(v, Path) else v for k, v in config.items()})


def _directory_of(config: CheckpointingConfig, run_dir: str | Path | None) -> Path:
    if config.checkpoint_dir is not None:
        return Path(config.checkpoint_dir).absolute()
    if run_dir is None:
        raise CheckpointError("neither checkpointing.checkpoint_dir nor a run_dir says where checkpoints go")
    return (Path(run_dir) / "checkpoints").absolute()


def _captured(parts: Mapping[str, Saveable]) -> dict[str, Writer]:
    for part in parts.values():
        part.settle()
    return {name: part.snapshot() for name, part in parts.items()}


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
