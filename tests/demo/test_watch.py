"""A run watched from outside: a real process is killed in the middle of a real save, resumed, watched to its end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from surefoot.demo import task
from surefoot.demo.compare import compare_runs
from surefoot.demo.story import train_both
from surefoot.demo.view import DemoView
from surefoot.demo.watch import WatchedRun, stop_all
from surefoot.errors import SurefootError
from surefoot.report.completions import Completions

CONFIG = """
algorithm: sft
run_dir: unused
max_num_steps: 120
policy:
  model_init: {model_init}
  tokenizer: {{name: {root}/tokenizer}}
  train_global_batch_size: 4
  max_total_sequence_length: 64
  num_threads: 1
data:
  train: {{path: {root}/train.jsonl}}
checkpointing: {{save_period: 12}}
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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    task.write_dataset(tmp_path / "train.jsonl", tmp_path / "heldout.jsonl", 0, num_rows=64, num_heldout=4)
    task.train_tokenizer(task.read_rows(tmp_path / "train.jsonl"), tmp_path / "tokenizer")
    model_init = json.dumps(task.model_init(hidden_size=16, num_layers=1))
    (tmp_path / "sft.yaml").write_text(CONFIG.format(root=tmp_path, model_init=model_init))
    return tmp_path / "sft.yaml"


class LateOnce(WatchedRun):
    """Its first kill comes too late: the save has been committed."""

    def wait_for_save(self, step: int, seconds: float) -> bool:
        if self.kills:
            return super().wait_for_save(step, seconds)
        until = time.monotonic() + seconds
        while step not in self.saved() and time.monotonic() < until:
            time.sleep(0.001)
        return step in self.saved()


def test_a_kill_that_misses_is_told_and_tried_again_and_the_run_equals_the_other(config: Path, tmp_path: Path) -> None:
    straight, killed = WatchedRun("straight", tmp_path / "straight", 120), LateOnce("killed", tmp_path / "killed", 120)
    console = Console(file=io.StringIO(), width=200)
    view = DemoView(console, (straight, killed))
    train_both(config, straight, killed, view, range(24, 120, 12))
    assert straight.status == killed.status == "ended"
    (late, hit), (later, cut) = next(iter(killed.kills.items())), list(killed.kills.items())[-1]
    assert not hit and later > late and cut, killed.kills
    assert killed.resumed_from == later - 12
    for run in (straight, killed):
        assert [record["step"] for record in run.lines] == list(range(1, 121))
        assert run.saved() == list(range(12, 121, 12)) and run.saved("tmp_") == []
    assert compare_runs(straight.run_dir, killed.run_dir, 120).differences == []
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"SIGKILL, but step {late} had just been committed" in told
    assert f"goes on from step {late}" in told
    assert f"SIGKILL while step {later} was being written" in told
    assert f"goes on from step {later - 12}" in told


def test_no_process_is_left_when_the_demo_is_interrupted(config: Path, tmp_path: Path) -> None:
    class Interrupted(DemoView):
        def draw(self) -> None:
            raise KeyboardInterrupt

    runs = WatchedRun("straight", tmp_path / "straight", 120), WatchedRun("killed", tmp_path / "killed", 120)
    with pytest.raises(KeyboardInterrupt):
        train_both(config, *runs, Interrupted(Console(file=io.StringIO()), runs), range(24, 120, 12))
    for run in runs:
        assert run.process is not None and not run.running


def test_no_process_is_left_when_the_demo_is_killed(config: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from surefoot.demo.watch import WatchedRun\n"
        "run = WatchedRun('orphan', Path(sys.argv[2]), 9)\n"
        "run.start('train', sys.argv[1], f'run_dir={sys.argv[2]}', 'max_num_steps=1000000')\n"
        "while run.status == 'starting': time.sleep(0.05)\n"
        "print(run.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(config), str(tmp_path / "orphan")]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, timeout=120).stdout)
    until = time.monotonic() + 30
    try:
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie has none
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_run_that_fails_says_what_it_said(tmp_path: Path) -> None:
    run = WatchedRun("broken", tmp_path / "run", 120)
    try:
        run.start("train", str(tmp_path / "missing.yaml"))
        with pytest.raises(SurefootError, match=r"(?s)broken ended with exit status 2.*no configuration file"):
            watched(run)
    finally:
        stop_all([run])


def test_stop_ends_the_process_and_is_safe_twice(tmp_path: Path) -> None:
    run = WatchedRun("stopped", tmp_path / "run", 120)
    stop_all([run])
    run.start("train", str(tmp_path / "missing.yaml"))
    stop_all([run])
    stop_all([run])
    assert not run.running


def test_metrics_are_read_as_they_come_and_anew_after_a_resume(tmp_path: Path) -> None:
    run = WatchedRun("read", tmp_path, 120)
    file = tmp_path / "metrics.jsonl"

    def look() -> tuple[list[float], list[float], int]:
        run.look()
        return run.values("train", "loss"), run.values("val", "loss"), run.step

    file.write_text(line(1) + line(2) + line(3)[:10])
    assert look() == ([1.0, 2.0], [], 2)
    with file.open("a") as grown:
        grown.write(line(3)[10:] + line(3, kind="val"))
    assert look() == ([1.0, 2.0, 3.0], [3.0], 3)
    (tmp_path / "cut").write_text(line(1))
    (tmp_path / "cut").replace(file)
    assert look() == ([1.0], [], 1)


def test_what_a_step_sampled_is_told_by_one_prompt_that_it_got_right_and_wrong(tmp_path: Path) -> None:
    run = WatchedRun("read", tmp_path, 120)
    assert run.completions() == []
    said = {"a": ["57", "57", "57"], "b": ["44", "43", "34", "43"], "c": ["12", "21"]}
    rows = [(name, text) for name, texts in said.items() for text in texts]
    columns = {
        "group": [name for name, _ in rows],
        "completion": [text for _, text in rows],
        "reward": torch.tensor([float(text in ("57", "44", "12")) for _, text in rows]),
    }
    Completions(tmp_path / "completions").write(3, columns)
    run.lines = [json.loads(line(3))]
    assert run.completions() == [
        {"group": "b", "completion": "44", "reward": 1.0, "count": 1},
        {"group": "b", "completion": "43", "reward": 0.0, "count": 2},
        {"group": "b", "completion": "34", "reward": 0.0, "count": 1},
    ]
    run.lines.append(json.loads(line(4)))  # its file is not there, as where a resume has just set it aside
    assert [row["completion"] for row in run.completions()] == ["44", "43", "34"]


def test_shares_of_the_time_add_up(tmp_path: Path) -> None:
    run = WatchedRun("read", tmp_path, 120)
    assert set(run.shares().values()) == {0.0}
    timing = {"wall_s": 6.0, "step_s": 4.0, "rollout_s": 1.0, "train_s": 2.0, "validate_s": 1.0, "save_s": 1.0}
    run.lines = [json.loads(line(1, timing=timing)), json.loads(line(2, timing={"step_s": 5.0, "train_s": 1.0}))]
    shares = run.shares()
    assert shares == {
        "rollout": 0.1, "reward": 0.0, "log-probs": 0.0, "train": 0.3, "sync": 0.0, "save": 0.1, "other": 0.5
    }  # fmt: skip
