"""A training process seen from outside, by what it writes to its folder and by nothing else; and killed in mid-save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.checkpoint.commit import step_of
from surefoot.checkpoint.lineage import read_attempt
from surefoot.errors import SurefootError

_STALLED_S = 180.0
_TERMINATE_S = 10.0
_SAVE_POLL_S = 0.0005


def stop_all(runs: Sequence[WatchedRun]) -> None:
    """Leave no process behind. Safe to call twice."""
    for run in runs:
        run.terminate()
    for run in runs:
        run.wait(_TERMINATE_S)


@dataclass(frozen=True)
class Kill:
    """What was found once the killed process was gone.

    Attributes:
        in_mid_save: `tmp_step_<step>` was there and `step_<step>` was not; false where the commit was quicker.
        files: in the temporary directory in the order they were written, each with its size in bytes.
    """

    step: int
    in_mid_save: bool
    files: tuple[tuple[str, int], ...]


class WatchedRun:
    """One `surefoot train` and, once that is killed, the `surefoot resume` that goes on.

    Attributes:
        status: "starting" or "resuming" until the process has taken hold of its folder, then "training", then "ended".
        resumed_from: the step that the present process went on from; 0 for a fresh start.
        lines: of `metrics.jsonl`, as far as the run on record goes; a resume takes back what it repeats.
        kills: one for each SIGKILL.
    """

    def __init__(self, name: str, run_dir: Path) -> None:
        self.name, self.run_dir = name, run_dir
        self.checkpoints = run_dir / "checkpoints"
        self.log = run_dir.with_name(f"{name}.log")
        self.status = "starting"
        self.resumed_from = 0
        self.lines: list[dict[str, Any]] = []
        self.kills: list[Kill] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._inode = self._offset = 0
        self._news_s = time.monotonic()

    def start(self, *arguments: str) -> None:
        """Start `surefoot <arguments>` on one thread, in a session of its own: Ctrl-C is the demo's to handle. What it
        prints goes to `<name>.log` beside the run."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "surefoot.demo.child", str(os.getpid()), *arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.status = "resuming" if self._starts else "starting"
        self._starts, self._news_s = self._starts + 1, time.monotonic()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def look(self) -> bool:
        """Read what is new. Returns whether the status has changed.

        Raises:
            SurefootError: the process failed, or nothing has been heard of it for three minutes.
        """
        before, ended = self.status, not self.running
        if before in ("starting", "resuming"):
            attempt = read_attempt(self.checkpoints)
            if attempt is not None and attempt.number >= self._starts:  # else the record of the process killed before
                self.status, self.resumed_from = "training", attempt.lineage[-1].from_step
        if self.status == "training":
            self._read_metrics()
        if ended and self._process is not None and self._process.returncode != 0:
            self._fail(f"ended with exit status {self._process.returncode}")
        if not ended and time.monotonic() - self._news_s > _STALLED_S:
            self._fail(f"has shown no sign of life for {_STALLED_S:.0f} s")
        self.status = "ended" if ended else self.status
        return self.status != before

    @property
    def step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    def values(self, kind: str, name: str = "loss") -> list[float]:
        """One metric of all lines of a kind, "train" or "val"."""
        return [float(line[name]) for line in self.lines if line["kind"] == kind]

    def timings(self) -> list[dict[str, float]]:
        """Seconds of each training step."""
        return [line["timing"] for line in self.lines if line["kind"] == "train"]

    def saved(self) -> list[int]:
        """The steps of finished checkpoints that are there."""
        return sorted(step for name in self._names() if (step := step_of(name)) is not None)

    def unfinished(self) -> list[int]:
        """The steps of temporary directories: one that is being written, or was when the process was killed."""
        names = (name.removeprefix("tmp_") for name in self._names() if name.startswith("tmp_"))
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def wait_for_save(self, step: int, seconds: float) -> bool:
        """Whether, within so long, the weights of `step` begin to be written. Looks 2,000 times a second."""
        weights = self.checkpoints / f"tmp_step_{step}" / "policy" / "weights" / "model.safetensors"
        until = time.monotonic() + seconds
        while not weights.exists():
            if time.monotonic() > until:
                return False
            time.sleep(_SAVE_POLL_S)
        return True

    def kill(self, step: int) -> Kill:
        """SIGKILL now, then see what the save of `step` came to."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        temporary, final = self.checkpoints / f"tmp_step_{step}", self.checkpoints / f"step_{step}"
        paths = sorted((p for p in temporary.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
        files = tuple((path.relative_to(temporary).as_posix(), path.stat().st_size) for path in paths)
        self._read_metrics()
        self.kills.append(Kill(step, temporary.is_dir() and not final.exists(), files))
        return self.kills[-1]

    def terminate(self) -> None:
        """Ask the process to save and stop, if it runs."""
        if self._process is not None and self.running:
            self._process.terminate()

    def wait(self, seconds: float) -> None:
        """For the process to end; it is killed when it has not by then."""
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _names(self) -> list[str]:
        return [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []

    def _read_metrics(self) -> None:
        """The whole lines that are new. A resume replaces the file by a shorter one: then all of them."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset, self.lines = inode, 0, []
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        if newline:
            self._offset += len(whole) + 1
            self.lines += [json.loads(line) for line in whole.splitlines()]
            self._news_s = time.monotonic()

    def _fail(self, what: str) -> None:
        end = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise SurefootError(f"the run {self.name} {what}. The end of {self.log}:\n{end}")
