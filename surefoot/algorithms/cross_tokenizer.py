"""Distillation from teachers with other tokenizers: the student's text, or the data set's, is tokenized anew for each
teacher, the two tokenizations are aligned by bytes, and the student learns chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.algorithms._cross_teacher import (
    CrossTeacher,
    Summary,
    by_row_index,
    known_map,
    report,
    texts_of,
    warn_of_nonsense,
)
from surefoot.config import NonNegativeReal, Place, PositiveInt, PositiveReal, Real, Section
from surefoot.data.encode import Encoder, num_ids
from surefoot.data.retokenize import Retokenizer
from surefoot.data.token_bytes import TokenBytes
from surefoot.engine.models import has_same_tokenizer
from surefoot.errors import ConfigError, ResumeRefused
from surefoot.losses.cross_tokenizer import (
    ChunkLoss,
    CrossTokenizerLoss,
    Gold,
    Projection,
    SameVocabulary,
    Spans,
    Target,
    mean_target,
    merged,
)
from surefoot.losses.distill import Divergence
from surefoot.losses.supervised import NLL
from surefoot.rollout.config import RolloutAlgorithmConfig, RolloutRunConfig
from surefoot.rollout.evaluation import evaluate
from surefoot.rollout.mixture import Answers, MixedSource, has_answer
from surefoot.rollout.rollouts import Request
from surefoot.rollout.source import rows_of
from surefoot.types import (
    Algorithm,
    BatchRef,
    Clock,
    EngineSpec,
    Head,
    Kit,
    Metric,
    Metrics,
    Objective,
    Poll,
    Reader,
    Source,
    Writer,
    merge_metrics,
)

_SENSE_ROWS = 8


class CrossTeacherConfig(Section):
    """One teacher: a folder or hub name of a model, with whatever tokenizer. One that has the student's own tokenizer
    teaches token by token.

    Attributes:
        weight: how much it counts beside the others.
        max_total_sequence_length: tokens that it reads of a row, in its own tokens; default: the policy's. Completions
            are cut there.
    """

    model: Place
    weight: PositiveReal = 1.0
    max_total_sequence_length: PositiveInt | None = None


class CrossTokenizerConfig(RolloutAlgorithmConfig):
    """What the student learns from, and by which loss.

    Attributes:
        teachers: frozen models to learn from.
        teacher_choice: "weighted": from all, by their weights. "best": of each row from the one that finds its text
            likeliest, byte for byte.
        student_fraction: the share of prompts that the student answers; the others are answered by the data set's
            column `answer`. 1 is on-policy, 0 off-policy.
        loss: "gold": a divergence over byte-identical tokens, and the distance of the sorted probabilities of the rest.
            "projection": a divergence over the teacher's vocabulary, into which the student's is carried over.
        divergence, beta: as in distillation: "forward_kl" is KL(teacher‖student).
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
        val_batch_size: rows of one validation batch; it changes speed and memory, never the result.
    """

    needs_rewards: ClassVar[bool] = False
    compares_siblings: ClassVar[bool] = False
    places: ClassVar[tuple[str, ...]] = ("cache",)

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 1
    teachers: Annotated[list[CrossTeacherConfig], Field(min_length=1)]
    teacher_choice: Literal["weighted", "best"] = "weighted"
    student_fraction: Annotated[Real, Field(ge=0, le=1)] = 1.0
    loss: Literal["gold", "projection"] = "gold"
    divergence: Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"] = "forward_kl"
    beta: Annotated[Real, Field(ge=0, le=1)] | None = None
    token_merge: Literal["observed", "bayesian"] | None = None
    matched_weight: NonNegativeReal | None = None
    unmatched_weight: NonNegativeReal | None = None
    top_k: PositiveInt | None = 64
    temperature: PositiveReal = 1.0
    reduction: Literal["chunk", "sequence"] = "chunk"
    ce_weight: NonNegativeReal = 0.0
    ce_dynamic: bool = False
    cache: Place | None = None
    val_batch_size: PositiveInt = 32

    @model_validator(mode="after")
    def _options_fit(self) -> CrossTokenizerConfig:
        if self.beta is not None and self.divergence in ("forward_kl", "reverse_kl"):
            raise ValueError(f"beta: {self.divergence} ignores it; expected divergence: mixed_kl or jsd, or no beta")
        of_gold = [n for n in ("token_merge", "matched_weight", "unmatched_weight") if getattr(self, n) is not None]
        if of_gold and self.loss != "gold":
            raise ValueError(f"{', '.join(of_gold)}: read by loss: gold alone, found {self.loss}")
        if (self.matched_weight is None) != (self.unmatched_weight is None):
            raise ValueError("expected both matched_weight and unmatched_weight, or neither")
        if self.ce_dynamic and not self.ce_weight:
            raise ValueError("ce_dynamic needs a ce_weight above 0")
        if self.student_fraction < 1 and self.num_generations_per_prompt > 1:
            raise ValueError("the data set has one answer to a prompt: expected num_generations_per_prompt: 1")
        return self

    def check(self, run: RolloutRunConfig) -> None:
        super().check(run)
        if run.environment is not None and run.environment.max_turns > 1:
            raise ValueError(
                f"environment.max_turns is {run.environment.max_turns}: a teacher with another tokenizer reads one "
                "completion behind its prompt; expected 1"
            )

    @property
    def names(self) -> dict[str, CrossTeacherConfig]:
        """Of the teachers' engines and columns."""
        if len(self.teachers) == 1:
            return {"teacher": self.teachers[0]}
        return {f"teacher_{i}": teacher for i, teacher in enumerate(self.teachers, start=1)}


