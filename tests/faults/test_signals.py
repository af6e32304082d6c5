"""SIGTERM, SIGINT, SIGKILL and the deadline, against real processes at certain points of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from surefoot import loop
from surefoot.checkpoint import verify_checkpoint
from tests.faults import children
from tests.faults.project import Project, assert_all_sound, in_every_case, train_lines
from tests.helpers import runs
from tests.helpers.fork_server import Child, ForkServer, wait_for


@pytest.fixture
def meeting(memory_path: Path) -> Path:
    folder = memory_path / "meeting"
    folder.mkdir()
    return folder


def held(server: ForkServer, project: Project, memory_path: Path, hold_at: str) -> Child:
    """A run that has come to the point and waits there."""
    meeting = memory_path / "meeting"
    words = (project.file, memory_path / "run", hold_at, meeting)
    child = server.start(children.run, *words, log=memory_path / "log")
    wait_for(meeting / "here", child)
    return child


@in_every_case("number", signal.SIGTERM, signal.SIGINT)
@pytest.mark.parametrize(("hold_at", "steps_done"), [("train", 3), ("batch", 2), ("validate", 4), ("save", None)])
def test_a_signal_saves_the_last_step_and_stops(
    every_project: Project,
    memory_path: Path,
    meeting: Path,
    fork_server: ForkServer,
    hold_at: str,
    steps_done: int | None,
    number: int,
) -> None:
    run_dir = memory_path / "run"
    child = held(fork_server, every_project, memory_path, hold_at)
    child.signal(number)
    (meeting / "go").touch()
    assert child.wait() == 128 + number, child.log
    done = train_lines(run_dir)
    assert done == steps_done or (steps_done is None and 2 <= done <= 4)  # meanwhile it may have trained on
    assert verify_checkpoint(run_dir / "checkpoints" / f"step_{done}").sound
    assert_all_sound(run_dir / "checkpoints")
    if hold_at == "validate":
        assert not any(line["kind"] == "val" and line["step"] == 4 for line in runs.metric_lines(run_dir))
    every_project.assert_goes_on(run_dir, done)


@pytest.mark.parametrize(("hold_at", "safe"), [("train", 2), ("last save", 2), ("save", 0)])
def test_a_second_signal_stops_at_once(
    project: Project, memory_path: Path, meeting: Path, fork_server: ForkServer, hold_at: str, safe: int
) -> None:
    """The point is never left: the process ends in it."""
    child = held(fork_server, project, memory_path, hold_at)
    status = None
    while status is None:  # two signals that come before the process has seen one are one
        child.signal(signal.SIGTERM)
        status = child.wait_a_little(0.05)
    assert status == -signal.SIGTERM, child.log
    assert not (meeting / "go").exists()
    assert_all_sound(memory_path / "run" / "checkpoints")
    project.assert_goes_on(memory_path / "run", safe)


def test_a_kill_in_a_background_save_loses_that_save_alone(
    every_project: Project, memory_path: Path, meeting: Path, fork_server: ForkServer
) -> None:
    child = held(fork_server, every_project, memory_path, "last save")
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert (memory_path / "run" / "checkpoints" / "tmp_step_3").is_dir()
    every_project.assert_goes_on(memory_path / "run", 2)


def test_the_deadline_saves_and_stops(project: Project, memory_path: Path, fork_server: ForkServer) -> None:
    run_dir, log = memory_path / "run", memory_path / "log"
    words = (project.file, f"run_dir={run_dir}", "checkpointing.checkpoint_must_save_by=00:01:00:00")
    assert fork_server.call(children.command_line_near_its_deadline, "train", *words, log=log) == 0, log.read_text()
    assert "deadline checkpoint_must_save_by" in log.read_text()
    assert train_lines(run_dir) == 3
    project.assert_goes_on(run_dir, 3, "checkpointing.checkpoint_must_save_by=null")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_line_ends_with_the_signals_status(
    project: Project, memory_path: Path, fork_server: ForkServer, number: int, status: int
) -> None:
    run_dir, log = memory_path / "run", memory_path / "log"
    words = ("train", project.file, f"run_dir={run_dir}", "max_num_steps=100000", "checkpointing.save_period=100000")
    child = fork_server.start(children.command_line, *words, log=log)
    wait_for(run_dir / "metrics.jsonl", child)
    child.signal(number)
    assert child.wait() == status, child.log
    done = train_lines(run_dir)
    assert f"{signal.Signals(number).name} received; {done} steps done" in child.log
    assert {path.name for path in (run_dir / "checkpoints").glob("step_*")} == {f"step_{done}"}
    resumed = runs.resumed(run_dir, f"max_num_steps={done + 1}")
    assert resumed.clock.step == done
    assert loop.train(resumed).steps == 1


def test_a_killed_run_leaves_no_tokenizing_worker(
    project: Project, memory_path: Path, meeting: Path, fork_server: ForkServer
) -> None:
    child = fork_server.start(
        children.hold_while_tokenizing, project.file, memory_path / "run", meeting, log=memory_path / "log"
    )
    wait_for(meeting / "here", child)
    pids = [int(pid) for pid in (meeting / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(is_worker(pid) for pid in pids)
    child.signal(signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 30
    while any(is_worker(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)
    run = project.start(memory_path / "run")  # what was killed before its first step is not in the way
    loop.train(run)
    project.assert_equals_straight(memory_path / "run")


def test_a_start_that_was_killed_anywhere_is_no_obstacle(
    project: Project, memory_path: Path, fork_server: ForkServer
) -> None:
    log = memory_path / "log"
    assert fork_server.call(children.kill_a_start_everywhere, project.file, memory_path, log=log) == 0, log.read_text()


def is_worker(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return b"surefoot.data.workers" in words and state != "Z" and os.getpid() != pid
