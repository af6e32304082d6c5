"""What survives. A pure function over what is there; nothing here touches the disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete checkpoint of the current line, and what it reported.

    Attributes:
        metric: the value it is ranked by; `None` where it has none.
    """

    step: int
    metric: float | None = None


@dataclass(frozen=True)
class Retention:
    """A checkpoint survives if any rule keeps it.

    Attributes:
        save_period: steps divisible by it are kept: all of them, or the best `keep_top_k`.
        keep_top_k: ranked by `metric_name`, or the newest where none is named; `None` keeps all.
        ft_keep_latest_k: the newest so many are kept, whatever their step.
    """

    save_period: int
    keep_top_k: int | None = None
    metric_name: str | None = None
    higher_is_better: bool = False
    ft_keep_latest_k: int = 1

    def metric(self, training_info: Mapping[str, Any]) -> float | None:
        """The number a checkpoint is ranked by; `None` when it is missing, not a number, NaN or infinite."""
        value = training_info.get(self.metric_name) if self.metric_name else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)

    def ranked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Best first. Without a value a checkpoint is worse than any with one; of equals the newer is better."""

        def key(candidate: Candidate) -> tuple[bool, float, int]:
            value = candidate.metric
            if value is None:
                return (False, 0.0, candidate.step)
            return (True, value if self.higher_is_better else -value, candidate.step)

        return sorted(candidates, key=key, reverse=True)

    def best(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The best by the metric; the newest where no metric is named or none has a value."""
        ranked = self.ranked(candidates)
        return ranked[0] if ranked else None

    def survivors(self, candidates: Iterable[Candidate], exclude_latest: bool = True) -> set[int]:
        """The steps to keep. `exclude_latest=False` drops the rule that the newest stays in any case."""
        everything = sorted(candidates, key=lambda candidate: candidate.step)
        if not everything:
            return set()
        periodic = [candidate for candidate in everything if candidate.step % self.save_period == 0]
        kept = self.ranked(periodic) if self.keep_top_k is None else self.ranked(periodic)[: self.keep_top_k]
        kept += everything[-self.ft_keep_latest_k :]
        kept += self.ranked(everything)[:1] if self.metric_name else []
        kept += everything[-1:] if exclude_latest else []
        return {candidate.step for candidate in kept}

    def most_kept(self, num_saves: int | None) -> int:
        """The most checkpoints that can be kept at once, as far as that is known before the run; at least 1."""
        if self.keep_top_k is None:
            return max(num_saves or 1, 1)
        most = self.keep_top_k + self.ft_keep_latest_k + (1 if self.metric_name else 0)
        return max(min(most, num_saves) if num_saves else most, 1)
