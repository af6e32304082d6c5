from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from surefoot.checkpoint import wait_for_processes
from surefoot.checkpoint.processes import give_way
from surefoot.errors import CheckpointError, SaveFailed
from tests.checkpoint import runs


def child(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def test_writers_that_end_well() -> None:
    with child("pass") as a, child("pass") as b:
        wait_for_processes([a, b])
    wait_for_processes([])


def test_a_writer_that_fails_is_named_while_another_is_still_busy() -> None:
    with child("input()") as busy, child("raise SystemExit(3)") as failing:
        with pytest.raises(CheckpointError, match=rf"process {failing.pid} .*exit code 3"):
            wait_for_processes([busy, failing])
        assert busy.poll() is None
        busy.kill()


def test_a_killed_writer_fails_the_save(memory_path: Path) -> None:
    manager = runs.manager(memory_path)
    with child("input()") as writer:
        manager.begin_finalization(manager.init_tmp_checkpoint(2, {}), lambda: wait_for_processes([writer]))
        writer.kill()
        with pytest.raises(SaveFailed, match=rf"{writer.pid} was killed by signal 9 \(exit code -9\)"):
            manager.finalize_pending()
    assert not (memory_path / "step_2").exists()


def test_a_writer_dies_with_its_parent() -> None:
    grandchild = (
        "import os, sys, time\nfrom surefoot.checkpoint.processes import die_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n    die_with_parent(parent)\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "else:\n    input()\n"
    )
    with child(grandchild) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.kill()
        assert parent.stdout.read() == ""  # ends only when the grandchild, which holds the other end, is gone


def test_only_the_calling_thread_gives_way() -> None:
    seen = {}

    def work() -> None:
        give_way()
        seen["writer"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen["writer"] > before
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
