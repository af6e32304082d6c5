"""Distillation between two vocabularies, over chunks: runs of tokens on both sides that are the same bytes of a text.

Two losses, and a third for a teacher that has the student's own vocabulary. What a teacher says of a chunk comes as a
`Target`: its k likeliest ids, their log-probs, and the log of the mass outside; k may be its whole vocabulary. What a
loss needs of the student's distributions is read token by token, before chunks are put together: so that the engine can
make these for a few tokens at a time, and only some k numbers of each are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from surefoot.losses.distill import Divergence, cells, log_mass_outside
from surefoot.types import Metric, Metrics, merge_metrics

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = math.log(1e-8)  # smaller probabilities count as this, as in GOLD
PARTS = ("topk_ids", "topk_logprobs", "topk_rest")  # of a head's outputs, those that make a `Target`
Merge: TypeAlias = Literal["observed", "bayesian"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Which tokens make up each chunk; chunks follow each other.

    Attributes:
        number: int64 [tokens]: the chunk of each token, from 0.
        first, last: int64 [chunks]: its first and last token.
    """

    number: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, keys: Tensor) -> Spans:
        """`keys` [tokens]: equal for neighbours of one chunk."""
        _, number, sizes = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
        ends = sizes.cumsum(0)
        return cls(number, ends - sizes, ends - 1)

    def sums(self, values: Tensor) -> Tensor:
        """Over each chunk's tokens, [chunks, ...] of [tokens, ...]."""
        return values.new_zeros(len(self.first), *values.shape[1:]).index_add(0, self.number, values)

    def means(self, values: Tensor) -> Tensor:
        sizes = (self.last - self.first + 1).to(values.dtype)
        return self.sums(values) / sizes.reshape(-1, *[1] * (values.ndim - 1))


def merged(logprobs: Tensor, own: Tensor, spans: Spans, how: Merge) -> Tensor:
    """GOLD's distribution of each chunk [chunks, cells], as logs whose sum need not be 1: that of one of its tokens,
    times the probabilities of the others. "observed" takes the first token's distribution, so that both sides speak of
    what follows the same bytes; "bayesian" takes the last one's.

    Args:
        logprobs: [tokens, cells].
        own: [tokens], log-probs of the tokens themselves.
    """
    at = spans.first if how == "observed" else spans.last
    own = own.clamp(min=FLOOR)
    return logprobs[at] + (spans.sums(own) - own[at])[:, None]


@dataclass(frozen=True, slots=True)
class Target:
    """A teacher's distributions, of chunks or tokens: `ids` and `logprobs` [chunks, k], `rest` [chunks]: the log of the
    mass of all other ids."""

    ids: Tensor
    logprobs: Tensor
    rest: Tensor


def mean_target(said: Target, spans: Spans, vocabulary: int) -> Target:
    """The mean of the distributions of each chunk's tokens, cut to the k likeliest ids again. `said`: of tokens."""
    spread = said.logprobs.new_zeros(len(said.ids), vocabulary)
    whole = spans.means(spread.scatter_(1, said.ids, said.logprobs.exp()))
    kept, kept_ids = whole.topk(said.ids.shape[1])
    outside = whole.sum(1) - kept.sum(1) + spans.means(said.rest.exp())
    return Target(kept_ids, kept.log().clamp(min=FLOOR), outside.clamp(min=0.0).log().clamp(min=FLOOR))


class ChunkLoss(Protocol):
    """One number per chunk, [chunks], by name; "loss" is what is minimised. Its own tensors are on the student's
    device."""

    def read(self, logprobs: Tensor, ids: Tensor) -> Tensor:
        """What is needed of the student's distribution at each token, [tokens, cells].

        Args:
            logprobs: [tokens, vocabulary].
            ids: [tokens, k], of the target of the token's chunk.
        """

    def target(self, said: Target, own: Tensor, spans: Spans) -> Target:
        """What the teacher's distributions of its tokens come to for each chunk. `own` [tokens]: log-probs of the
        tokens themselves."""

    def __call__(self, read: Tensor, own: Tensor, spans: Spans, target: Target) -> dict[str, Tensor]:
        """
        Args:
            read: [tokens, cells], of the student's distributions at the chunks' tokens.
            own: [tokens], the student's log-probs of the tokens themselves.
        """


