"""Real processes: killed while they precompute, killed in a step with each kind of reference, waiting for another."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot import loop
from surefoot.checkpoint import TensorCache
from surefoot.engine import precomputed
from tests.algorithms import reference_runs
from tests.faults import children
from tests.helpers import runs
from tests.helpers.fork_server import ForkServer, wait_for
from tests.helpers.memory_path import memory_path

__all__ = ["memory_path"]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as made:
        yield made


@pytest.fixture
def file(memory_path: Path) -> Path:
    return runs.write_project(memory_path, case="dpo-mpo")


def overrides_of(folder: Path, kind: str) -> tuple[str, ...]:
    return {
        "precomputed": ("dpo.reference=precomputed", f"dpo.reference_cache={folder / 'cache'}"),
        "synced": ("dpo.sync_reference={period: 2}",),
    }[kind]


def test_killed_before_each_operation_on_the_cache(
    server: ForkServer, file: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precomputed, "CHUNK_ROWS", reference_runs.CHUNK_ROWS)
    elsewhere = overrides_of(memory_path / "elsewhere", "precomputed")
    common = ("policy.scheduler.decay_steps=6", "checkpointing.save_period=1")
    runs.trained(file, *common, *elsewhere)
    words = (file, memory_path / "run", *common, *overrides_of(memory_path, "precomputed"))
    log = memory_path / "log"
    assert server.call(reference_runs.killed_while_computing, *words, log=log) == 0, log.read_text()


@pytest.mark.parametrize("kind", ["precomputed", "synced"])
def test_killed_in_a_step_and_resumed(server: ForkServer, file: Path, memory_path: Path, kind: str) -> None:
    common = (*overrides_of(memory_path, kind), "checkpointing.save_period=1")
    runs.trained(file, *common, f"run_dir={memory_path / 'straight'}")
    meeting = memory_path / "meeting"
    meeting.mkdir()
    words = (file, memory_path / "run", "train", meeting, *common)
    child = server.start(children.run, *words, log=memory_path / "log")
    wait_for(meeting / "here", child)
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    run = runs.resumed(memory_path / "run")
    assert run.clock.step == 2
    loop.train(run)
    assert runs.metric_lines(memory_path / "run") == runs.metric_lines(memory_path / "straight")
    ends = [runs.state_bytes(memory_path / name / "checkpoints/step_6") for name in ("run", "straight")]
    assert ends[0] == ends[1]


def test_who_comes_second_waits_and_finds_it_there(
    server: ForkServer, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    meeting = memory_path / "here"
    child = server.start(reference_runs.compute_and_write, memory_path / "cache", meeting, log=memory_path / "log")
    wait_for(meeting, child)
    with TensorCache(memory_path / "cache", reference_runs.KEY).held() as cache:
        assert cache.read("rows_0_1") is not None
    assert "another run is computing what belongs in" in caplog.text
    assert child.wait() == 0, child.log
