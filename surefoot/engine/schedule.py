"""The learning rate as a pure function of the optimizer steps done: there is no scheduler state to save or to lose."""

from __future__ import annotations

import logging
import math

from surefoot.config import SchedulerConfig
from surefoot.errors import ConfigError

logger = logging.getLogger(__name__)


def decay_end(config: SchedulerConfig, total_optimizer_steps: int | None) -> int | None:
    """The optimizer step at which the decay ends, `None` for a constant rate.

    Raises:
        ConfigError: the rate is to decay and nothing says over how many steps.
    """
    if config.name == "constant":
        return None
    end = config.decay_steps or total_optimizer_steps
    if end is None:
        raise ConfigError(
            f"scheduler.name is {config.name} and the run's number of optimizer steps is not known: expected "
            "scheduler.decay_steps, or max_num_steps at the top of the file"
        )
    if end <= config.warmup_steps:
        logger.warning("the run's %d optimizer steps end within scheduler.warmup_steps (%d)", end, config.warmup_steps)
    return end


def lr_at(config: SchedulerConfig, lr: float, step: int, end: int | None) -> float:
    """The rate of the optimizer step that follows `step` optimizer steps done.

    With W = warmup_steps, E = end, m = min_lr_ratio and p = (step - W) / (E - W), clipped to [0, 1]:

        step < W    lr · (step + 1) / W        never 0; the full rate at the last warm-up step
        constant    lr
        linear      lr · (m + (1 - m) · (1 - p))
        cosine      lr · (m + (1 - m) · (1 + cos(π p)) / 2)

    >>> [lr_at(SchedulerConfig(name="linear", warmup_steps=2), 1.0, step, 6) for step in (0, 1, 2, 4, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if end is None or config.name == "constant":
        return lr
    progress = min((step - config.warmup_steps) / max(end - config.warmup_steps, 1), 1.0)
    left = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