@dataclass(frozen=True)
class Gold:
    """GOLD's hybrid loss (TRL 1.16, `ULDLoss`): the divergence over byte-identical tokens, and the L1 distance of the
    sorted probabilities of all others, each by its weight. A chunk of several tokens is `merged`.

    With the teacher's top k, as many of the student's likeliest other tokens are compared as the teacher has among its
    k; the mass outside is one more cell of the divergence.

    Attributes:
        to_student: int64 [teacher's vocabulary]: the byte-identical id, or -1.
        others: int64 [n]: the student's ids that have no counterpart.
        weights: of the divergence and of the distance; GOLD's own are the share of the teacher's tokens with a
            counterpart, and the rest.
        whole: the targets hold the teacher's whole vocabulary.
    """

    divergence: Divergence
    to_student: Tensor
    others: Tensor
    weights: tuple[float, float]
    merge: Merge = "observed"
    whole: bool = True

    @classmethod
    def of(
        cls, same: Tensor, sizes: tuple[int, int], weights: tuple[float, float] | None = None, **options: Any
    ) -> Gold:
        """`same` [2, n]: byte-identical ids of student and teacher. `sizes`: of the two vocabularies."""
        to_student = torch.full((sizes[1],), -1, device=same.device)
        to_student[same[1]] = same[0]
        others = torch.ones(sizes[0], dtype=torch.bool, device=same.device)
        others[same[0]] = False
        share = same.shape[1] / max(sizes[1], 1)
        return cls(
            to_student=to_student, others=others.nonzero()[:, 0], weights=weights or (share, 1 - share), **options
        )

    def read(self, logprobs: Tensor, ids: Tensor) -> Tensor:
        """The log-probs of the ids' counterparts; then of all others, or of as many of the likeliest as `ids`."""
        other = logprobs.index_select(1, self.others)
        other = other if self.whole else other.topk(min(ids.shape[1], other.shape[1])).values
        return torch.cat([logprobs.gather(1, self.to_student[ids].clamp(min=0)), other], 1)

    def target(self, said: Target, own: Tensor, spans: Spans) -> Target:
        both = merged(torch.cat([said.logprobs, said.rest[:, None]], 1), own, spans, self.merge)
        return Target(said.ids[spans.first if self.merge == "observed" else spans.last], both[:, :-1], both[:, -1])

    def __call__(self, read: Tensor, own: Tensor, spans: Spans, target: Target) -> dict[str, Tensor]:
        k, student = target.ids.shape[1], merged(read, own, spans, self.merge)
        ours, other = student[:, :k], student[:, k:].exp().sort(1, descending=True).values
        same = self.to_student[target.ids] >= 0
        theirs = target.logprobs.exp().masked_fill(same, 0.0).sort(1, descending=True).values
        width = max(other.shape[1], k)
        other, theirs = F.pad(other, (0, width - other.shape[1])), F.pad(theirs, (0, width - k))
        if not self.whole:
            ranks = torch.arange(width, device=other.device)
            other = other.masked_fill(ranks >= (~same).sum(1, keepdim=True), 0.0)
        distance = (other - theirs).abs().sum(1)
        cells_s, cells_t = ours.masked_fill(~same, FLOOR), target.logprobs.masked_fill(~same, FLOOR)
        if not self.whole:
            total = merged(torch.zeros_like(own)[:, None], own, spans, self.merge).exp()[:, 0]
            rest = total - ours.exp().masked_fill(~same, 0.0).sum(1) - other.sum(1)
            cells_s = torch.cat([cells_s, rest.clamp(min=math.exp(FLOOR)).log()[:, None]], 1)
            cells_t = torch.cat([cells_t, target.rest[:, None]], 1)
        divergence = self.divergence(cells_s.clamp(min=FLOOR), cells_t.clamp(min=FLOOR))
        loss = self.weights[0] * divergence + self.weights[1] * distance
        return {"loss": loss, "matched": divergence, "unmatched": distance}


