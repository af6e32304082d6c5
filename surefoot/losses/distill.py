"""Distillation: how far a student's next-token distributions are from a teacher's, whole or on the teacher's top k.

A distribution is given by its log-probs over *cells* [..., cells]: the vocabulary's ids; or the teacher's k likeliest
ids and, as the last, all others together; or these k alone, renormalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from surefoot.errors import ConfigError
from surefoot.types import Metric, Metrics

if TYPE_CHECKING:
    from torch import Tensor

DIVERGENCES = ("forward_kl", "reverse_kl", "mixed_kl", "jsd")
_NO_MASS = -1e4  # of a cell without probability, as `types.Head` has it


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher‖student) = Σ p (log p − log q) [...], of log-probs [..., cells]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student‖teacher)."""
    return forward_kl(teacher, student)


def mixed_kl(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """(1 − β) · KL(teacher‖student) + β · KL(student‖teacher)."""
    return (1 - beta) * forward_kl(student, teacher) + beta * reverse_kl(student, teacher)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalised, arXiv:2306.13649 (1), with the mixture m = β · teacher + (1 − β) · student:
    β · KL(teacher‖m) + (1 − β) · KL(student‖m); by convention KL(teacher‖student) at β = 0 and the reverse at β = 1."""
    if beta in (0.0, 1.0):
        return mixed_kl(student, teacher, beta)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)


def log_mass_outside(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The log of the probability [n] of all but `ids` [n, k], under `logprobs` [n, vocabulary]."""
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1).clamp(min=_NO_MASS)


