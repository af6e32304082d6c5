"""What ends a run from outside: SIGTERM, SIGINT and the deadline."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from surefoot.errors import StopRequested
from surefoot.types import SaveEvent

# Read when the command line starts, before the heavy imports: close enough to the process's start.
PROCESS_STARTED_S = time.monotonic()

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopWatch:
    """Implements `types.Stop`.

    The first signal is remembered and raised by the next `check`, which runs at points where the state can be saved.
    A second signal stops the process at once, as if nobody had caught it.

    Args:
        deadline_s: seconds from the process's start; `None` for no deadline.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._signal: int | None = None
        self._before: dict[int, Any] = {}
        self._longest_step_s = 0.0
        self._longest_save_s = 0.0
        self._step_began_s: float | None = None

    def __enter__(self) -> StopWatch:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number

    def check(self) -> None:
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            raise StopRequested(f"{name} received", exit_code=128 + self._signal)

    def check_deadline(self) -> None:
        """Called once at the start of each step, so the time between two calls is one step, its save included."""
        if self._deadline_s is None:
            return
        now_s = time.monotonic() - PROCESS_STARTED_S
        if self._step_began_s is not None:
            self._longest_step_s = max(self._longest_step_s, now_s - self._step_began_s)
        self._step_began_s = now_s
        if now_s + self._longest_step_s + self._longest_save_s >= self._deadline_s:
            raise StopRequested(
                f"the deadline checkpoint_must_save_by ({self._deadline_s:.0f} s after the start) is near: "
                f"the longest step took {self._longest_step_s:.1f} s, the longest save {self._longest_save_s:.1f} s",
                exit_code=0,
            )

    def on_save(self, event: SaveEvent) -> None:
        if event.kind == "finished":
            self._longest_save_s = max(self._longest_save_s, event.seconds)
