"""The inputs that both implementations get: a few short rows, drawn without torch so that they never change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

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


# ---------------------------------------------------------------------------------------------------- policy gradient

# Tokens of the prompt and of the completion, row by row; two groups of three.
POLICY_LENGTHS = ((2, 5), (2, 3), (2, 1), (1, 4), (1, 6), (1, 2))
ADVANTAGES = (1.25, -0.5, -0.75, 0.25, -1.5, 1.25)


@dataclass(frozen=True)
class PolicyRows:
    """All [rows, tokens], padded with zeros on the right; `loss_mask` is 1 on completions."""

    logprobs: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor
    generator_logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    loss_mask: Tensor


def policy_rows(empty_row: int | None = None) -> PolicyRows:
    """Ratios from 0.4 to 2.2. In `empty_row` no token carries loss."""
    random = Random(11)
    width = max(prompt + completion for prompt, completion in POLICY_LENGTHS)
    table: dict[str, list[list[float]]] = {name: [] for name in PolicyRows.__dataclass_fields__}
    for row, (prompt, completion) in enumerate(POLICY_LENGTHS):
        mask = [float(prompt <= t < prompt + completion and row != empty_row) for t in range(width)]
        logprobs = [math.log(random.uniform(0.05, 0.9)) for _ in range(width)]
        moved = [[x + random.gauss(0.0, spread) for x in logprobs] for spread in (0.4, 0.7, 0.5)]
        entropy = [random.uniform(0.1, 2.0) for _ in range(width)]
        for name, values in zip(table, (logprobs, *moved, entropy, [ADVANTAGES[row]] * width), strict=False):
            table[name].append([value * m for value, m in zip(values, mask, strict=True)])
        table["loss_mask"].append(mask)
    return PolicyRows(**{name: torch.tensor(values) for name, values in table.items()})


@dataclass(frozen=True)
class PolicyCase:
    """One setting in both dialects: options of our loss, and settings of TRL's trainer."""

    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    empty_row: int | None = None


LONGEST = 8
_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {"reduction": "sequence"},
    "bnpo": {"reduction": "token"},
    "dr_grpo": {"reduction": "constant", "max_response_length": LONGEST},
    "dapo": {"reduction": "token"},
    "cispo": {"loss_type": "cispo", "reduction": "token", "ratio_clip_max": 1.1},
    "sapo": {"loss_type": "sapo", "reduction": "sequence"},
}


def _policy(name: str, ours: Mapping[str, Any] | None = None, **theirs: Any) -> PolicyCase:
    cap = {"epsilon_high": 1.1} if name == "cispo" else {}
    return PolicyCase({**_TYPES[name], **(ours or {})}, {"loss_type": name, **cap, **theirs})


