"""The manager's calls one by one, each against a real directory, real threads and real files."""

from __future__ import annotations

import gc
import json
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from surefoot.checkpoint import CheckpointManager, LocalReader, storage, verify_checkpoint
from surefoot.checkpoint.background import Finalization
from surefoot.config import CheckpointingConfig
from surefoot.errors import CheckpointError, CorruptCheckpoint, NonFiniteError, SaveFailed
from surefoot.types import SaveEvent, Sink, Writer
from tests.checkpoint import runs


class Gate:
    """A writer that waits until it is let go, and then fails if told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.error = error

    def __call__(self, sink: Sink | None = None) -> None:
        self.entered.set()
        assert self.release.wait(20)
        if self.error is not None:
            raise self.error


def fail_with(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: Any) -> None:
        raise error

    return raise_it


def failed_save(manager: CheckpointManager, step: int, error: BaseException) -> None:
    manager.save(step, {"step": step}, {"policy": fail_with(error)})
    manager.wait_for_finalization()


class Part:
    """A part of a run's state: one tensor, captured by copying."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.value = log, name, torch.zeros(3)

    def settle(self) -> None:
        self.log.append(f"settle {self.name}")

    def snapshot(self) -> Writer:
        self.log.append(f"snapshot {self.name}")
        captured = self.value.clone()
        return lambda sink: sink.tensors("value.safetensors", {"value": captured})

    def restore(self, reader: Any) -> None:
        self.value = reader.tensors("value.safetensors")["value"]


# ------------------------------------------------------------------------------------------------------ construction


def test_a_mapping_and_the_section_mean_the_same_and_touch_nothing(memory_path: Path) -> None:
    folder = memory_path / "checkpoints"
    by_mapping = CheckpointManager({"checkpoint_dir": folder, "save_period": 2, "keep_top_k": 3})
    section = CheckpointingConfig(checkpoint_dir=str(folder), save_period=2, keep_top_k=3)
    assert CheckpointManager(section).config == by_mapping.config
    assert CheckpointManager(section).checkpoint_dir == by_mapping.checkpoint_dir == folder
    by_run_dir = CheckpointManager(CheckpointingConfig(), run_dir=memory_path)
    assert by_run_dir.checkpoint_dir == folder
    assert list(memory_path.iterdir()) == []


def test_a_manager_without_any_directory_says_so() -> None:
    with pytest.raises(CheckpointError, match="checkpoint_dir"):
        CheckpointManager(CheckpointingConfig())


# -------------------------------------------------------------------------------------------------- init and finalize


