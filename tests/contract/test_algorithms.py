"""What every algorithm must keep, the loop being the real one. The folder is listed: a new file joins by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from surefoot import loop
from surefoot.checkpoint import LocalSink
from surefoot.config_file import algorithm_names
from surefoot.errors import SaveFailed
from surefoot.run import Run
from tests.helpers import runs

pytestmark = pytest.mark.parametrize("algorithm", algorithm_names())


def project(tmp_path: Path, algorithm: str) -> Path:
    assert algorithm in runs.EXTRA, f"tests/helpers/runs.py does not say how to make a tiny run of {algorithm}"
    return runs.write_project(tmp_path, algorithm=algorithm)


def join_each_save(run: Run) -> None:
    """The background writer is done before the next step's boundary, so that what it met is seen exactly there."""
    offer = run.checkpoints.offer

    def offer_and_join(*args: Any) -> float:
        held_up = offer(*args)
        run.checkpoints.wait_for_finalization()
        return held_up

    run.checkpoints.offer = offer_and_join  # type: ignore[method-assign]


def count_training(run: Run) -> list[int]:
    """The steps in which an engine was told to train."""
    steps: list[int] = []
    for engine in run.kit.engines.values():
        engine.train = counting(engine.train, run, steps)  # type: ignore[method-assign]
    return steps


def counting(train: Callable[..., Any], run: Run, steps: list[int]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        steps.append(run.clock.step + 1)
        return train(*args)

    return counted


def fail_first_write(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The first tensor file of the first background save cannot be written; later ones can."""
    write, failures = LocalSink.tensors, [error]

    def failing(self: LocalSink, *args: Any, **options: Any) -> None:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()
        write(self, *args, **options)

    monkeypatch.setattr(LocalSink, "tensors", failing)


class Unusual(BaseException):
    """Not an Exception: what torch's own checkpoint error is."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Unusual("neither an Exception")])
def test_failed_save_stops_at_the_next_step(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    run = runs.started(project(tmp_path, algorithm), "max_num_steps=6", "checkpointing.save_period=2")
    join_each_save(run)
    trained = count_training(run)
    fail_first_write(monkeypatch, error)
    with pytest.raises(SaveFailed, match="Background checkpoint finalization failed at step 2") as caught:
        loop.train(run)
    assert caught.value.__cause__ is error
    assert set(trained) == {1, 2}
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "tmp_step_2").is_dir()
    assert not (checkpoints / "step_2").exists()
    assert not (checkpoints / "latest_checkpoint_status.json").exists()


def test_failed_last_save_is_raised_at_the_end(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.started(project(tmp_path, algorithm), "max_num_steps=2", "checkpointing.save_period=2")
    fail_first_write(monkeypatch, OSError(5, "Input/output error"))
    with pytest.raises(SaveFailed, match="step 2"):
        loop.train(run)


def test_training_goes_on_while_a_save_is_in_flight(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save cannot end before step 4 is trained, so a poll that waited would never return."""
    run = runs.started(project(tmp_path, algorithm), "max_num_steps=4", "checkpointing.save_period=3")
    trained = count_training(run)
    step_4_trained, write = threading.Event(), LocalSink.tensors
    offer = run.checkpoints.offer

    def offering(step: int, *args: Any) -> float:
        if step == 4:
            step_4_trained.set()
        return offer(step, *args)

    def waiting(self: LocalSink, *args: Any, **options: Any) -> None:
        assert step_4_trained.wait(timeout=60), "step 4 was not trained while the save of step 3 was in flight"
        write(self, *args, **options)

    monkeypatch.setattr(run.checkpoints, "offer", offering)
    monkeypatch.setattr(LocalSink, "tensors", waiting)
    loop.train(run)
    assert set(trained) == {1, 2, 3, 4}
    assert (tmp_path / "run" / "checkpoints" / "step_3").is_dir()


def test_poll_skips_while_someone_else_saves(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock held: no poll. Lock free: exactly one at the step's start, and whoever waits may poll more."""
    run = runs.started(project(tmp_path, algorithm), "max_num_steps=3", "checkpointing.enabled=false", "val_period=0")
    polled: list[int] = []
    ask = run.checkpoints.raise_if_finalization_failed
    monkeypatch.setattr(
        run.checkpoints, "raise_if_finalization_failed", lambda: (polled.append(run.clock.step), ask())[1]
    )
    take = run.source.take

    def taking(clock: Any, poll: Any) -> Any:
        if clock.step == 0:
            run.checkpoints.save_lock.acquire()  # another thread's save begins
        if clock.step == 1:
            run.checkpoints.save_lock.release()
        return take(clock, lambda: None)

    monkeypatch.setattr(run.source, "take", taking)
    loop.train(run)
    assert polled == [0, 2]


def test_every_step_reports_loss_gradient_norm_and_rate(algorithm: str, tmp_path: Path) -> None:
    runs.trained(project(tmp_path, algorithm), "max_num_steps=3", "val_period=3")
    lines = [line for line in runs.metric_lines(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all({"loss", "grad_norm", "lr", "epoch", "rows", "tokens"} <= set(line) for line in lines)
    info = json.loads((tmp_path / "run/checkpoints/step_3/training_info.json").read_text())
    assert info["train:loss"] == lines[-1]["loss"]
    assert any(name.startswith("val:") for name in info)


def test_the_split_into_micro_batches_changes_nothing(algorithm: str, tmp_path: Path) -> None:
    file = project(tmp_path, algorithm)
    states = []
    for size in (4, 2, 1):
        run = runs.started(file, f"run_dir={tmp_path / str(size)}", f"policy.train_micro_batch_size={size}")
        loop.train(run)
        states.append({name: tensor.clone() for name, tensor in run.kit.engines["policy"].weights().items()})
    for state in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=2e-4, atol=2e-6)


def test_every_checkpoint_is_a_hugging_face_folder(algorithm: str, tmp_path: Path) -> None:
    run = runs.started(project(tmp_path, algorithm), "max_num_steps=2")
    loop.train(run)
    folder = tmp_path / "run" / "checkpoints" / "step_2" / "policy" / "weights"
    scores = run.algorithm.engines()["policy"].kind == "scalar"
    model = (AutoModelForSequenceClassification if scores else AutoModelForCausalLM).from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "12+34="}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    live = run.kit.engines["policy"].model  # type: ignore[attr-defined]
    live.eval()
    with torch.no_grad():
        assert torch.equal(model(**ids).logits, live(**ids).logits)
    assert tokenizer.chat_template == run.kit.tokenizer.chat_template
