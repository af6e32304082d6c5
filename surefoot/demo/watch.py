"""A training process seen from outside, by what it writes to its folder and by nothing else; and killed in mid-save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.checkpoint.commit import step_of
from surefoot.checkpoint.lineage import read_attempt
from surefoot.errors import SurefootError
from surefoot.report.completions import own_rows

PHASES = ("rollout", "reward", "log-probs", "train", "sync", "save")
_TERMINATE_S = 10.0
_SAVE_POLL_S = 0.0005


class WatchedRun:
    """One `surefoot train` and, once that is killed, the `surefoot resume` that goes on.

    Attributes:
        num_steps: that the run is to have at its end.
        lines: of `metrics.jsonl`, as far as the run on record goes; a resume takes back what it repeats.
        kills: for each SIGKILL the step that was being saved, and whether that save was cut short; `False` where its
            commit was quicker.
    """

    def __init__(self, name: str, run_dir: Path, num_steps: int) -> None:
        self.name, self.run_dir, self.num_steps = name, run_dir, num_steps
        self.checkpoints = run_dir / "checkpoints"
        self.log = run_dir.with_name(f"{name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: list[dict[str, Any]] = []
        self.kills: dict[int, bool] = {}
        self._sampled: tuple[Path, list[dict[str, Any]]] = (run_dir, [])

    def start(self, *arguments: str) -> None:
        """Start `surefoot <arguments>` on one thread, in a session of its own: Ctrl-C is the demo's to handle. What it
        prints goes to `<name>.log` beside the run."""
        command = [sys.executable, "-m", "surefoot.demo.child", str(os.getpid()), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> str:
        """ "starting" until the process has taken hold of its folder."""
        if self.process is not None and not self.running:
            return "ended"
        attempt = read_attempt(self.checkpoints)
        if attempt is None or attempt.number <= len(self.kills):  # the record is that of the process killed before
            return "starting"
        return f"goes on from step {self.resumed_from}" if self.kills else "training"

    @property
    def resumed_from(self) -> int:
        attempt = read_attempt(self.checkpoints)
        return attempt.lineage[-1].from_step if attempt else 0

    def look(self) -> None:
        """Read the metrics anew. Raises `SurefootError` when the process has failed."""
        if self.process is not None and self.process.poll():
            end = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            status = self.process.returncode
            raise SurefootError(f"the run {self.name} ended with exit status {status}. The end of {self.log}:\n{end}")
        file = self.run_dir / "metrics.jsonl"
        whole = file.read_bytes().rpartition(b"\n")[0] if file.exists() else b""
        self.lines = [json.loads(line) for line in whole.splitlines()]

    @property
    def step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def num_validations(self) -> int:
        return sum(line["kind"] == "val" for line in self.lines)

    def values(self, kind: str, metric: str) -> list[float]:
        """Of all steps of a kind, "train" or "val", that have it."""
        return [float(line[metric]) for line in self.lines if line["kind"] == kind and metric in line]

    def timings(self) -> list[dict[str, float]]:
        """Seconds of each training step."""
        return [line["timing"] for line in self.lines if line["kind"] == "train"]

    def shares(self) -> dict[str, float]:
        """Of the training steps' time, by phase, saves included; "other" is the rest."""
        timings = self.timings()
        names = (*PHASES, *(("teacher",) if any("teacher_s" in timing for timing in timings) else ()))
        seconds = {name: sum(timing.get(f"{name}_s", 0.0) for timing in timings) for name in names}
        whole = sum(timing["step_s"] for timing in timings) + seconds["save"]
        seconds["other"] = whole - sum(seconds.values())
        return {name: value / whole if whole else 0.0 for name, value in seconds.items()}

    def completions(self) -> list[dict[str, Any]]:
        """What the newest step sampled for one prompt, one that it got right and wrong where there is such: its rows of
        `completions/`, each text once and with its `count`, the best first. Empty where nothing is sampled."""
        file = self.run_dir / "completions" / f"step_{self.step}.parquet"
        if file != self._sampled[0] and file.exists():
            import pyarrow.parquet as pq

            groups: dict[str, list[Mapping[str, Any]]] = {}
            for row in own_rows(pq.read_table(file).to_pylist()):
                groups.setdefault(row["group"], []).append(row)
            mixed = [rows for rows in groups.values() if len({row["reward"] for row in rows}) > 1]
            chosen = next(iter(mixed or groups.values()), [])
            counts = Counter(row["completion"] for row in chosen)
            once = {row["completion"]: {**row, "count": counts[row["completion"]]} for row in chosen}
            self._sampled = file, sorted(once.values(), key=lambda row: (-row["reward"], -row["count"]))
        return self._sampled[1]

    def saved(self, prefix: str = "") -> list[int]:
        """The steps of finished checkpoints; with the prefix "tmp_" of those being written, or left half-written."""
        names = [path.name.removeprefix(prefix) for path in self.checkpoints.glob(f"{prefix}step_*")]
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def wait_for_save(self, step: int, seconds: float) -> bool:
        """Whether, within so long, the weights of `step` begin to be written. Looks 2,000 times a second."""
        weights = self.checkpoints / f"tmp_step_{step}" / "policy" / "weights" / "model.safetensors"
        until = time.monotonic() + seconds
        while not weights.exists() and time.monotonic() < until:
            time.sleep(_SAVE_POLL_S)
        return weights.exists()

    def kill(self, step: int) -> bool:
        """SIGKILL now, then see what the save of `step` came to. Returns whether it was cut short."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.kills[step] = step in self.saved("tmp_") and step not in self.saved()
        return self.kills[step]


def stop_all(runs: Sequence[WatchedRun]) -> None:
    """Leave no process behind: ask each to save and stop, kill what has not within ten seconds. Safe to call twice."""
    processes = [run.process for run in runs if run.process is not None]
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