class CrossTokenizer(Algorithm):
    """Rows come from the source, what the teachers say of their chunks is added, one loss is minimised. Its state: the
    scale of the cross-entropy, and which tokenizers the teachers have."""

    Config = CrossTokenizerConfig
    config: CrossTokenizerConfig
    rows = "prompts"
    run_config = RolloutRunConfig

    def engines(self) -> Mapping[str, EngineSpec]:
        return {"policy": EngineSpec()} | {
            name: EngineSpec(
                trained=False, model=teacher.model, own_tokenizer=True, max_length=teacher.max_total_sequence_length
            )
            for name, teacher in self.config.names.items()
        }

    def source(self, kit: Kit) -> Source:
        """Raises `ModelError` when a teacher's tokenizer cannot be aligned with the student's."""
        run, config = kit.config, self.config
        self.optimizer_steps_per_step = config.optimizer_steps(run)
        self._minibatch_rows, self._num_ids = run.policy.train_global_batch_size, num_ids(kit.tokenizer)
        self._prompts, self._sense_is_checked = by_row_index(kit.train_data), False
        student = TokenBytes(kit.tokenizer, Encoder(kit.tokenizer, run.data, 1).stop_ids())
        made = {name: self._teacher(name, student, kit) for name in config.names}
        self._teachers = [teacher for teacher, _ in made.values()]
        best = config.teacher_choice == "best"
        weights = {name: 1.0 if best else teacher.weight for name, teacher in config.names.items()}
        self._loss = CrossTokenizerLoss(
            {name: (weights[name], loss) for name, (_, loss) in made.items()},
            config.temperature,
            config.reduction,
            pooled=best,
            ce_weight=config.ce_weight,
        )
        return MixedSource(kit, config, policy_fraction=config.student_fraction, others=())

    def _teacher(self, name: str, student: TokenBytes, kit: Kit) -> tuple[CrossTeacher, ChunkLoss]:
        config, run, tokenizer = self.config, kit.config, kit.tokenizers[name]
        settings, size = config.names[name], num_ids(tokenizer)
        k = size if config.top_k is None else config.top_k
        if k > size:
            raise ConfigError(
                f"top_k: the tokenizer of {settings.model} has {size} tokens, found {k}: take at most these"
            )
        divergence = Divergence(config.divergence, 0.5 if config.beta is None else config.beta)
        head = Head(("logprobs", "topk"), config.temperature, k, mask="loss_mask", known_only=True)
        if has_same_tokenizer(kit.tokenizer, tokenizer):
            same = SameVocabulary(divergence, whole=k == size)
            return CrossTeacher(name, settings.model, student, None, head, lambda target, own, spans: target), same
        longest = settings.max_total_sequence_length or run.policy.max_total_sequence_length
        retokenize = Retokenizer(student, tokenizer, run.data, longest)
        vocabulary = known_map(student, retokenize.teacher, Path(config.cache) if config.cache else None)
        report(settings.model, vocabulary, retokenize, texts_of(kit.train_data.prompts))
        retokenize(kit.train_data.prompts[0], [])  # raises when there is no chat template for chats
        loss: ChunkLoss
        if config.loss == "gold":
            weights = None
            if config.matched_weight is not None and config.unmatched_weight is not None:
                weights = (config.matched_weight, config.unmatched_weight)
            merge = config.token_merge or "observed"
            loss = Gold.of(
                vocabulary.same, vocabulary.sizes, weights, divergence=divergence, merge=merge, whole=k == size
            )
            return CrossTeacher(name, settings.model, student, retokenize, head, _merging(merge)), loss
        loss = Projection.of(divergence, vocabulary.rows, vocabulary.columns, vocabulary.weights, size)
        return CrossTeacher(name, settings.model, student, retokenize, head, _averaging(size)), loss

    def _check_sense(self, kit: Kit) -> None:
        """On the data set's own answers, where it has some."""
        data = kit.train_data
        some = [i for i, prompt in enumerate(data.prompts) if has_answer(prompt)][:_SENSE_ROWS]
        if not some:
            return
        ref, columns = rows_of([Answers(kit)(Request(f"sense_d{i}", 0, data.prompts[i], ())) for i in some])
        ref = kit.plane.put(ref, columns)
        try:
            head = Head(mask="loss_mask", known_only=True)
            ref = kit.engines["policy"].infer(ref, head, {"logprobs": "student/logprobs"})
            for teacher in self._teachers:
                warn_of_nonsense(teacher, ref, [data.prompts[i] for i in some], kit)
        finally:
            kit.plane.drop(ref)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        if not self._sense_is_checked:
            self._sense_is_checked = True
            self._check_sense(kit)
        columns: dict[str, Any] = kit.plane.get(ref, ["row_index", "input_ids", "loss_mask"])
        if any(int(ids.max()) >= self._num_ids for ids in columns["input_ids"]):
            ref = self._without_unknown_ids(ref, kit, columns)
        prompts = [self._prompts[int(row)] for row in columns["row_index"]]
        made = [(teacher, *teacher.columns(ref, prompts, kit)) for teacher in self._teachers]
        likelihoods = torch.tensor([found for _, _, found in made])
        for number, (teacher, parts, _) in enumerate(made):
            if self.config.teacher_choice == "best":
                mine = (likelihoods.argmax(0) == number).tolist()
                parts["chunk"] = [chunk * own for chunk, own in zip(parts["chunk"], mine, strict=True)]
            ref = kit.plane.put(ref, {f"{teacher.name}/{part}": values for part, values in parts.items()})
        self.metrics = merge_metrics(teacher.metrics for teacher in self._teachers)
        return ref

    def _without_unknown_ids(self, ref: BatchRef, kit: Kit, columns: Mapping[str, Any]) -> BatchRef:
        """A student may draw an id that pads its vocabulary: nothing is trained of that row."""
        known = [int(int(ids.max()) < self._num_ids) for ids in columns["input_ids"]]
        cut = {
            name: [values * own for values, own in zip(columns[name], known, strict=True)]
            for name in ("input_ids", "loss_mask")
        }
        return kit.plane.put(ref, cut)

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        head = Head(self._loss.outputs, self.config.temperature, known_only=True)
        return [Objective("policy", head, self._loss, self.config.num_epochs_per_step, self._minibatch_rows)]

    def observe(self, metrics: Metrics, kit: Kit) -> None:
        if self.config.ce_dynamic and metrics["nll"].value > 0:
            scale = max(metrics["distillation"].value, 0.0) / metrics["nll"].value  # gold's may be negative
            self._loss = replace(self._loss, ce_scale=scale)

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """The student's loss on the answers of the data, per token, where it has some; and rewards, where there are
        some."""
        found = (
            dict(evaluate(kit.rollouts, kit.validation_data, kit.config.evaluation, poll))
            if kit.rollouts.weights
            else {}
        )
        by_set = {name: self._answers_nll(data, kit, poll) for name, data in kit.validation_data.items()}
        found |= {f"{name}/{key}": metric for name, own in by_set.items() for key, metric in own.items()}
        return found | merge_metrics(by_set.values())

    def _answers_nll(self, data: Any, kit: Kit, poll: Poll) -> dict[str, Metric]:
        answers, rows, found = Answers(kit), self.config.val_batch_size, []
        known = [i for i, prompt in enumerate(data.prompts) if has_answer(prompt)]
        for start in range(0, len(known), rows):
            poll()
            some = [Request(f"v{data.fingerprint}_d{i}", 0, data.prompts[i], ()) for i in known[start : start + rows]]
            ref, columns = rows_of([answers(request) for request in some])
            ref = kit.plane.put(ref, columns)
            try:
                measured = kit.engines["policy"].evaluate(ref, Objective("policy", Head(), NLL()))
            finally:
                kit.plane.drop(ref)
            found.append({"nll": measured["loss"]})
        return merge_metrics(found)

    def snapshot(self) -> Writer:
        state = {"ce_scale": self._loss.ce_scale, "tokenizers": self._tokenizers()}
        return lambda sink: sink.json("cross_tokenizer.json", state)

    def restore(self, reader: Reader) -> None:
        """Raises `ResumeRefused` when a teacher has another tokenizer than it had."""
        state = reader.json("cross_tokenizer.json")
        for name, now in self._tokenizers().items():
            if state["tokenizers"].get(name) != now:
                model = self.config.names[name].model
                raise ResumeRefused(f"the tokenizer of the teacher {model} is not the one that this run began with")
        self._loss = replace(self._loss, ce_scale=float(state["ce_scale"]))

    def _tokenizers(self) -> dict[str, str]:
        known = {teacher.name: teacher.retokenize for teacher in self._teachers}
        return {name: "" if made is None else made.teacher.fingerprint for name, made in known.items()}


def _merging(how: Literal["observed", "bayesian"]) -> Summary:
    def summary(target: Target, own: Tensor, spans: Spans) -> Target:
        both = merged(torch.cat([target.logprobs, target.rest[:, None]], 1), own, spans, how)
        at = spans.first if how == "observed" else spans.last
        return Target(target.ids[at], both[:, :-1], both[:, -1])

    return summary


def _averaging(vocabulary: int) -> Summary:
    return lambda target, own, spans: mean_target(target.ids, target.logprobs, target.rest, spans, vocabulary)
