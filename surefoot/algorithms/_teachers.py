"""What all distillations share: their teachers, what these say of the rows, and the loss against it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.config import AlgorithmConfig, Place, PositiveInt, PositiveReal, Real, Section
from surefoot.data.encode import num_ids
from surefoot.errors import ConfigError, NonFiniteError
from surefoot.losses.distill import DistillationLoss, Divergence, TeacherDivergences, row_weights
from surefoot.types import BatchRef, EngineSpec, Head, Kit, Metrics, Objective

_log = logging.getLogger(__name__)

_FAR_ABOVE = 10.0  # times the student's perplexity


class TeacherConfig(Section):
    """One teacher: a folder or hub name of a model with the student's tokenizer.

    Attributes:
        weight: how much it counts, beside the other teachers of a row.
        sources: it teaches only rows whose column `source` is one of these; none: all rows.
    """

    model: Place
    weight: PositiveReal = 1.0
    sources: list[str] = Field(default=[])


class TeachersConfig(AlgorithmConfig):
    """
    Attributes:
        teachers: frozen models to learn from.
        divergence: "forward_kl": KL(teacher‖student). "reverse_kl": KL(student‖teacher). "mixed_kl": 1 − beta of the
            first and beta of the second. "jsd": the generalised Jensen–Shannon divergence, which is the first at beta 0
            and the second at beta 1.
        beta: of "mixed_kl" and "jsd"; default: 0.5.
        top_k: compare the teacher's k likeliest tokens alone; default: the whole vocabulary.
        temperature: logits of both sides are divided by it.
    """

    teachers: Annotated[Sequence[TeacherConfig], Field(min_length=1)]
    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "reverse_kl"
    beta: Annotated[Real, Field(ge=0, le=1)] | None = None
    top_k: PositiveInt | None = None
    temperature: PositiveReal = 1.0

    @model_validator(mode="after")
    def _beta_is_read(self) -> Self:
        if self.beta is not None and self.divergence in ("forward_kl", "reverse_kl"):
            raise ValueError(f"beta: {self.divergence} ignores it; expected divergence: mixed_kl or jsd, or no beta")
        return self

    @property
    def names(self) -> dict[str, TeacherConfig]:
        """Of the teachers' engines and columns."""
        if len(self.teachers) == 1:
            return {"teacher": self.teachers[0]}
        return {f"teacher_{i}": teacher for i, teacher in enumerate(self.teachers, start=1)}

    def form(self) -> Divergence:
        return Divergence(self.divergence, 0.5 if self.beta is None else self.beta)


class SameTokenizerConfig(TeachersConfig):
    """
    Attributes:
        tail: with `top_k`: "cell" keeps all other tokens as one more; "renormalise" leaves them out on both sides.
    """

    teachers: Annotated[list[TeacherConfig], Field(min_length=1)]
    tail: Literal["cell", "renormalise"] | None = None

    @model_validator(mode="after")
    def _tail_is_read(self) -> Self:
        if self.tail is not None and self.top_k is None:
            raise ValueError("tail: the whole vocabulary has none; set top_k too, or leave it out")
        return self

    def form(self) -> Divergence:
        return replace(super().form(), top_k=self.top_k, tail=self.tail != "renormalise")

    def specs(self, **options: Any) -> dict[str, EngineSpec]:
        return {n: EngineSpec(trained=False, model=t.model, **options) for n, t in self.names.items()}