def test_init_writes_training_info_with_numbers_and_the_config(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    info = {"loss": torch.tensor(0.5), "grad": np.float32(2.0), "rows": np.arange(2), "epoch": 1, "val:x": float("nan")}
    path = manager.init_tmp_checkpoint(3, info, run_config={"policy": {"lr": 0.1}})
    assert path == memory_path / "tmp_step_3"
    written = json.loads((path / "training_info.json").read_text())
    assert math.isnan(written.pop("val:x"))
    assert written == {"loss": 0.5, "grad": 2.0, "rows": [0, 1], "epoch": 1}
    assert yaml.safe_load((path / "config.yaml").read_text()) == {"policy": {"lr": 0.1}}
    assert isinstance(info["loss"], torch.Tensor)  # the caller's mapping is left alone


def test_the_config_may_be_a_model_or_the_text_given_at_construction(memory_path: Path) -> None:
    manager = runs.manager(memory_path, run_config_text="seed: 7\n")
    assert (manager.init_tmp_checkpoint(1, {}) / "config.yaml").read_text() == "seed: 7\n"
    path = manager.init_tmp_checkpoint(2, {}, run_config=CheckpointingConfig(save_period=9))
    assert yaml.safe_load((path / "config.yaml").read_text())["save_period"] == 9


def test_init_moves_a_stale_tmp_into_the_trash_and_starts_fresh(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    stale = manager.init_tmp_checkpoint(2, {"loss": 1})
    (stale / "half").write_text("written")
    fresh = manager.init_tmp_checkpoint(2, {"loss": 2})
    assert not (fresh / "half").exists()
    assert [path.name.split(".")[0] for path in (memory_path / ".trash").iterdir()] == ["tmp_step_2"]
    manager.finalize_checkpoint(fresh)
    assert manager.load_training_info(memory_path / "step_2") == {"loss": 2}


def test_finalize_adopts_what_others_wrote_and_commits(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    path = manager.init_tmp_checkpoint(2, {"loss": 1.0})
    (path / "policy").mkdir()
    (path / "policy" / "model.bin").write_bytes(b"by a third party")
    manager.finalize_checkpoint(path)
    final = memory_path / "step_2"
    assert not path.exists()
    assert LocalReader.open(final).bytes("policy/model.bin") == b"by a third party"
    assert verify_checkpoint(final).sound
    status = json.loads((memory_path / "latest_checkpoint_status.json").read_text())
    assert (status["step"], status["path"], status["metrics"]) == (2, str(final), {"loss": 1.0})


def test_begin_finalization_runs_the_wait_fn_before_it_adopts(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    path = manager.init_tmp_checkpoint(2, {})
    manager.begin_finalization(path, lambda: (path / "late.txt").write_text("late") and None)
    manager.finalize_pending()
    assert LocalReader.open(memory_path / "step_2").bytes("late.txt") == b"late"


def test_finalizing_what_is_no_tmp_step_is_refused(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    for path in (memory_path / "step_2", memory_path / "elsewhere", memory_path.parent / "tmp_step_2"):
        with pytest.raises(CheckpointError, match="tmp_step"):
            manager.begin_finalization(path)


def test_a_step_saved_again_replaces_the_old_one(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    runs.save(manager, 2, version=1)
    runs.save(manager, 2, version=2)
    assert runs.version_of(memory_path / "step_2") == (2, 2)
    assert not (memory_path / "tmp_step_2").exists()
    assert list((memory_path / ".trash").iterdir()) == []


def test_what_is_not_ours_under_a_steps_name_is_set_aside_not_deleted(memory_path: Path) -> None:
    (memory_path / "step_2").mkdir()
    (memory_path / "step_2" / "notes.txt").write_text("mine")
    runs.save(runs.manager(memory_path), 2)
    assert (memory_path / "step_2.bak_1" / "notes.txt").read_text() == "mine"
    assert runs.version_of(memory_path / "step_2") == (2, 0)


# ------------------------------------------------------------------------------------------------------ failures


def test_a_recorded_failure_is_raised_once_with_its_cause(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    runs.save(manager, 2)
    cause = OSError(28, "No space left on device")
    failed_save(manager, 4, cause)
    with pytest.raises(RuntimeError, match=r"^Background checkpoint finalization failed") as raised:
        manager.raise_if_finalization_failed()
    assert raised.value.__cause__ is cause
    assert isinstance(raised.value, SaveFailed)
    assert (raised.value.step, raised.value.path) == (4, str(memory_path / "tmp_step_4"))
    for part in ("step 4", "tmp_step_4", "No space left", f"Newest safe checkpoint: {memory_path / 'step_2'}"):
        assert part in str(raised.value)
    manager.raise_if_finalization_failed()
    manager.finalize_pending()
    manager.shutdown()
    assert (memory_path / "tmp_step_4").is_dir()
    assert not (memory_path / "step_4").exists()
    assert manager.get_latest_checkpoint_path() == memory_path / "step_2"


def test_the_message_says_when_no_checkpoint_is_safe(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    failed_save(manager, 2, OSError("disk"))
    with pytest.raises(SaveFailed, match="Newest safe checkpoint: none"):
        manager.raise_if_finalization_failed()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), BaseException("not an Exception"), GeneratorExit()]
)
def test_whatever_the_background_raises_is_a_failure(memory_path: Path, error: BaseException) -> None:
    manager = runs.manager(memory_path)
    failed_save(manager, 2, error)
    with pytest.raises(SaveFailed) as raised:
        manager.finalize_pending()
    assert raised.value.__cause__ is error


def test_a_thread_that_ends_without_a_word_is_a_failure(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Finalization, "_run", lambda self: None)
    manager = runs.manager(memory_path)
    manager.save(2, {}, runs.writers(2))
    manager.wait_for_finalization()
    with pytest.raises(SaveFailed, match="without a word"):
        manager.raise_if_finalization_failed()


def test_polling_never_waits_for_a_save_in_flight(memory_path: Path) -> None:
    manager, gate = runs.manager(memory_path), Gate()
    manager.save(2, {}, {"policy": gate})
    assert gate.entered.wait(20)
    manager.raise_if_finalization_failed()  # returns although the writer cannot end before `release`
    assert manager.has_pending_finalization
    assert not gate.release.is_set()
    gate.release.set()
    manager.finalize_pending()
    assert not manager.has_pending_finalization
    manager.raise_if_finalization_failed()


def test_nothing_to_raise_when_nothing_ever_ran(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    manager.raise_if_finalization_failed()
    manager.finalize_pending()
    manager.wait_for_finalization()
    assert not manager.has_pending_finalization


def test_the_next_save_waits_for_the_one_in_flight_and_raises_its_failure(memory_path: Path) -> None:
    manager, gate = runs.manager(memory_path), Gate(OSError("first"))
    manager.save(2, {}, {"policy": gate})
    threading.Timer(0.05, gate.release.set).start()
    with pytest.raises(SaveFailed, match="step 2"):
        manager.begin_finalization(manager.init_tmp_checkpoint(4, {}))
    assert not (memory_path / "step_4").exists()


def test_waiting_neither_raises_nor_clears(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    failed_save(manager, 2, OSError("disk"))
    manager.wait_for_finalization()
    with pytest.raises(SaveFailed):
        manager.raise_if_finalization_failed()


def test_many_threads_see_one_failure_once(memory_path: Path) -> None:
    manager, seen = runs.manager(memory_path), []
    failed_save(manager, 2, OSError("disk"))
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        try:
            manager.raise_if_finalization_failed()
        except SaveFailed as failure:
            seen.append(failure)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


def test_a_failing_synchronous_save_raises_at_once(memory_path: Path) -> None:
    manager, cause = runs.manager(memory_path, is_async=False), OSError("disk")
    with pytest.raises(SaveFailed, match="step 2") as raised:
        manager.save(2, {}, {"policy": fail_with(cause)})
    assert raised.value.__cause__ is cause
    manager.shutdown()


def test_a_directory_that_cannot_be_made_is_a_failed_save(memory_path: Path) -> None:
    manager = runs.manager(memory_path / "file" / "checkpoints")
    (memory_path / "file").write_text("in the way")
    manager.save(2, {}, runs.writers(2))
    with pytest.raises(SaveFailed, match="tmp_step_2 was not even begun"):
        manager.finalize_pending()


def test_the_thread_that_saves_touches_no_disk(memory_path: Path) -> None:
    """Training waits for the capture, and for nothing that a slow disk could draw out."""
    manager, seen = runs.manager(memory_path), list[str]()

    def observer(operation: str, path: str) -> None:
        if threading.current_thread() is threading.main_thread():
            seen.append(f"{operation} {path}")

    manager.start_attempt()
    storage.observers.append(observer)
    try:
        manager.save(2, {"step": 2}, runs.writers(2))
        manager.finalize_pending()
    finally:
        storage.observers.remove(observer)
    assert seen == []


def test_a_non_finite_weight_is_never_committed(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    broken = {"w": torch.tensor([[1.0, float("inf")]])}
    manager.save(2, {}, {"policy": lambda sink: sink.tensors("model.safetensors", broken)})
    with pytest.raises(SaveFailed, match=r"'w' holds inf at index \[0, 1\]") as raised:
        manager.finalize_pending()
    assert isinstance(raised.value.__cause__, NonFiniteError)
    assert not (memory_path / "step_2").exists()


def test_a_failed_fsync_of_the_parent_fails_the_save_and_leaves_the_step_to_be_verified(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = runs.manager(memory_path)
    runs.save(manager, 2)
    sync = storage.sync_directory

    def sync_or_fail(path: Path) -> None:
        if path == memory_path and (memory_path / "step_4").exists():
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(storage, "sync_directory", sync_or_fail)
    manager.save(4, {}, runs.writers(4))
    with pytest.raises(SaveFailed, match="the next start verifies it") as raised:
        manager.finalize_pending()
    assert raised.value.path == str(memory_path / "step_4")
    assert f"Newest safe checkpoint: {memory_path / 'step_2'}" in str(raised.value)
    assert json.loads((memory_path / "latest_checkpoint_status.json").read_text())["step"] == 2
    monkeypatch.undo()
    assert runs.manager(memory_path).choose_resume().path == memory_path / "step_4"


def test_nothing_is_tried_again_on_the_files_of_a_failed_save(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    path = manager.init_tmp_checkpoint(2, {})
    manager.begin_finalization(path, fail_with(OSError(5, "fsync")))
    manager.wait_for_finalization()
    with pytest.raises(SaveFailed):
        manager.raise_if_finalization_failed()
    with pytest.raises(CheckpointError, match="failed save"):
        manager.finalize_checkpoint(path)
    runs.save(manager, 2)
    assert runs.steps(manager) == [2]


def test_a_rename_that_fails_leaves_the_old_step_safe(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = runs.manager(memory_path)
    runs.save(manager, 2, version=1)
    monkeypatch.setattr(storage, "exchange", fail_with(OSError(5, "Input/output error")))
    manager.save(2, {}, runs.writers(2, version=2))
    with pytest.raises(SaveFailed, match=r"Newest safe checkpoint: .*step_2") as raised:
        manager.finalize_pending()
    assert raised.value.path == str(memory_path / "tmp_step_2")
    assert runs.version_of(memory_path / "step_2") == (2, 1)


def test_a_finished_save_holds_on_to_nothing(memory_path: Path) -> None:
    class Captured:
        def __call__(self, sink: Sink) -> None:
            sink.bytes("f", b"1")

    manager, writer = runs.manager(memory_path), Captured()
    gone = weakref.ref(writer)
    manager.save(2, {}, {"policy": writer})
    del writer
    manager.finalize_pending()
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------------------------------------------------- exit


def test_exit_waits_and_raises(memory_path: Path) -> None:
    with pytest.raises(SaveFailed), runs.manager(memory_path) as manager:
        failed_save(manager, 2, OSError("disk"))


def test_exit_never_masks_another_error(memory_path: Path) -> None:
    with pytest.raises(KeyError), runs.manager(memory_path) as manager:
        failed_save(manager, 2, OSError("disk"))
        raise KeyError("the real one")


def test_shutdown_twice_and_usable_afterwards(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    manager.shutdown()
    manager.shutdown()
    runs.save(manager, 2)
    assert runs.steps(manager) == [2]


# ------------------------------------------------------------------------------------------------------- retention


def test_pruning_keeps_the_union_and_the_newest_of_equals(memory_path: Path) -> None:
    manager = runs.manager(memory_path, keep_top_k=1, metric_name="val:acc", higher_is_better=True)
    for step, accuracy in ((2, 0.5), (10, 0.5), (30, 0.5), (32, 0.4), (34, 0.3)):
        runs.save(manager, step, **{"val:acc": accuracy})
    assert runs.steps(manager) == [30, 34]
    assert manager.get_best_checkpoint_path() == memory_path / "step_30"
    assert manager.get_latest_checkpoint_path() == memory_path / "step_34"


def test_a_nan_or_missing_metric_ranks_worst_and_is_reported(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = runs.manager(memory_path, save_period=1, keep_top_k=1, metric_name="val:acc", higher_is_better=True)
    for step, accuracy in enumerate((float("nan"), 0.5, 0.7, None), start=1):
        runs.save(manager, step, **{"val:acc": accuracy})
    assert manager.get_best_checkpoint_path() == memory_path / "step_3"
    assert runs.steps(manager) == [3, 4]
    warned = [record.message for record in caplog.records if "ranks worst" in record.message]
    assert warned == [
        f"{memory_path / 'step_1'} ranks worst: val:acc is nan",
        f"{memory_path / 'step_4'} ranks worst: val:acc is None",
    ]


def test_keep_one_outlives_a_failed_second_save(memory_path: Path) -> None:
    manager = runs.manager(memory_path, save_period=1, keep_top_k=1)
    runs.save(manager, 1)
    failed_save(manager, 2, OSError(28, "No space left on device"))
    with pytest.raises(SaveFailed):
        manager.shutdown()
    assert runs.steps(manager) == [1]
    assert runs.version_of(memory_path / "step_1") == (1, 0)


def test_a_failed_prune_only_warns(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = runs.manager(memory_path, keep_top_k=1)
    runs.save(manager, 2)
    monkeypatch.setattr("surefoot.checkpoint.commit.to_trash", fail_with(OSError("busy")))
    runs.save(manager, 4)
    assert runs.steps(manager) == [2, 4]
    assert len([record for record in caplog.records if "busy" in record.message]) == 1


def test_pruning_touches_only_complete_steps_of_this_line(memory_path: Path) -> None:
    manager = runs.manager(memory_path, keep_top_k=1)
    runs.save(manager, 2)
    outside = memory_path.parent / f"{memory_path.name}-outside"
    (memory_path / "step_1x").mkdir()
    (memory_path / "step_3").mkdir()  # no manifest: not ours to delete
    outside.mkdir()
    (memory_path / "step_1").symlink_to(outside)
    runs.save(manager, 4)
    assert sorted(path.name for path in memory_path.glob("step_*")) == ["step_1", "step_1x", "step_3", "step_4"]
    outside.rmdir()


def test_a_broken_checkpoint_neither_counts_nor_goes(memory_path: Path) -> None:
    manager = runs.manager(memory_path, keep_top_k=1, ft_keep_latest_k=2)
    for step in (2, 4, 6):
        runs.save(manager, step)
    assert runs.steps(manager) == [4, 6]
    (memory_path / "step_6" / "clock" / "clock.json").write_text("cut")
    runs.save(manager, 8)
    assert runs.steps(manager) == [4, 8]
    assert (memory_path / "step_6").is_dir()


# ------------------------------------------------------------------------------------------------- offer and rescue


def test_offer_saves_when_due_and_settles_all_before_it_captures_any(memory_path: Path) -> None:
    log: list[str] = []
    parts = {"a": Part(log, "a"), "b": Part(log, "b")}
    manager = runs.manager(memory_path)
    manager.offer(1, {}, parts, final=False)
    assert log == []
    manager.offer(2, {}, parts, final=False)
    assert log == ["settle a", "settle b", "snapshot a", "snapshot b"]
    manager.offer(2, {}, parts, final=True)  # already saved
    manager.offer(3, {}, parts, final=True)
    manager.shutdown()
    assert len(log) == 8
    assert runs.steps(manager) == [2, 3]


def test_offer_does_nothing_when_switched_off(memory_path: Path) -> None:
    manager = runs.manager(memory_path, enabled=False)
    manager.offer(2, {}, {}, final=True)
    assert list(memory_path.iterdir()) == []


def test_what_is_captured_is_the_state_at_the_offer(memory_path: Path) -> None:
    part, gate = Part([], "a"), Gate()
    manager = runs.manager(memory_path)

    class Slow(Part):
        def snapshot(self) -> Writer:
            return gate

    manager.offer(2, {}, {"slow": Slow([], "s"), "a": part}, final=False)
    part.value += 1
    gate.release.set()
    manager.shutdown()
    saved = LocalReader.open(memory_path / "step_2").tensors("a/value.safetensors")["value"]
    assert torch.equal(saved, torch.zeros(3))


def test_offer_holds_the_save_lock(memory_path: Path) -> None:
    manager, free = runs.manager(memory_path), []

    class Curious(Part):
        def settle(self) -> None:
            free.append(manager.save_lock.acquire(blocking=False))

    manager.offer(2, {}, {"a": Curious([], "a")}, final=False)
    manager.shutdown()
    assert free == [False]
    assert manager.save_lock.acquire(blocking=False)


def test_rescue_saves_a_complete_step_elsewhere_and_a_resume_goes_on_from_it(memory_path: Path) -> None:
    home, rescue = memory_path / "home", memory_path / "rescue"
    manager = runs.manager(home, rescue_dir=str(rescue))
    manager.open(resume=False)
    manager.start_attempt()
    runs.save(manager, 2)
    failed_save(manager, 4, OSError("disk"))
    with pytest.raises(SaveFailed):
        manager.raise_if_finalization_failed()
    part = Part([], "a")
    part.value += 5
    path = manager.rescue(5, {"step": 5}, {"a": part})
    assert path == rescue / "step_5"
    assert manager.rescue(5, {"step": 5}, {"a": part}) == rescue / "rescue_1" / "step_5"
    assert verify_checkpoint(path).sound

    second = runs.manager(home)
    second.open(resume=True)
    second.start_attempt(second.choose_resume(path))
    second.shutdown()
    third = runs.manager(home)  # the second attempt saved nothing: fall back to its origin, outside the directory
    point = third.choose_resume()
    assert point.path == path
    assert point.reader is not None
    assert point.reader.under("a").tensors("value.safetensors")["value"].tolist() == [5, 5, 5]


def test_no_rescue_without_a_place_for_it(memory_path: Path) -> None:
    assert runs.manager(memory_path).rescue(1, {}, {}) is None


# -------------------------------------------------------------------------------------------------------- look-ups


def test_look_ups_in_an_empty_or_missing_directory(memory_path: Path) -> None:
    manager = runs.manager(memory_path / "missing")
    assert manager.get_latest_checkpoint_path() is None
    assert manager.get_best_checkpoint_path() is None
    assert manager.load_training_info(None) is None
    assert manager.get_resume_paths(None) == (None, None)
    assert manager.list_checkpoints() == []


def test_resume_paths(memory_path: Path) -> None:
    path = runs.save(runs.manager(memory_path), 2)
    assert CheckpointManager.get_resume_paths(path) == (path / "policy/weights", path / "policy/optimizer")
    assert CheckpointManager.get_resume_paths(path, model_component="value") == (path / "value/weights", None)


def test_training_info_that_was_tampered_with_is_refused(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    path = runs.save(manager, 2, loss=0.25)
    assert manager.load_training_info(path) == {"step": 2, "loss": 0.25}
    text = (path / "training_info.json").read_text()
    (path / "training_info.json").write_text(text.replace("0.25", "0.75"))
    with pytest.raises(CorruptCheckpoint, match=r"training_info\.json"):
        manager.load_training_info(path)


def test_events_tell_a_saves_story(memory_path: Path) -> None:
    events: list[SaveEvent] = []
    manager = runs.manager(memory_path, keep_top_k=1, listener=events.append)
    runs.save(manager, 2)
    runs.save(manager, 4)
    failed_save(manager, 6, OSError("disk"))
    assert [(event.kind, event.step) for event in events] == [
        ("writing", 2), ("finished", 2), ("writing", 4), ("finished", 4), ("pruned", 2), ("writing", 6), ("failed", 6),
    ]  # fmt: skip
    assert (
        events[1].num_bytes
        == sum(f.stat().st_size for f in (memory_path / "step_4").rglob("*.*"))
        - (memory_path / "step_4" / "manifest.json").stat().st_size
    )
    assert events[1].path == str(memory_path / "step_2")
    assert "disk" in events[-1].message


def test_a_listener_that_fails_does_not_fail_the_save(memory_path: Path) -> None:
    manager = runs.manager(memory_path, listener=fail_with(ValueError("bad listener")))
    runs.save(manager, 2)
    assert runs.steps(manager) == [2]