_SEQUENCE = {"sequence_level_importance_ratios": True}
_KL = {"reference_policy_kl_penalty": 0.05}
_TIS = {"importance_sampling_correction": "token", "truncated_importance_sampling_type": "tis"}
POLICY_CASES: dict[str, PolicyCase] = {
    **{f"{name}, token": _policy(name) for name in _TYPES},
    **{f"{name}, sequence": _policy(name, _SEQUENCE, importance_sampling_level="sequence") for name in _TYPES},
    "gspo": _policy(
        "grpo",
        {**_SEQUENCE, "ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4},
        **{"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "clip-higher": _policy("dapo", {"ratio_clip_max": 0.28}, epsilon_high=0.28),
    "dual clip": _policy("grpo", {"ratio_clip_c": 1.5}, delta=1.5),
    "sapo, other temperatures": _policy(
        "sapo",
        {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        **{"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    "plain k3": _policy("grpo", {**_KL, "reference_policy_kl_type": "k3_plain"}, beta=0.05),
    "k3": _policy("dapo", {**_KL, "reference_policy_kl_type": "k3"}, beta=0.05, use_bias_correction_kl=True),
    "entropy": _policy("dapo", {"entropy_coef": 0.02}, entropy_coef=0.02),
    "on policy": _policy("grpo", {"force_on_policy_ratio": True}, old=None),
    "truncated weights": _policy(
        "dapo",
        {**_TIS, **_KL, "truncated_importance_sampling_ratio": 1.2, "reference_policy_kl_type": "k3_plain"},
        **{"beta": 0.05, "weights_at_most": 1.2},
    ),
    "entropy, by sequence": _policy("grpo", {"entropy_coef": 0.02}, entropy_coef=0.02),
    "empty row": PolicyCase(_TYPES["grpo"], {"loss_type": "grpo"}, empty_row=2),
    "empty row, constant": PolicyCase(_TYPES["dr_grpo"], {"loss_type": "dr_grpo"}, empty_row=2),
}

# ------------------------------------------------------------------------------------------------------ GAE, whitening

GAE_CASES: dict[str, tuple[float, float]] = {"plain": (1.0, 0.95), "discounted": (0.9, 0.7), "monte carlo": (1.0, 1.0)}
OWN_TOKENS = (6, 4, 1, 5)


def value_rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rewards` [rows]; `values`, `penalties` and `mask` [rows, tokens], 0 on padding."""
    random = Random(13)
    width = max(OWN_TOKENS)
    mask = [[float(t < own) for t in range(width)] for own in OWN_TOKENS]
    values, penalties = ([[random.gauss(0.3, 1.0) * m for m in row] for row in mask] for _ in range(2))
    rewards = [random.gauss(0.0, 1.0) for _ in OWN_TOKENS]
    return torch.tensor(rewards), torch.tensor(values), torch.tensor(penalties), torch.tensor(mask)


# ------------------------------------------------------------------------------------- distillation across tokenizers

# Of the student and of the teacher; four tokens are in both.
GOLD_VOCABULARIES: tuple[dict[str, int], dict[str, int]] = (
    {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "x": 5, "y": 6},
    {"b": 0, "a": 1, "c": 2, "abc": 3, "z": 4, "d": 5, "q": 6, "w": 7},
)
# Row by row: tokens of the prompt, and where the completion's tokens end, for the student and for the teacher.
GOLD_ROWS = (((2, (2, 5, 6, 9)), (3, (1, 2, 6, 9))), ((1, (3, 4)), (2, (1, 3, 4))), ((3, (1, 2, 3, 4, 7)), (1, (4, 7))))


@dataclass(frozen=True)
class GoldCase:
    merge: Literal["observed", "bayesian"] = "observed"
    beta: float = 0.0
    weights: tuple[float, float] | None = None
    temperature: float = 1.0
    ce_weight: float = 0.0
    hybrid: bool = True


GOLD_CASES: dict[str, GoldCase] = {
    "observed": GoldCase(),
    "bayesian": GoldCase("bayesian"),
    "reverse": GoldCase("bayesian", beta=1.0),
    "jsd": GoldCase(beta=0.3),
    "weights": GoldCase(beta=0.5, weights=(0.7, 0.2)),
    "temperature": GoldCase(temperature=2.0),
    "cross-entropy": GoldCase("bayesian", ce_weight=0.5),
    "no common tokens": GoldCase(hybrid=False),
}


@dataclass(frozen=True)
class GoldSide:
    """All [rows, tokens, ...]. `labels` are -100 outside the completions; `offsets` the bytes where a token begins and
    ends."""

    logits: Tensor
    ids: Tensor
    labels: Tensor
    offsets: Tensor


def gold_rows() -> tuple[GoldSide, GoldSide]:
    random = Random(11)
    sides = []
    for side, names in enumerate(GOLD_VOCABULARIES):
        rows_of_side = [row[side] for row in GOLD_ROWS]
        width = max(prompt + len(ends) for prompt, ends in rows_of_side)
        logits = [[[random.gauss(0.0, 2.0) for _ in names] for _ in range(width)] for _ in rows_of_side]
        ids = [[random.randrange(len(names)) for _ in range(width)] for _ in rows_of_side]
        labels, offsets = [], []
        for row, (prompt, ends) in zip(ids, rows_of_side, strict=True):
            rest = width - prompt - len(ends)
            labels.append([-100] * prompt + row[prompt : prompt + len(ends)] + [-100] * rest)
            spans = list(zip((0, *ends), ends, strict=False))
            offsets.append([(0, 0)] * prompt + spans + [(0, 0)] * rest)
        sides.append(GoldSide(torch.tensor(logits), *(torch.tensor(part) for part in (ids, labels, offsets))))
    return sides[0], sides[1]


# ------------------------------------------------------------------------------------------------------- distillation


@dataclass(frozen=True)
class Distilled:
    """Hidden states [rows, tokens, width] and heads [vocabulary, width] of both sides; `mask` [rows, tokens]."""

    student: Tensor
    teacher: Tensor
    student_head: Tensor
    teacher_head: Tensor
    mask: Tensor


def distilled() -> Distilled:
    random = Random(11)

    def drawn(*shape: int) -> Tensor:
        return torch.tensor([random.gauss(0.0, 1.0) for _ in range(math.prod(shape))]).reshape(shape)

    mask = torch.tensor([[0.0, 1, 1, 1, 0], [1, 1, 0, 1, 0]])
    return Distilled(drawn(2, 5, 4), drawn(2, 5, 3), drawn(9, 4), 1.5 * drawn(9, 3), mask)


@dataclass(frozen=True)
class DistillCase:
    """`theirs`: which of TRL's functions; "top-k" with the tail cell or without."""

    theirs: str
    beta: float
    temperature: float = 1.0
    top_k: int | None = None
    tail: bool = True


DISTILL_CASES: dict[str, DistillCase] = {
    **{f"generalized_jsd_loss, {b}": DistillCase("generalized_jsd_loss", b) for b in (0.0, 0.3, 0.5, 1.0)},
    **{f"generalized_jsd_loss, {b}, T 2": DistillCase("generalized_jsd_loss", b, 2.0) for b in (0.0, 0.3, 1.0)},
    **{f"chunked, {b}, T 1.5": DistillCase("chunked", b, 1.5) for b in (0.0, 0.3, 1.0)},
    **{f"top 3 and a tail, {b}": DistillCase("top-k", b, top_k=3) for b in (0.0, 0.3, 1.0)},
    **{f"top 3 renormalised, {b}": DistillCase("top-k", b, top_k=3, tail=False) for b in (0.0, 0.3, 1.0)},
}
