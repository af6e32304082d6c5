"""From logits to tokens. All functions work on each row by itself: a row's bits do not depend on the others.

One uniform number makes one token, by inversion: the first token whose cumulative probability is above it. So a sample
needs one number per token, and equal numbers on equal logits give equal tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.types import Sampling

# Wider rows are summed in blocks of this many tokens first: fast, and no small probability is lost.
_BLOCK = 256


@dataclass(frozen=True)
class Settings:
    """The sampling settings of several rows as tensors; `None` where no row needs it.

    Attributes:
        temperature: [rows, 1], 1 where greedy.
        greedy: [rows].
        all_greedy: nothing is drawn at all.
        truncated: places of the rows with top-k, top-p or min-p, and these three, each [places, 1].
        banned: row and token of each ban, each [bans].
    """

    temperature: Tensor | None
    greedy: Tensor | None
    all_greedy: bool
    truncated: tuple[Tensor, Tensor, Tensor, Tensor] | None
    banned: tuple[Tensor, Tensor] | None


def settings_of(rows: Sequence[Sampling], device: torch.device) -> Settings:
    greedy = [row.temperature == 0 for row in rows]
    cut = [i for i, row in enumerate(rows) if not greedy[i] and (row.top_k or row.top_p < 1 or row.min_p)]
    bans = [(i, token) for i, row in enumerate(rows) for token in row.ban_ids]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    return Settings(
        temperature=column([row.temperature or 1.0 for row in rows])
        if any(row.temperature not in (0, 1) for row in rows)
        else None,
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        all_greedy=all(greedy),
        truncated=(
            torch.tensor(cut, device=device),
            column([rows[i].top_k or math.inf for i in cut]),
            column([rows[i].top_p for i in cut]),
            column([rows[i].min_p for i in cut]),
        )
        if cut
        else None,
        banned=(
            torch.tensor([row for row, _ in bans], device=device),
            torch.tensor([token for _, token in bans], device=device),
        )
        if bans
        else None,
    )


def draw(logits: Tensor, settings: Settings, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row.

    Args:
        logits: [rows, vocabulary]; overwritten.
        uniforms: [rows], float64 in [0, 1).

    Returns:
        ids and log-probs, each [rows]; see `types.Completion` for which distribution's. A row with a NaN gets some
        token and the log-prob NaN.
    """
    logits = logits.float()
    if settings.banned is not None:
        logits.index_put_(settings.banned, logits.new_tensor(-math.inf))
    if settings.temperature is not None:
        logits.div_(settings.temperature)
    if settings.truncated is not None:
        places, *limits = settings.truncated
        logits.index_copy_(0, places, _truncated(logits[places], *limits))
    probs = logits.softmax(-1)
    if settings.all_greedy:
        ids = logits.argmax(-1)
    else:
        ids = _invert(probs, uniforms)
        if settings.greedy is not None:
            ids = torch.where(settings.greedy, logits.argmax(-1), ids)
    return ids, probs.gather(-1, ids[:, None]).squeeze(-1).log()


def _truncated(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """-inf in place of what top-k, then top-p, then min-p leave out. Of equal logits the lower id comes first; the most
    likely token always stays.

    Args:
        logits: [rows, vocabulary].
        top_k, top_p, min_p: [rows, 1].
    """
    ordered, ids = logits.sort(descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= top_k, -math.inf)
    probs = ordered.softmax(-1, dtype=torch.float64)
    out = (probs.cumsum(-1) - probs >= top_p) | (probs < min_p * probs[:, :1])
    out[:, 0] = False
    return torch.full_like(logits, -math.inf).scatter(-1, ids, ordered.masked_fill(out, -math.inf))


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability is above the uniform number (scaled to the row's sum). A token of
    probability 0 is never it: u < 1 gives u * sum < sum in float64."""
    rows, vocabulary = probs.shape
    if vocabulary <= 4 * _BLOCK:
        return _first_above(probs, uniforms)
    blocks = torch.nn.functional.pad(probs, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    block = _first_above(sums, uniforms)
    ends, own = sums.cumsum(-1), torch.arange(rows, device=probs.device)
    inside = (uniforms * ends[:, -1] - (ends[own, block] - sums[own, block])) / sums[own, block]
    inside = inside.clamp(0.0, 1 - 2.0**-53)  # rounding may reach either end
    ids = block * _BLOCK + _first_above(blocks[own, block], inside)
    return ids.clamp(max=vocabulary - 1)


def _first_above(weights: Tensor, uniforms: Tensor) -> Tensor:
    ends = weights.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(ends, (uniforms * ends[:, -1])[:, None], right=True).squeeze(-1)
    return found.clamp(max=weights.shape[-1] - 1)  # where the sum is NaN, nothing is above it


@lru_cache(maxsize=64)
def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raises `ConfigError` when a setting is out of range."""
    s = sampling
    wrong = {
        f"max_new_tokens {s.max_new_tokens}: expected at least 1": s.max_new_tokens < 1,
        f"temperature {s.temperature}: expected 0 (greedy) or above": not 0 <= s.temperature < math.inf,
        f"top_k {s.top_k}: expected 0 (off) or above": s.top_k < 0,
        f"top_p {s.top_p}: expected above 0, at most 1 (off)": not 0 < s.top_p <= 1,
        f"min_p {s.min_p}: expected 0 (off) to 1": not 0 <= s.min_p <= 1,
        "stop: an empty text ends every completion before it begins; remove it": "" in s.stop,
        "ban_ids: every token of the vocabulary is banned": len(set(s.ban_ids)) >= vocabulary,
    }
    for name, ids in (("stop_ids", s.stop_ids), ("ban_ids", s.ban_ids)):
        for token in ids:
            wrong[f"{name}: the model has no token {token}, only 0 to {vocabulary - 1}"] = not 0 <= token < vocabulary
    for message, found in wrong.items():
        if found:
            raise ConfigError(f"sampling: {message}")
