"""Writer threads that give way to training, and writer processes whose death is noticed."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

from surefoot.errors import CheckpointError

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)

_POLL_S = 0.05
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_BEST_EFFORT_LOWEST = (2 << 13) | 7
_PR_SET_PDEATHSIG = 1


def give_way() -> None:
    """Lower the CPU and I/O priority of the calling thread alone. A system that refuses is left as it is."""
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except (OSError, AttributeError) as error:
        _log.debug("the writer keeps its CPU priority: %s", error)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and platform.system() == "Linux":
        _libc.syscall(ctypes.c_long(number), ctypes.c_int(1), ctypes.c_int(thread), _IOPRIO_BEST_EFFORT_LOWEST)


def wait_for_processes(processes: Iterable[Any]) -> None:
    """Wait until all writer processes (`multiprocessing.Process` or `subprocess.Popen`) have ended well.

    Raises:
        CheckpointError: one was killed or ended with another status than 0; seen within a fraction of a second,
            whatever the others are doing.
    """
    running = list(processes)
    while running:
        for process in list(running):
            status = process.poll() if hasattr(process, "poll") else process.exitcode
            if status is None:
                continue
            if status != 0:
                how = f"was killed by signal {-status} " if status < 0 else "ended before its work was done "
                raise CheckpointError(f"checkpoint writer process {process.pid} {how}(exit code {status})")
            running.remove(process)
        if running:
            time.sleep(_POLL_S)


def die_with_parent(parent_pid: int) -> None:
    """Called first thing in a child that writes: the kernel kills it when the thread that started it ends, so that
    nobody writes into a directory whose lock is gone. Linux only; elsewhere it does nothing.

    Args:
        parent_pid: `os.getpid()` of the parent, taken before the child was started.
    """
    if platform.system() != "Linux":
        return
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the kernel was told
        os._exit(1)
