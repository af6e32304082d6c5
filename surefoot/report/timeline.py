"""Where the time goes: the phases of each step, and their totals over the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What is not a step's own work. Left out of the time a step is said to take, and of tokens per second.
OUTSIDE_THE_STEP = ("validate", "save")


class Timeline:
    """Phases are opened and closed by the training thread alone. While one is open inside another, the other's time
    stands still, so that times add up.

    Args:
        now: a clock in seconds that only goes forward.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open = ("", 0.0)
        self._turn: defaultdict[str, float] = defaultdict(float)
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.turns = 0
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._began = self._turned = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._open[0]
        self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(outer)

    def _switch_to(self, name: str) -> None:
        now = self._now()
        before, since = self._open
        self._open = (name, now)
        if before:
            self._turn[before] += now - since
            self.totals[before] += now - since

    def current(self) -> tuple[str, float]:
        """The innermost open phase, "" where there is none, and for how long. May be asked from any thread."""
        name, began = self._open
        return name, self._now() - began

    def turn(self, tokens: int) -> dict[str, float]:
        """End a step that trained this many tokens.

        Returns:
            `wall_s` since the step before ended; `<phase>_s` of each phase in it; `step_s`, which is `wall_s` without
            validation and saves; `tokens_per_s` of `step_s`. A save comes after its step's line is written, so it shows
            in the line of the step that it held up.
        """
        now = self._now()
        wall_s = now - self._turned
        step_s = wall_s - sum(self._turn.get(name, 0.0) for name in OUTSIDE_THE_STEP)
        timing = {"wall_s": wall_s, "step_s": step_s, "tokens_per_s": tokens / step_s if step_s > 0 else 0.0}
        timing |= {f"{name}_s": seconds for name, seconds in self._turn.items()}
        self._turn.clear()
        self._turned, self.turns = now, self.turns + 1
        return timing

    def left_s(self, steps: int) -> float:
        """So many further steps, if they take as long as all before did, validations and saves included."""
        return steps * (self._turned - self._began) / self.turns

    def elapsed_s(self) -> float:
        return self._now() - self._began