@dataclass(frozen=True)
class Projection:
    """P-KL: the student's distribution, carried over to the teacher's vocabulary by a sparse matrix, against the
    teacher's. Of a chunk of several tokens, both sides' distributions are the means of their tokens'.

    So a student's token that the teacher writes as three counts a third on each of these, and the teacher's mean over
    its three tokens has a third of its mass near each. What has no counterpart on the other side, and what is outside
    the teacher's top k, is one more cell on both sides: so the divergence is one of distributions, never negative.

    Attributes:
        rows, columns, weights: [entries], of the matrix [student, teacher].
        reached: bool [teacher's vocabulary]: ids that the matrix leads to.
    """

    divergence: Divergence
    rows: Tensor
    columns: Tensor
    weights: Tensor
    reached: Tensor

    @classmethod
    def of(cls, divergence: Divergence, rows: Tensor, columns: Tensor, weights: Tensor, vocabulary: int) -> Projection:
        """`vocabulary`: the teacher's number of ids."""
        reached = torch.zeros(vocabulary, dtype=torch.bool, device=columns.device)
        reached[columns] = True
        return cls(divergence, rows, columns, weights, reached)

    def read(self, logprobs: Tensor, ids: Tensor) -> Tensor:
        """The probabilities of the ids, carried over."""
        carried = logprobs.new_zeros(len(ids), len(self.reached))
        parts = logprobs.exp().index_select(1, self.rows) * self.weights
        return carried.index_add(1, self.columns, parts).gather(1, ids)

    def target(self, said: Target, own: Tensor, spans: Spans) -> Target:
        return mean_target(said, spans, len(self.reached))

    def __call__(self, read: Tensor, own: Tensor, spans: Spans, target: Target) -> dict[str, Tensor]:
        kept = spans.means(read)
        lost = ~self.reached[target.ids]
        rest = torch.cat([target.logprobs.masked_fill(~lost, -torch.inf), target.rest[:, None]], 1).logsumexp(1)
        ours = torch.cat([kept, 1 - kept.sum(1, keepdim=True)], 1).clamp(min=math.exp(FLOOR)).log()
        theirs = torch.cat([target.logprobs.masked_fill(lost, FLOOR), rest[:, None]], 1)
        return {"loss": self.divergence(ours, theirs.clamp(min=FLOOR))}


@dataclass(frozen=True)
class SameVocabulary:
    """For a teacher with the student's own tokenizer, each token being a chunk: the divergence itself, as in
    `surefoot.losses.distill`."""

    divergence: Divergence
    whole: bool = True

    def read(self, logprobs: Tensor, ids: Tensor) -> Tensor:
        kept = logprobs.gather(1, ids)
        return kept if self.whole else cells(kept, log_mass_outside(logprobs, ids), tail=True)

    def target(self, said: Target, own: Tensor, spans: Spans) -> Target:
        return said

    def __call__(self, read: Tensor, own: Tensor, spans: Spans, target: Target) -> dict[str, Tensor]:
        theirs = target.logprobs if self.whole else cells(target.logprobs, target.rest, tail=True)
        return {"loss": self.divergence(read, theirs)}


def no_chunks(length: int, k: int) -> dict[str, Tensor]:
    """What `CrossTokenizerLoss` reads of a teacher in a row of that many tokens, where none is in a chunk; and
    "likelihood", a number: the teacher's mean log-prob of what it read, for each of the student's tokens."""
    return {
        "chunk": torch.zeros(length, dtype=torch.int64),
        "topk_ids": torch.zeros(length, k, dtype=torch.int64),
        "topk_logprobs": torch.zeros(length, k),
        "topk_rest": torch.zeros(length),
        "likelihood": torch.tensor(-torch.inf),
    }


