"""What both distillations share: their teachers, what these say of the rows, and the loss against it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from surefoot.config import AlgorithmConfig, Place, PositiveInt, PositiveReal, Real, Section
from surefoot.data.encode import num_ids
from surefoot.errors import ConfigError, NonFiniteError
from surefoot.losses.distill import DistillationLoss, Divergence, TeacherDivergences, row_weights
from surefoot.types import BatchRef, EngineSpec, Head, Kit, Objective

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
        tail: with `top_k`: "cell" keeps all other tokens as one more; "renormalise" leaves them out on both sides.
        temperature: logits of both sides are divided by it.
    """

    teachers: Annotated[list[TeacherConfig], Field(min_length=1)]
    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "reverse_kl"
    beta: Annotated[Real, Field(ge=0, le=1)] | None = None
    top_k: PositiveInt | None = None
    tail: Literal["cell", "renormalise"] | None = None
    temperature: PositiveReal = 1.0

    @model_validator(mode="after")
    def _options_fit(self) -> TeachersConfig:
        if self.beta is not None and self.divergence in ("forward_kl", "reverse_kl"):
            raise ValueError(f"beta: {self.divergence} ignores it; expected divergence: mixed_kl or jsd, or no beta")
        if self.tail is not None and self.top_k is None:
            raise ValueError("tail: the whole vocabulary has none; set top_k too, or leave it out")
        return self

    @property
    def names(self) -> dict[str, TeacherConfig]:
        """Of the teachers' engines and columns."""
        if len(self.teachers) == 1:
            return {"teacher": self.teachers[0]}
        return {f"teacher_{i}": teacher for i, teacher in enumerate(self.teachers, start=1)}

    def of_form(self) -> Divergence:
        beta = 0.5 if self.beta is None else self.beta
        return Divergence(self.divergence, beta, self.top_k, tail=self.tail != "renormalise")


class Teachers:
    """The teachers of a run. Of each, rows get the columns "<name>/weight" [rows] and what its head puts out on the
    trained tokens: "<name>/logprobs", and "<name>/topk_ids", "/topk_logprobs" and "/topk_rest", or "<name>/hidden".

    Args:
        head: by default what the divergence needs.

    Attributes:
        used: names of those that teach a row that columns were last added to.
    """

    def __init__(self, config: TeachersConfig, head: Head | None = None) -> None:
        self._config, self._form = config, config.of_form()
        outputs = ("logprobs", "hidden" if config.top_k is None else "topk")
        self.head = head or Head(outputs, config.temperature, config.top_k or 0, mask="loss_mask", known_only=True)
        self.used: tuple[str, ...] = tuple(config.names)

    def specs(self, **options: Any) -> dict[str, EngineSpec]:
        return {n: EngineSpec(trained=False, model=t.model, **options) for n, t in self._config.names.items()}

    def check(self, tokenizer: Any) -> None:
        """Raises `ConfigError` when the vocabulary has no k tokens."""
        k, self._num_ids = self._config.top_k or 0, num_ids(tokenizer)
        size = self._num_ids
        if k > size:
            raise ConfigError(f"top_k: the tokenizer has {size} tokens, found {k}; expected at most {size}")

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
            self._infer(name, ref, rows, kit)
            ref = kit.plane.put(ref, {f"{name}/weight": torch.tensor(weights[name])})
        return ref.with_fields(f"{name}/{part}" for name in self.used for part in self.head.names)

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

    def _infer(self, name: str, ref: BatchRef, rows: Sequence[int], kit: Kit) -> None:
        """Of rows that it does not teach, zeros: what is computed of them counts for nothing."""
        into = {part: f"{name}/{part}" for part in self.head.names}
        taught, others = _chosen(ref, rows), _chosen(ref, sorted(set(range(len(ref))) - set(rows)))
        with kit.phase("teacher"):
            kit.engines[name].infer(taught, self.head, into)
        columns: dict[str, Any] = kit.plane.get(taught, list(into.values()))
        for column, values in columns.items():
            for row, value in zip(taught.ids, values, strict=True):
                if not value.isfinite().all():
                    raise NonFiniteError(
                        f"the teacher {self._config.names[name].model} puts out {column.partition('/')[2]} that are "
                        f"not all finite for row {row} ({len(value)} tokens): its weights, or policy.precision, do not "
                        "suit these tokens"
                    )
        if len(others):
            blank = {
                column: [values[0].new_zeros(length, *values[0].shape[1:]) for length in others.lengths]
                for column, values in columns.items()
            }
            kit.plane.put(others, blank)

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
        for name in self.used:
            fields = [f"{name}/logprobs", "student/logprobs", "loss_mask", "input_ids", f"{name}/weight"]
            columns: dict[str, Any] = kit.plane.get(ref, fields)
            theirs, ours, masks, ids, weights = (columns[field] for field in fields)
            rows = [i for i in range(len(ref)) if weights[i] and masks[i].any()]
            tokens = sum(float(masks[i].sum()) for i in rows) or 1.0
            losses = [-sum(float((side[i] * masks[i]).sum()) for i in rows) / tokens for side in (theirs, ours)]
            if losses[0] - losses[1] > math.log(_FAR_ABOVE):
                worst = max(rows, key=lambda i: float(-(theirs[i] * masks[i]).sum() / masks[i].sum()))
                text = kit.tokenizer.decode(ids[worst].tolist(), skip_special_tokens=False)
                _log.warning(
                    "the teacher %s finds completions of the data far less likely than the student does (perplexity "
                    "%.3g, the student's %.3g): its chat template may be another, or it was trained for something "
                    "else. It saw %r",
                    *(self._config.names[name].model, math.exp(min(losses[0], 700)), math.exp(losses[1]), text[:500]),
                )


def _chosen(ref: BatchRef, rows: Sequence[int]) -> BatchRef:
    ids, groups = tuple(ref.ids[i] for i in rows), tuple(ref.groups[i] for i in rows)
    return BatchRef(ids, groups, tuple(ref.lengths[i] for i in rows), tuple(ref.versions[i] for i in rows), ref.fields)