def cells(kept: Tensor, rest: Tensor, *, tail: bool) -> Tensor:
    """Of k kept log-probs [n, k] and the log of the mass outside [n], a distribution: over k + 1 cells, or without the
    tail over k, renormalised."""
    if tail:
        return torch.cat([kept, rest[..., None]], -1)
    return kept - kept.logsumexp(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence, over which cells.

    Attributes:
        name: one of `DIVERGENCES`.
        beta: of "mixed_kl" and "jsd", from 0 to 1.
        top_k: cells are the teacher's k likeliest ids; `None`: the whole vocabulary.
        tail: with `top_k`: all other ids are one more cell, so that a student gains nothing by leaving the k; else the
            two are compared inside the k alone.

    Raises:
        ConfigError: one of them is out of range.
    """

    name: str = "reverse_kl"
    beta: float = 0.5
    top_k: int | None = None
    tail: bool = True

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise ConfigError(f"divergence: expected one of {', '.join(DIVERGENCES)}, found {self.name!r}")
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta must lie between 0 (teacher‖student) and 1 (student‖teacher), found {self.beta}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, found {self.top_k}; null compares the whole vocabulary")

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """[...], never negative but for rounding, of log-probs [..., cells]."""
        if self.name in ("forward_kl", "reverse_kl"):
            return (forward_kl if self.name == "forward_kl" else reverse_kl)(student, teacher)
        return (mixed_kl if self.name == "mixed_kl" else jensen_shannon)(student, teacher, self.beta)


@dataclass(frozen=True)
class TeacherDivergences:
    """A `types.TokenFunction`: the student's divergence from each teacher, "<teacher>/divergence", and with `top_k` the
    student's mass on the teacher's k ids, "<teacher>/kept".

    Reads, of each teacher, with `top_k` the columns "<teacher>/topk_ids", "/topk_logprobs" and "/topk_rest", else
    "<teacher>/hidden".

    Attributes:
        readouts: without `top_k`: of each teacher, from its hidden states [n, width] to log-probs [n, vocabulary].
    """

    divergence: Divergence
    teachers: tuple[str, ...]
    readouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[str, ...]:
        parts = ("hidden",) if self.divergence.top_k is None else ("topk_ids", "topk_logprobs", "topk_rest")
        return tuple(f"{teacher}/{part}" for teacher in self.teachers for part in parts)

    @property
    def outputs(self) -> tuple[str, ...]:
        parts = ("divergence",) if self.divergence.top_k is None else ("divergence", "kept")
        return tuple(f"{teacher}/{part}" for teacher in self.teachers for part in parts)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for teacher in self.teachers:
            if self.divergence.top_k is None:
                whole = self.readouts[teacher](columns[f"{teacher}/hidden"])
                made[f"{teacher}/divergence"] = self.divergence(logprobs, whole)
                continue
            ids = columns[f"{teacher}/topk_ids"]
            kept, rest, tail = logprobs.gather(-1, ids), log_mass_outside(logprobs, ids), self.divergence.tail
            theirs = cells(columns[f"{teacher}/topk_logprobs"], columns[f"{teacher}/topk_rest"], tail=tail)
            made[f"{teacher}/divergence"] = self.divergence(cells(kept, rest, tail=tail), theirs)
            made[f"{teacher}/kept"] = -torch.expm1(rest)
        return made


@dataclass(frozen=True)
class DistillationLoss:
    """Σ over trained tokens of the divergences from the teachers, each times the teacher's weight on the row, / tokens.

    Reads the columns `loss_mask` and, of each teacher, "<teacher>/logprobs" [rows, tokens] and "<teacher>/weight"
    [rows]; and the outputs `logprobs` and those of `function`. Where no token is trained the loss is 0 and so is its
    gradient.
    """

    function: TeacherDivergences
    whole_step: ClassVar[bool] = False
    outputs: ClassVar[tuple[str, ...]] = ("logprobs",)

    @property
    def fields(self) -> tuple[str, ...]:
        parts = ["weight", "logprobs"] + (["topk_rest"] if self.function.divergence.top_k is not None else [])
        return ("loss_mask", *(f"{teacher}/{part}" for teacher in self.function.teachers for part in parts))

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        return {"tokens": float((columns["loss_mask"] != 0).sum())}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and these metrics, means over tokens:

        - `loss`;
        - `student_nll`, `teacher_nll`: of the tokens themselves;
        - `kept_mass`, `teacher_kept_mass`: with top k, of the student and of the teacher on the teacher's k ids;
        - `loss/<teacher>`: where there are several, the divergence on the rows that the teacher has a part in;
        - `num_tokens`, `skipped_rows` (with nothing to train): sums.

        With several teachers `teacher_…` and `kept_mass` are weighted as the loss is.
        """
        mask = columns["loss_mask"] != 0
        tokens = float(mask.sum())

        def weighted(values: Callable[[str], Tensor]) -> Tensor:
            """Summed over the tokens and the teachers."""
            parts = (values(t).masked_fill(~mask, 0.0).sum(1) * columns[f"{t}/weight"] for t in self.function.teachers)
            return sum(parts, torch.zeros(len(mask), device=mask.device)).sum()

        total = weighted(lambda teacher: out[f"{teacher}/divergence"])
        sums = {
            "loss": total,
            "student_nll": -out["logprobs"].masked_fill(~mask, 0.0).sum(),
            "teacher_nll": -weighted(lambda teacher: columns[f"{teacher}/logprobs"]),
        }
        if self.function.divergence.top_k is not None:
            sums["kept_mass"] = weighted(lambda teacher: out[f"{teacher}/kept"])
            sums["teacher_kept_mass"] = weighted(lambda teacher: -torch.expm1(columns[f"{teacher}/topk_rest"]))
        metrics = {name: _mean(value, tokens) for name, value in sums.items()}
        if len(self.function.teachers) > 1:
            metrics |= {f"loss/{t}": _own(out, columns, mask, t) for t in self.function.teachers}
        metrics["num_tokens"] = Metric(tokens, reduce="sum")
        metrics["skipped_rows"] = Metric(float((~mask.any(1)).sum()), reduce="sum")
        return total / (norm["tokens"] or 1.0), metrics


def _mean(total: Tensor, tokens: float) -> Metric:
    return Metric(float(total.detach()) / tokens if tokens else 0.0, weight=tokens)


def _own(out: Mapping[str, Tensor], columns: Mapping[str, Tensor], mask: Tensor, teacher: str) -> Metric:
    own = mask & (columns[f"{teacher}/weight"] > 0)[:, None]
    return _mean(out[f"{teacher}/divergence"].masked_fill(~own, 0.0).sum(), float(own.sum()))


def row_weights(sources: Sequence[str], teachers: Mapping[str, tuple[float, Sequence[str]]]) -> dict[str, list[float]]:
    """How much each teacher counts on each row; over the teachers they sum to 1.

    Args:
        sources: of each row.
        teachers: of each its weight, and the sources that it teaches; none: all.

    >>> row_weights(["math", "code"], {"a": (3.0, []), "b": (1.0, ["code"])})
    {'a': [1.0, 0.75], 'b': [0.0, 0.25]}

    Raises:
        ConfigError: a source has no teacher.
    """
    found: dict[str, list[float]] = {name: [] for name in teachers}
    for source in sources:
        weights = {n: w if not taught or source in taught else 0.0 for n, (w, taught) in teachers.items()}
        total = sum(weights.values())
        if not total:
            known = sorted({name for _, taught in teachers.values() for name in taught})
            raise ConfigError(
                f"teachers: none of them teaches rows whose source is {source!r}, only {', '.join(known)}: add it to a "
                "teacher's sources, or leave one teacher's sources out"
            )
        for name, weight in weights.items():
            found[name].append(weight / total)
    return found