def chunk_columns(
    mask: Tensor, ours: Tensor, theirs: Tensor, out: Mapping[str, Tensor], loss: ChunkLoss
) -> dict[str, Tensor]:
    """The same of a row that a teacher has read.

    Args:
        mask: [tokens]: not 0 on the student's own.
        ours, theirs: int64 [own tokens] of that side: the chunk of each, by numbers that rise; 0: in none.
        out: of the teacher's own tokens `logprobs` [own tokens], and `topk_ids`, `topk_logprobs` and `topk_rest`.
    """
    found = no_chunks(len(mask), out["topk_ids"].shape[1])
    inside, at = theirs > 0, mask.nonzero()[:, 0][ours > 0]
    if not len(at):
        return found
    numbers, own = ours[ours > 0], out["logprobs"][inside]
    target = loss.target(Target(*(out[part][inside] for part in PARTS)), own, Spans.of(theirs[inside]))
    found["chunk"][at] = numbers - numbers[0] + 1
    for part, values in zip(PARTS, (target.ids, target.logprobs, target.rest), strict=True):
        found[part][at] = values[Spans.of(numbers).number]
    return found | {"likelihood": own.sum() / len(at)}


@dataclass(frozen=True)
class Readings:
    """A `types.TokenFunction`: what the teachers' losses read of the student's distributions, "<teacher>/read"; and
    `nll`, of the tokens themselves at temperature 1."""

    teachers: Mapping[str, ChunkLoss]
    temperature: float

    @property
    def fields(self) -> tuple[str, ...]:
        return ("input_ids", *(f"{teacher}/topk_ids" for teacher in self.teachers))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("nll", *(f"{teacher}/read" for teacher in self.teachers))

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plain = logprobs if self.temperature == 1 else (logprobs * self.temperature).log_softmax(-1)
        nll = F.nll_loss(plain, columns["input_ids"], reduction="none")
        read = {
            f"{name}/read": loss.read(logprobs, columns[f"{name}/topk_ids"]) for name, loss in self.teachers.items()
        }
        return {"nll": nll} | read


