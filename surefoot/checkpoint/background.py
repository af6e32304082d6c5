"""One piece of work on a thread of its own, and the record of how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from surefoot.errors import CheckpointError


class Finalization:
    """A save on its way to being committed.

    Whatever the work raises is kept, `BaseException` included. A thread that ends without having recorded how it ended
    counts as failed too.

    Attributes:
        path: the temporary directory.
    """

    def __init__(self, path: Path, step: int, work: Callable[[], None]) -> None:
        self.path = path
        self.step = step
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._finished = False
        self._thread = threading.Thread(target=self._run, name=f"save-step-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None  # what it captured is let go when it is done
        try:
            if work is not None:
                work()
        except BaseException as error:
            self._error = error
        else:
            self._finished = True

    @property
    def ended(self) -> bool:
        return self._finished or self.failed

    @property
    def failed(self) -> bool:
        """Never waits."""
        if self._error is not None:
            return True
        return not self._thread.is_alive() and not self._finished

    @property
    def error(self) -> BaseException:
        """What the work raised; only for a failed one."""
        return self._error or CheckpointError(f"the thread that wrote {self.path} ended without a word")

    def join(self) -> None:
        self._thread.join()
