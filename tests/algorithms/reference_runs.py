"""What the child processes of `test_reference_kills.py` do."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

from surefoot import loop
from surefoot.checkpoint import TensorCache, storage
from surefoot.engine import precomputed
from tests.helpers import runs
from tests.helpers.fork_server import forked

KEY = {"weights": "a"}
CHUNK_ROWS = 8


def killed_while_computing(file: str, straight: str, *overrides: str) -> int:
    """A start that SIGKILL ends before each operation on the cache in turn; the next one goes on from what is there."""
    precomputed.CHUNK_ROWS = CHUNK_ROWS
    folder = Path(file).parent
    cache = folder / "cache"
    survived = finished = 0
    while True:
        run_dir = folder / f"run_{survived}"
        status = forked(partial(_start, file, run_dir, cache, survived, *overrides))
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        assert not (run_dir / "config.yaml").exists(), "no run began"
        survived += 1
        there = len(list(cache.rglob("*.safetensors")))
        assert there >= finished, "what was finished is kept"
        finished = there
    assert survived > 6, "every operation of one file, and of the first one of the next"
    assert len(list(cache.rglob("*.safetensors"))) == 4, "20 and 6 rows, 8 in a file"
    assert forked(lambda: loop.train(runs.resumed(run_dir, "max_num_steps=6"))) == 0
    assert runs.metric_lines(run_dir) == runs.metric_lines(Path(straight))
    assert runs.state_bytes(run_dir / "checkpoints/step_6") == runs.state_bytes(Path(straight) / "checkpoints/step_6")
    return 0


def _start(file: str, run_dir: Path, cache: Path, survived: int, *overrides: str) -> None:
    seen = 0

    def kill(operation: str, path: str) -> None:
        nonlocal seen
        if not path.startswith(str(cache)):
            return
        if seen == survived:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    storage.observers.append(kill)
    loop.train(runs.started(Path(file), f"run_dir={run_dir}", *overrides, "max_num_steps=1"))


def compute_and_write(parent: str, meeting: str) -> int:
    """Hold the cache, say so, and write a little later."""
    import torch

    with TensorCache(Path(parent), KEY).held() as cache:
        Path(meeting).touch()
        time.sleep(0.3)
        cache.write("rows_0_1", {"logprobs": torch.ones(1)})
    return 0
