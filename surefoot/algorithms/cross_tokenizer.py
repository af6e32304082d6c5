"""Distillation from teachers with other tokenizers: the student's text, or the data set's, is tokenized anew for each
teacher, the two tokenizations are aligned by bytes, and the student learns chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from surefoot.algorithms._cross_teachers import CrossTeachers
from surefoot.algorithms._rollout_distillation import RolloutDistillation, RolloutDistillationConfig
from surefoot.algorithms._teachers import TeacherConfig
from surefoot.config import NonNegativeReal, Place, PositiveInt
from surefoot.errors import ResumeRefused
from surefoot.types import EngineSpec, Kit, Metrics, Reader, Writer


class CrossTeacherConfig(TeacherConfig):
    """One teacher: a folder or hub name of a model, with whatever tokenizer. One that has the student's own tokenizer
    teaches token by token.

    Attributes:
        max_total_sequence_length: tokens that it reads of a row, in its own tokens; default: the policy's. Completions
            are cut there.
    """

    max_total_sequence_length: PositiveInt | None = None


class CrossTokenizerConfig(RolloutDistillationConfig):
    """What the student learns from, and by which loss.

    Attributes:
        teacher_choice: "weighted": from all, by their weights. "best": of each row from the one that finds its text
            likeliest.
        loss: "gold": a divergence over byte-identical tokens, and the distance of the sorted probabilities of the rest.
            "projection": a divergence over the teacher's vocabulary, into which the student's is carried over.
        token_merge: with gold: of a chunk of several tokens, the distribution of the first ("observed") or of the last
            ("bayesian"), times the probabilities of the others.
        matched_weight, unmatched_weight: of gold's two parts; default: the share of the teacher's tokens that the
            student has too, and the rest.
        top_k: of the teacher's distribution; null: all of it, which takes rows × tokens × vocabulary numbers.
        temperature: logits of both sides are divided by it; the loss is multiplied by its square.
        reduction: "chunk": all chunks count alike. "sequence": all rows do.
        ce_weight: adds so much cross-entropy of the trained tokens.
        ce_dynamic: times the last step's distillation loss / cross-entropy, so that neither outweighs the other as they
            fall.
        cache: where the map between two vocabularies is kept; default: surefoot/vocabularies in ~/.cache.
    """

    places: ClassVar[tuple[str, ...]] = ("cache",)

    teachers: Annotated[list[CrossTeacherConfig], Field(min_length=1)]
    teacher_choice: Literal["weighted", "best"] = "weighted"
    loss: Literal["gold", "projection"] = "gold"
    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "forward_kl"
    token_merge: Literal["observed", "bayesian"] | None = None
    matched_weight: NonNegativeReal | None = None
    unmatched_weight: NonNegativeReal | None = None
    top_k: PositiveInt | None = 64
    reduction: Literal["chunk", "sequence"] = "chunk"
    ce_weight: NonNegativeReal = 0.0
    ce_dynamic: bool = False
    cache: Place | None = None

    @model_validator(mode="after")
    def _options_fit(self) -> CrossTokenizerConfig:
        of_gold = [n for n in ("token_merge", "matched_weight", "unmatched_weight") if getattr(self, n) is not None]
        if of_gold and self.loss != "gold":
            raise ValueError(f"{', '.join(of_gold)}: read by loss: gold alone, found {self.loss}")
        if (self.matched_weight is None) != (self.unmatched_weight is None):
            raise ValueError("expected both matched_weight and unmatched_weight, or neither")
        if self.ce_dynamic and not self.ce_weight:
            raise ValueError("ce_dynamic needs a ce_weight above 0")
        return self

    @property
    def gold_weights(self) -> tuple[float, float] | None:
        matched, unmatched = self.matched_weight, self.unmatched_weight
        return None if matched is None or unmatched is None else (matched, unmatched)

    def specs(self) -> dict[str, EngineSpec]:
        made = (
            EngineSpec(trained=False, model=t.model, own_tokenizer=True, max_length=t.max_total_sequence_length)
            for t in self.teachers
        )
        return dict(zip(self.names, made, strict=True))


class CrossTokenizer(RolloutDistillation):
    """Teachers with tokenizers of their own. Its state: the scale of the cross-entropy, and which tokenizers and
    chat templates the teachers have."""

    Config = CrossTokenizerConfig
    config: CrossTokenizerConfig
    _teachers: CrossTeachers

    def engines(self) -> Mapping[str, EngineSpec]:
        return {"policy": EngineSpec()} | self.config.specs()

    def teachers(self, kit: Kit) -> CrossTeachers:
        return CrossTeachers(self.config)

    def observe(self, metrics: Metrics, kit: Kit) -> None:
        if self.config.ce_dynamic and metrics["nll"].value > 0:  # gold's distillation loss may be negative
            self._teachers.ce_scale = max(metrics["distillation"].value, 0.0) / metrics["nll"].value

    def snapshot(self) -> Writer:
        read_by = {"tokenizers": self._teachers.tokenizers, "templates": self._teachers.templates}
        state = {"ce_scale": self._teachers.ce_scale, **read_by}
        return lambda sink: sink.json("cross_tokenizer.json", state)

    def restore(self, reader: Reader) -> None:
        """Raises `ResumeRefused` when a teacher has another tokenizer or chat template than it had."""
        state = reader.json("cross_tokenizer.json")
        live = {"tokenizer": self._teachers.tokenizers, "chat template": self._teachers.templates}
        saved = {"tokenizer": state["tokenizers"], "chat template": state.get("templates", self._teachers.templates)}
        for what, name in ((what, name) for what, names in live.items() for name in names):
            if saved[what].get(name) != live[what][name]:
                model = self.config.names[name].model
                raise ResumeRefused(
                    f"the {what} of the teacher {model} is not the one that this run began with. Put the old one back, "
                    "or start a new run"
                )
        self._teachers.ce_scale = float(state["ce_scale"])
