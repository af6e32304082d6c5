"""What every algorithm must keep in all its cases, the loop being the real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from surefoot import loop
from surefoot.checkpoint import LocalSink
from surefoot.config_file import algorithm_names
from surefoot.engine import models
from surefoot.errors import SaveFailed
from tests.faults.project import joined, observing, trained_steps
from tests.helpers import runs

every_case = pytest.mark.parametrize("case", runs.CASES)


def test_every_algorithm_has_a_case() -> None:
    """The folder is listed: a new file fails this until there is one."""
    missing = set(algorithm_names()) - {algorithm for algorithm, _ in runs.CASES.values()}
    assert not missing, f"tests/helpers/runs.py does not say how to make a tiny run of {', '.join(sorted(missing))}"


@contextmanager
def first_write_failing(error: BaseException) -> Iterator[list[str]]:
    """The first write of the first background save is refused; later ones are not. Gives the file's path."""
    refused: list[str] = []

    def observer(name: str, path: str) -> None:
        if name == "write" and not refused and threading.current_thread() is not threading.main_thread():
            refused.append(path)
            raise error

    with observing(observer):
        yield refused


class Unusual(BaseException):
    """Not an Exception: what torch's own checkpoint error is."""


@every_case
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Unusual("neither an Exception")], ids=repr)
def test_a_failed_first_save_stops_at_the_next_step(case: str, memory_path: Path, error: BaseException) -> None:
    run = joined(
        runs.started(runs.write_project(memory_path, case=case), "max_num_steps=6", "checkpointing.save_period=2")
    )
    trained = trained_steps(run)
    failed = pytest.raises(SaveFailed, match="Background checkpoint finalization failed at step 2")
    with first_write_failing(error) as refused, failed as caught:
        loop.train(run)
    assert caught.value.__cause__ is error
    assert set(trained) == {1, 2}, "no engine was told to train after step 2"
    assert [line["step"] for line in runs.metric_lines(memory_path / "run") if line["kind"] == "train"] == [1, 2]
    checkpoints = memory_path / "run" / "checkpoints"
    assert Path(refused[0]).is_relative_to(checkpoints / "tmp_step_2")
    assert (checkpoints / "tmp_step_2").is_dir()
    assert not (checkpoints / "step_2").exists()
    assert not (checkpoints / "latest_checkpoint_status.json").exists()


@every_case
def test_a_failed_last_save_is_raised_at_the_end(case: str, memory_path: Path) -> None:
    run = runs.started(runs.write_project(memory_path, case=case), "max_num_steps=2", "checkpointing.save_period=2")
    with first_write_failing(OSError(5, "Input/output error")), pytest.raises(SaveFailed, match="step 2"):
        loop.train(run)


@every_case
def test_training_goes_on_while_a_save_is_in_flight(
    case: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save cannot end before step 4 is trained, so a poll that waited would never return."""
    run = runs.started(runs.write_project(memory_path, case=case), "max_num_steps=4", "checkpointing.save_period=3")
    trained = trained_steps(run)
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
    assert (memory_path / "run" / "checkpoints" / "step_3").is_dir()


@every_case
def test_poll_skips_while_someone_else_saves(case: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock held: no poll. Lock free: exactly one at the step's start, and whoever waits may poll more."""
    run = runs.started(
        runs.write_project(memory_path, case=case), "max_num_steps=3", "checkpointing.enabled=false", "val_period=0"
    )
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


@every_case
def test_every_step_reports_loss_gradient_norm_and_rate(case: str, memory_path: Path) -> None:
    runs.trained(runs.write_project(memory_path, case=case), "max_num_steps=3", "val_period=3")
    lines = [line for line in runs.metric_lines(memory_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all({"loss", "grad_norm", "lr", "epoch", "rows", "tokens"} <= set(line) for line in lines)
    info = json.loads((memory_path / "run/checkpoints/step_3/training_info.json").read_text())
    assert info["train:loss"] == lines[-1]["loss"]
    assert any(name.startswith("val:") for name in info)


@every_case
def test_the_split_into_micro_batches_changes_nothing(case: str, memory_path: Path) -> None:
    """Without dropout, which each micro-batch draws for itself."""
    file = runs.write_project(memory_path, case=case)
    common = ["val_period=0", "checkpointing.enabled=false"]
    policy = runs.config_of(file).policy
    common += ["policy.lora.dropout=0"] if policy.lora else []
    states = []
    for size in sorted({policy.train_global_batch_size, 2, 1}, reverse=True):
        sizes = (f"run_dir={memory_path / str(size)}", f"policy.train_micro_batch_size={size}")
        run = runs.started(file, *sizes, *common)
        loop.train(run)
        states.append({name: tensor.clone() for name, tensor in run.kit.engines["policy"].weights().items()})
    for state in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=2e-4, atol=2e-6)


@every_case
def test_every_checkpoint_is_a_folder_that_others_load(case: str, memory_path: Path) -> None:
    """In Transformers' format, or with an adapter in peft's, on top of the same base."""
    file = runs.write_project(memory_path, case=case)
    run = runs.started(file, "max_num_steps=2")
    loop.train(run)
    folder = memory_path / "run" / "checkpoints" / "step_2" / "policy" / "weights"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind, section = run.algorithm.engines()["policy"].kind, runs.config_of(file).policy
    if section.lora is None:
        model = (AutoModelForCausalLM if kind == "causal_lm" else AutoModelForSequenceClassification).from_pretrained(
            folder
        )
    else:
        base = section.model_copy(update={"lora": None})
        base = models.load(base, tokenizer=tokenizer, seed=run.kit.config.seed, kind=kind).model
        model = PeftModel.from_pretrained(base, folder)
    chat = [{"role": "user", "content": "12+34="}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    live = run.kit.engines["policy"].model  # type: ignore[attr-defined]
    live.eval()
    with torch.no_grad():
        assert torch.equal(model(**ids).logits, live(**ids).logits)
    assert tokenizer.chat_template == run.kit.tokenizer.chat_template
