"""The inputs that both implementations get: four pairs of short rows, drawn without torch so that they never change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

# Tokens of the prompt and of the completion, row by row: chosen, rejected, chosen, …
LENGTHS = ((2, 5), (2, 3), (1, 1), (1, 4), (3, 4), (3, 4), (2, 2), (2, 6))


@dataclass(frozen=True)
class Rows:
    """All [rows, tokens], padded with zeros on the right; `loss_mask` is 1 on completions."""

    logprobs: Tensor
    reference_logprobs: Tensor
    log_sum_sq_probs: Tensor
    loss_mask: Tensor
    attention_mask: Tensor


def rows(pairs: int = 4, empty_pair: int | None = None) -> Rows:
    """The first pairs. In `empty_pair` no token of either side carries loss."""
    random = Random(5)
    width = max(prompt + completion for prompt, completion in LENGTHS)
    table: dict[str, list[list[float]]] = {name: [] for name in Rows.__dataclass_fields__}
    for row, (prompt, completion) in enumerate(LENGTHS[: 2 * pairs]):
        own = [float(t < prompt + completion) for t in range(width)]
        mask = [float(prompt <= t < prompt + completion and row // 2 != empty_pair) for t in range(width)]
        logprobs = [math.log(random.uniform(0.05, 0.9)) for _ in range(width)]
        reference = [x + random.gauss(0.0, 0.7) for x in logprobs]
        squares = [math.log(random.uniform(0.1, 0.8)) for _ in range(width)]
        for name, values in zip(table, (logprobs, reference, squares), strict=False):
            table[name].append([value * m for value, m in zip(values, mask, strict=True)])
        table["loss_mask"].append(mask)
        table["attention_mask"].append(own)
    return Rows(**{name: torch.tensor(values) for name, values in table.items()})


@dataclass(frozen=True)
class Case:
    """One loss in both dialects. `entries` are ours as (name, weight, options); `options` those of the whole loss.

    Attributes:
        theirs: settings of TRL's trainer that differ from what follows from `entries`.
        pairs, empty_pair: as in `rows`.
    """

    entries: Sequence[tuple[str, float, Mapping[str, float]]]
    options: Mapping[str, Any] = field(default_factory=dict)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    pairs: int = 4
    empty_pair: int | None = None


def _one(name: str, options: Mapping[str, float] | None = None, **settings: Any) -> Case:
    return Case([(name, 1.0, {"beta": 0.3, **(options or {})} if name != "sft" else {})], **settings)


_PLAIN = ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")
_BETA = {"beta": 0.1}

CASES: dict[str, Case] = {
    **{name: _one(name) for name in (*_PLAIN, "robust", "discopop", "sft", "sigmoid_norm")},
    **{f"{name}, smoothed": _one(name, {"label_smoothing": 0.1}) for name in ("exo_pair", "robust")},
    **{f"{name}, smoothed": _one(name, {"label_smoothing": 0.2}) for name in ("aot", "aot_unpaired")},
    "discopop, wide": _one("discopop", {"discopop_tau": 0.5}),
    "mpo": Case([("sigmoid", 0.8, _BETA), ("bco_pair", 0.2, _BETA), ("sft", 1.0, {})]),
    "mix with sorting": Case([("aot", 0.5, _BETA), ("ipo", 2.0, _BETA)]),
    "ld": Case([("sigmoid", 1.0, _BETA)], {"ld_alpha": 0.4}),
    "ld, mix": Case([("ipo", 0.5, _BETA), ("nca_pair", 1.0, _BETA), ("sft", 1.0, {})], {"ld_alpha": 0.0}),
    "wpo": Case([("sigmoid", 1.0, _BETA)], {"wpo": True}),
    "wpo, mix": Case([("bco_pair", 0.5, _BETA), ("ipo", 1.0, _BETA)], {"wpo": True}),
    # Per-token log-probs under sigmoid are TRL's sigmoid_norm.
    "length average": Case([("sigmoid", 1.0, _BETA)], {"length_average": True}, {"loss_types": ["sigmoid_norm"]}),
    # TRL's sigmoid ignores label smoothing; its aot reads it, and with one pair there is nothing to sort.
    "sigmoid, smoothed": _one("sigmoid", {"label_smoothing": 0.1}, theirs={"loss_types": ["aot"]}, pairs=1),
    "sigmoid, smoothing ignored": _one("sigmoid", theirs={"label_smoothing": 0.1}),
    "empty pair": _one("sigmoid", empty_pair=1),
}

# Scores of the two sides, margins, and the centring coefficient.
SCORES = ((1.5, 0.25), (-0.5, 0.75), (0.125, -2.0))
MARGINS = (0.5, 0.0, 2.0)
REWARD_CASES: dict[str, tuple[bool, float]] = {
    "plain": (False, 0.0),
    "margins": (True, 0.0),
    "centred": (False, 0.01),
    "both": (True, 0.5),
}
