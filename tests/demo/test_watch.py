"""A run watched from outside: a real process is killed in the middle of a real save, resumed, watched to its end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from surefoot.demo import task
from surefoot.demo.watch import WatchedRun, stop_all
from surefoot.errors import SurefootError

CONFIG = """
algorithm: sft
run_dir: unused
max_num_steps: 12
policy:
  model_init: {model_init}
  tokenizer: {{name: {root}/tokenizer}}
  train_global_batch_size: 4
  max_total_sequence_length: 64
  num_threads: 1
data:
  train: {{path: {root}/train.jsonl}}
checkpointing: {{save_period: 3}}
logger: {{tensorboard: false, progress: plain}}
"""


def line(step: int, **more: object) -> str:
    return json.dumps({"step": step, "kind": "train", "loss": float(step), "timing": {"wall_s": 0.5}, **more}) + "\n"


def watched(run: WatchedRun, seconds: float = 120.0) -> None:
    """Look until the process has ended."""
    until = time.monotonic() + seconds
    while run.running:
        assert time.monotonic() < until, run.log.read_text()
        run.look()
        time.sleep(0.02)
    run.look()


def test_a_run_is_killed_in_mid_save_resumed_and_seen_to_its_end(tmp_path: Path) -> None:
    task.write_dataset(tmp_path / "train.jsonl", tmp_path / "heldout.jsonl", 0, num_rows=64, num_heldout=4)
    task.train_tokenizer(task.read_rows(tmp_path / "train.jsonl"), tmp_path / "tokenizer")
    model_init = json.dumps(task.model_init(hidden_size=16, num_layers=1))
    (tmp_path / "sft.yaml").write_text(CONFIG.format(root=tmp_path, model_init=model_init))
    run = WatchedRun("tiny", tmp_path / "run")
    try:
        run.start("train", str(tmp_path / "sft.yaml"), f"run_dir={run.run_dir}")
        assert run.wait_for_save(6, seconds=120.0), run.log.read_text()
        kill = run.kill(6)
        assert not run.running
        # Either answer is right, as long as it is what the disk says.
        assert kill.in_mid_save == (6 in run.unfinished() and 6 not in run.saved())
        assert not kill.in_mid_save or "policy/weights/model.safetensors" in dict(kill.files)
        run.start("resume", str(run.run_dir))
        assert run.status == "resuming"
        watched(run)
    finally:
        stop_all([run])
    assert run.status == "ended"
    assert run.resumed_from == (3 if kill.in_mid_save else 6)
    assert [record["step"] for record in run.lines] == list(range(1, 13))
    assert run.saved() == [3, 6, 9, 12] and run.unfinished() == []


def test_a_run_that_fails_says_what_it_said(tmp_path: Path) -> None:
    run = WatchedRun("broken", tmp_path / "run")
    try:
        run.start("train", str(tmp_path / "missing.yaml"))
        with pytest.raises(SurefootError, match=r"(?s)broken ended with exit status 2.*no configuration file"):
            watched(run)
    finally:
        stop_all([run])


def test_stop_ends_the_process_and_is_safe_twice(tmp_path: Path) -> None:
    run = WatchedRun("stopped", tmp_path / "run")
    stop_all([run])
    run.start("train", str(tmp_path / "missing.yaml"))
    stop_all([run])
    stop_all([run])
    assert not run.running


def test_metrics_are_read_as_they_come_and_anew_after_a_resume(tmp_path: Path) -> None:
    run = WatchedRun("read", tmp_path)
    file = tmp_path / "metrics.jsonl"

    def look() -> tuple[list[float], list[float], int]:
        run.status = "training"
        run.look()
        return run.values("train"), run.values("val"), run.step

    file.write_text(line(1) + line(2) + line(3)[:10])
    assert look() == ([1.0, 2.0], [], 2)
    with file.open("a") as grown:
        grown.write(line(3)[10:] + line(3, kind="val"))
    assert look() == ([1.0, 2.0, 3.0], [3.0], 3)
    (tmp_path / "cut").write_text(line(1))
    (tmp_path / "cut").replace(file)
    assert look() == ([1.0], [], 1)
