"""Where a run is in its data: a position in a permutation that is a function of the seed and the epoch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.seeds import derive_seed


@dataclass
class Cursor:
    """Walks over `num_groups` groups (rows that belong together: a pair, or a single row), `groups_per_step` at a time,
    epoch by epoch.

    A step never spans two epochs. An epoch's last short batch is handed out as it is, or left out with `drop_last`. All
    that must be saved is `epoch` and `offset`.

    Attributes:
        epoch: passes begun, from 0, at the last group handed out.
        offset: groups of this epoch handed out; after an epoch's last it stays there until the next step.

    >>> cursor = Cursor(5, groups_per_step=2, seed=0, shuffle=False)
    >>> [cursor.take()[2].tolist() for _ in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    num_groups: int
    groups_per_step: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    epoch: int = 0
    offset: int = 0
    _order: tuple[int, Tensor] | None = None

    @property
    def position(self) -> tuple[int, int]:
        """`epoch` and `offset`; may be set back to where it was."""
        return self.epoch, self.offset

    @position.setter
    def position(self, value: tuple[int, int]) -> None:
        self.epoch, self.offset = value

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_groups, self.groups_per_step)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def epoch_is_done(self) -> bool:
        left = self.num_groups - self.offset
        return left < (self.groups_per_step if self.drop_last else 1)

    def take(self) -> tuple[int, int, Tensor]:
        """The next step: its epoch, its first group's draw number in that epoch, and its groups' indices [groups]."""
        if self.epoch_is_done:
            self.epoch, self.offset = self.epoch + 1, 0
        draw = self.offset
        self.offset = min(draw + self.groups_per_step, self.num_groups)
        return self.epoch, draw, self.order(self.epoch)[draw : self.offset]

    def order(self, epoch: int) -> Tensor:
        """All groups' indices in the order of this epoch, int64 [num_groups]."""
        if not self.shuffle:
            return torch.arange(self.num_groups)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            self._order = (epoch, torch.randperm(self.num_groups, generator=generator))
        return self._order[1]
