"""Where the time goes: phases of a step, totals over the run, and what each save cost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from surefoot.report.view import Pace
from surefoot.types import SaveEvent

# What is not a step's own work. Left out of the time a step is said to take, and of tokens per second.
OUTSIDE_THE_STEP = ("validate", "save")
_RECENT_STEPS = 20


class Timeline:
    """Charges every moment to the innermost open phase, so the phases' seconds add up and none counts twice.

    Phases are opened and closed by the training thread alone.

    Args:
        now: a clock in seconds that only goes forward.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._stack: tuple[tuple[str, float], ...] = ()  # open phases and when each began; replaced, never changed
        self._turn: dict[str, float] = {}
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self.totals: dict[str, float] = {}
        self.turns = 0
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._began = self._turned = self._charged = self.now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._stack
        self._charge()
        self._stack = (*outer, (name, self._charged))
        try:
            yield
        finally:
            self._charge()
            self._stack = outer

    def current(self) -> tuple[str, float]:
        """The innermost open phase, "" between phases, and how long it has been open. May be asked from any thread."""
        name, began = (self._stack or (("", self._charged),))[-1]
        return name, self.now() - began

    def _charge(self) -> None:
        now = self.now()
        if self._stack:
            (name, _), passed = self._stack[-1], now - self._charged
            self._turn[name] = self._turn.get(name, 0.0) + passed
            self.totals[name] = self.totals.get(name, 0.0) + passed
        self._charged = now

    def turn(self, tokens: int) -> dict[str, float]:
        """End a step that trained this many tokens.

        Returns:
            `wall_s` since the step before ended; `<phase>_s` of each phase in it; `step_s`, which is `wall_s` without
            validation and saves; `tokens_per_s` of `step_s`. A save comes after its step's line is written, so it shows
            in the line of the step that it held up.
        """
        self._charge()
        wall_s = self._charged - self._turned
        step_s = wall_s - sum(self._turn.get(name, 0.0) for name in OUTSIDE_THE_STEP)
        self._recent.append((step_s, tokens))
        timing = {"wall_s": wall_s, "step_s": step_s, "tokens_per_s": tokens / step_s if step_s > 0 else 0.0}
        timing |= {f"{name}_s": seconds for name, seconds in self._turn.items()}
        self._turn, self._turned, self.turns = {}, self._charged, self.turns + 1
        return timing

    def pace(self) -> Pace:
        """Of the newest steps; at least one must have ended."""
        step_s, tokens = (sum(column) for column in zip(*self._recent, strict=True))
        return Pace(step_s / len(self._recent), tokens / step_s if step_s > 0 else 0.0)

    def left_s(self, steps: int) -> float:
        """So many further steps, if they take as long as all before did, validations and saves included."""
        return steps * (self._turned - self._began) / self.turns

    def elapsed_s(self) -> float:
        return self.now() - self._began


@dataclass(frozen=True, slots=True)
class Saves:
    """What the saves of this process came to so far. `background_s` and `num_bytes` are of finished saves."""

    finished: int = 0
    failed: int = 0
    background_s: float = 0.0
    num_bytes: int = 0


class SaveTally:
    """Adds up save events. Events may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: dict[str, float] = {}
        self.saves = Saves()

    def add(self, event: SaveEvent) -> None:
        with self._lock:
            s = self.saves
            if event.kind == "failed":
                self.saves = Saves(s.finished, s.failed + 1, s.background_s, s.num_bytes)
            elif event.kind == "finished":
                seconds, size = s.background_s + event.seconds, s.num_bytes + event.num_bytes
                self.saves = Saves(s.finished + 1, s.failed, seconds, size)
                self._news = {
                    "save_background_s": self._news.get("save_background_s", 0.0) + event.seconds,
                    "save_bytes": self._news.get("save_bytes", 0) + event.num_bytes,
                }

    def news(self) -> dict[str, float]:
        """Background seconds and bytes of the saves that finished since the last call; empty when none did."""
        with self._lock:
            news, self._news = self._news, {}
            return news
