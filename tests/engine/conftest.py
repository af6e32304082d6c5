"""One thread: tiny matrices gain nothing from more, and two test processes would spin against each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