@dataclass(frozen=True)
class CrossTokenizerLoss:
    """T² · the mean, over the chunks of all teachers by their weights, of the loss, + ce_weight · mean over tokens of
    −log p.

    Reads `loss_mask` and, of each teacher, "<teacher>/weight" [rows] and "<teacher>/chunk" [rows, tokens]: 0 where a
    token is in no chunk, else the chunk's number in the row, from 1 without gaps; and at each token of a chunk its
    "<teacher>/topk_ids", "/topk_logprobs" [rows, tokens, k] and "/topk_rest" [rows, tokens]. And the outputs, at
    temperature T, `logprobs` and those of `function`.

    Attributes:
        teachers: of each its loss.
        reduction: "chunk": all chunks count alike. "sequence": all rows with chunks do, as in GOLD.
        ce_scale: multiplies the cross-entropy too; what a dynamic weight changes.
    """

    teachers: Mapping[str, ChunkLoss]
    temperature: float = 1.0
    reduction: Literal["chunk", "sequence"] = "chunk"
    ce_weight: float = 0.0
    ce_scale: float = 1.0
    whole_step: ClassVar[bool] = False
    outputs: ClassVar[tuple[str, ...]] = ("logprobs",)

    @property
    def function(self) -> Readings:
        return Readings(self.teachers, self.temperature)

    @property
    def fields(self) -> tuple[str, ...]:
        parts = ("weight", "chunk", *PARTS)
        return ("loss_mask", *(f"{teacher}/{part}" for teacher in self.teachers for part in parts))

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        found = {"tokens": float((columns["loss_mask"] != 0).sum())} if self.ce_weight else {}
        numbers = {name: _chunks(columns, name).amax(1) for name in self.teachers}
        counted = {n: chunks if self.reduction == "chunk" else chunks > 0 for n, chunks in numbers.items()}
        return found | {"chunks": sum(float(columns[f"{n}/weight"] @ c.float()) for n, c in counted.items())}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and these metrics:

        - `loss`: what is minimised; `distillation`: the same without the cross-entropy;
        - `loss/<teacher>`, with gold `matched/<teacher>` and `unmatched/<teacher>`: means over chunks, before weight
          and T²;
        - `nll`: mean over the trained tokens, at temperature 1;
        - `chunk_tokens`: the student's tokens per chunk;
        - `num_tokens`, `skipped_rows` (without any chunk): sums.
        """
        mask = columns["loss_mask"] != 0
        tokens, nll = float(mask.sum()), out["nll"][mask].sum()
        distillation = nll.new_zeros(())
        metrics: dict[str, Metric] = {}
        for name, loss in self.teachers.items():
            chunk = _Chunk.tokens(_chunks(columns, name))
            values = self._of(name, loss, chunk, out, columns)
            each = columns[f"{name}/weight"][chunk.row] * (chunk.shares if self.reduction == "sequence" else 1.0)
            mean = (values["loss"] * each).sum() / (norm["chunks"] or 1.0)
            distillation = distillation + self.temperature**2 * mean
            metrics |= {f"{key}/{name}": _mean(value.sum(), len(value)) for key, value in values.items()}
            sizes = {"chunk_tokens": _mean(chunk.spans.last - chunk.spans.first + 1, len(chunk.shares))}
            metrics = merge_metrics([metrics, sizes])
        ce = self.ce_weight * self.ce_scale * nll / norm["tokens"] if self.ce_weight and norm["tokens"] else 0.0
        total = distillation + ce
        own, whole = sum(self.counts(columns).values()), sum(norm.values())
        named = {"loss": total, "distillation": distillation}
        chunks = torch.stack([_chunks(columns, name).amax(1) for name in self.teachers])
        return total, {
            **{name: _mean(value * whole, own) for name, value in named.items()},
            "nll": _mean(nll, tokens),
            **metrics,
            "num_tokens": Metric(tokens, reduce="sum"),
            "skipped_rows": Metric(float((chunks.sum(0) == 0).sum()), reduce="sum"),
        }

    def _of(
        self, name: str, loss: ChunkLoss, chunk: _Chunk, out: Mapping[str, Tensor], columns: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The chunks' losses, [chunks] each."""
        read, own = out[f"{name}/read"].flatten(0, 1)[chunk.at], out["logprobs"].flatten()[chunk.at]
        first = chunk.at[chunk.spans.first]
        target = Target(*(columns[f"{name}/{part}"].flatten(0, 1)[first] for part in PARTS))
        return loss(read, own, chunk.spans, target)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The tokens of some rows that are in chunks.

    Attributes:
        at: int64 [tokens], places in the flattened rows.
        row: int64 [chunks]. `shares` [chunks]: 1 / the number of chunks in the row.
    """

    at: Tensor
    spans: Spans
    row: Tensor
    shares: Tensor

    @classmethod
    def tokens(cls, chunk: Tensor) -> _Chunk:
        """`chunk` int64 [rows, tokens]: 0, or the number in the row from 1 on."""
        at = chunk.flatten().nonzero().squeeze(1)
        row = at // max(chunk.shape[1], 1)
        spans = Spans.of(row * (chunk.shape[1] + 1) + chunk.flatten()[at])
        row = row[spans.first]
        return cls(at, spans, row, 1 / chunk.amax(1)[row].float())


def _chunks(columns: Mapping[str, Tensor], name: str) -> Tensor:
    """int64 [rows, tokens]: those that count, of rows in which the teacher has a part."""
    return columns[f"{name}/chunk"] * (columns[f"{name}/weight"] > 0)[:, None]


def _mean(total: Tensor, weight: float) -> Metric:
    return Metric(float(total.detach().sum()) / weight if weight else 0.0, weight=weight)