class Teachers:
    """The teachers of a run. Of each, rows get the columns "<name>/weight" [rows] and what its head puts out on the
    trained tokens: "<name>/logprobs", and "<name>/topk_ids", "/topk_logprobs" and "/topk_rest", or "<name>/hidden".

    Args:
        head: by default what the divergence needs.

    Attributes:
        used: names of those that teach a row that columns were last added to.
        metrics: of these rows.
    """

    def __init__(self, config: TeachersConfig, head: Head | None = None) -> None:
        self._config, self._form = config, config.form()
        outputs = ("logprobs", "hidden" if config.top_k is None else "topk")
        self.head = head or Head(outputs, config.temperature, config.top_k or 0, mask="loss_mask", known_only=True)
        self.used: tuple[str, ...] = tuple(config.names)
        self.metrics: Metrics = {}

    def _head(self, name: str) -> Head:
        return self.head

    def check(self, kit: Kit) -> None:
        """Raises `ConfigError` when a vocabulary has no k tokens."""
        self._num_ids = num_ids(kit.tokenizer)
        for name, teacher in self._config.names.items():
            size, k = num_ids(kit.tokenizers.get(name, kit.tokenizer)), self._config.top_k or 0
            if k > size:
                section = kit.config.algorithm.rpartition(".")[2]
                raise ConfigError(
                    f"{section}.top_k: expected at most {size}, the tokens of {teacher.model}'s tokenizer, found {k}"
                )

    def add(self, ref: BatchRef, kit: Kit) -> BatchRef:
        """
        Raises:
            ConfigError: no teacher teaches rows of a source.
            NonFiniteError: a teacher puts out NaN or infinity; names the row.
        """
        ref, names = self._with_known_ids(ref, kit), self._config.names
        sources: Any = kit.plane.get(ref, ["source"])["source"] if "source" in ref.fields else [""] * len(ref)
        weights = row_weights(sources, {name: (t.weight, t.sources) for name, t in names.items()})
        self.used = tuple(name for name in names if any(weights[name]))
        for name in self.used:
            rows = [i for i, weight in enumerate(weights[name]) if weight]
            ref = self._infer(name, ref, rows, kit)
            ref = kit.plane.put(ref, {f"{name}/weight": torch.tensor(weights[name])})
        return ref

    def _with_known_ids(self, ref: BatchRef, kit: Kit) -> BatchRef:
        """A student may draw an id that pads its vocabulary, which a teacher may lack: nothing is trained from there
        on, and what stands there is not read."""
        columns: dict[str, Any] = kit.plane.get(ref, ["input_ids", "loss_mask"])
        if all(int(row.max()) < self._num_ids for row in columns["input_ids"]):
            return ref
        past = [(row >= self._num_ids).cumsum(0) > 0 for row in columns["input_ids"]]
        cut = {
            name: [row.masked_fill(p, 0) for row, p in zip(rows, past, strict=True)] for name, rows in columns.items()
        }
        return kit.plane.put(ref, cut)

    def _infer(self, name: str, ref: BatchRef, rows: Sequence[int], kit: Kit) -> BatchRef:
        """Of rows that it does not teach, zeros: what is computed of them counts for nothing."""
        into = {part: f"{name}/{part}" for part in self.head.names}
        taught, others = chosen(ref, rows), chosen(ref, sorted(set(range(len(ref))) - set(rows)))
        columns = self._said(name, taught, self.head, into, kit)
        if len(others):
            blank = {
                column: [values[0].new_zeros(length, *values[0].shape[1:]) for length in others.lengths]
                for column, values in columns.items()
            }
            kit.plane.put(others, blank)
        return ref.with_fields(into.values())

    def _said(self, name: str, ref: BatchRef, head: Head, into: Mapping[str, str], kit: Kit) -> dict[str, Any]:
        """What the teacher puts out on these rows, all of it finite."""
        with kit.phase("teacher"):
            kit.engines[name].infer(ref, head, into)
        columns = kit.plane.get(ref, list(into.values()))
        for output, column in into.items():
            for row, value in zip(ref.ids, columns[column], strict=True):
                if not value.isfinite().all():
                    raise NonFiniteError(
                        f"the teacher {self._config.names[name].model} puts out {output} that are not all finite for "
                        f"row {row} ({len(value)} tokens): its weights, or policy.precision, do not suit these tokens"
                    )
        return columns

    def objective(self, kit: Kit) -> Objective:
        """For the rows last added to."""
        whole = Head(temperature=self._config.temperature, known_only=True)
        readouts = {name: partial(kit.engines[name].vocabulary_logprobs, head=whole) for name in self.used}
        function = TeacherDivergences(self._form, self.used, readouts if self._form.top_k is None else {})
        return Objective("policy", replace(whole, function=function), DistillationLoss(function))

    def warn_of_nonsense(self, ref: BatchRef, kit: Kit) -> None:
        """A teacher that finds completions of the data far less likely than the student does reads something else than
        was meant, or teaches something else. `ref`: some of these rows."""
        head = Head(temperature=self.head.temperature, mask="loss_mask", known_only=True)
        ref = kit.engines["policy"].infer(self.add(ref, kit), head, {"logprobs": "student/logprobs"})
        ours, tokens = mean_logprobs(ref, kit, "student/logprobs")
        for name in self.used:
            theirs = self._likelihoods(name, ref, kit)
            read = theirs > -torch.inf
            count = max(float(tokens[read].sum()), 1.0)
            losses = [-float(side[read] @ tokens[read]) / count for side in (theirs, ours)]
            if losses[0] - losses[1] > math.log(_FAR_ABOVE):
                worst = int(theirs.masked_fill(~read, torch.inf).argmin())
                _log.warning(
                    "the teacher %s finds completions of the data far less likely than the student does (perplexity "
                    "%.3g, the student's %.3g): its chat template may be another, or it was trained for something "
                    "else. It saw %r",
                    *(self._config.names[name].model, *(math.exp(min(loss, 700)) for loss in losses)),
                    self._read(name, ref.rows(worst, worst + 1), kit)[:500],
                )

    def _likelihoods(self, name: str, ref: BatchRef, kit: Kit) -> Tensor:
        """[rows]: the teacher's mean log-prob of what is trained, for each of the student's tokens; -inf where it does
        not teach."""
        weights: Any = kit.plane.get(ref, [f"{name}/weight"])[f"{name}/weight"]
        return mean_logprobs(ref, kit, f"{name}/logprobs")[0].masked_fill(weights == 0, -torch.inf)

    def _read(self, name: str, row: BatchRef, kit: Kit) -> str:
        """The row's text, as the teacher reads it."""
        column = self._head(name).inputs
        ids: Any = kit.plane.get(row, [column])[column]
        tokenizer = kit.tokenizers.get(name, kit.tokenizer)
        return str(tokenizer.decode(ids[0].tolist(), skip_special_tokens=False))


def mean_logprobs(ref: BatchRef, kit: Kit, column: str) -> tuple[Tensor, Tensor]:
    """[rows]: the mean over the trained tokens, -inf where there are none; and how many these are."""
    columns: Any = kit.plane.get(ref, [column, "loss_mask"])
    tokens = torch.stack([mask.sum() for mask in columns["loss_mask"]])
    sums = torch.stack([values @ mask for values, mask in zip(*columns.values(), strict=True)])
    return (sums / tokens).masked_fill(tokens == 0, -torch.inf), tokens


def chosen(ref: BatchRef, rows: Sequence[int]) -> BatchRef:
    ids, groups = tuple(ref.ids[i] for i in rows), tuple(ref.groups[i] for i in rows)
    return BatchRef(ids, groups, tuple(ref.lengths[i] for i in rows), tuple(ref.versions[i] for i in rows), ref.fields)
