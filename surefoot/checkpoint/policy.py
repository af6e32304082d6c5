"""When to save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePolicy:
    """Save at every `save_period`-th step, and in between at every `ft_save_period`-th for fault tolerance.

    >>> [step for step in range(8) if SavePolicy(save_period=4, ft_save_period=3).due(step)]
    [3, 4, 6]
    """

    save_period: int
    ft_save_period: int | None = None

    def due(self, step: int) -> bool:
        if step < 1:
            return False
        return step % self.save_period == 0 or (self.ft_save_period is not None and step % self.ft_save_period == 0)

    def num_saves(self, steps: int) -> int:
        """How many of the first `steps` steps are saved, the last one counted in any case."""
        return sum(self.due(step) for step in range(1, steps)) + (steps > 0)

    def missed_validations(self, metric_name: str | None, val_period: int) -> str | None:
        """A warning, in words, when checkpoints ranked by a validation metric will not have one."""
        if metric_name is None or not metric_name.startswith("val:"):
            return None
        if val_period and self.save_period % val_period == 0:
            return None
        period = f"every {val_period} steps" if val_period else "at most at the start and the end (val_period is 0)"
        return (
            f"checkpoints are ranked by {metric_name}, but validation runs {period} and saves come every "
            f"{self.save_period} steps: a checkpoint without a validation at its own step ranks worst. "
            f"{'Make' if val_period else 'Set val_period, and make'} save_period a multiple of val_period."
        )
