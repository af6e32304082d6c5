"""On-policy distillation: the student answers prompts, a teacher scores the student's tokens, and the student learns
from the divergence; or from the teacher's log-probs as a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field, model_validator

from surefoot.algorithms._teachers import Teachers, TeachersConfig
from surefoot.config import PositiveInt, Real
from surefoot.losses.policy import PolicyLoss
from surefoot.rollout.config import RolloutAlgorithmConfig, RolloutRunConfig
from surefoot.rollout.evaluation import evaluate
from surefoot.rollout.mixture import Answers, MixedSource, has_answer
from surefoot.rollout.rollouts import Request, Rollout
from surefoot.rollout.source import rows_of
from surefoot.types import Algorithm, BatchRef, Clock, EngineSpec, Head, Kit, Metric, Metrics, Objective, Poll, Source

_SENSE_ROWS = 8
T = TypeVar("T")


class DistillationConfig(TeachersConfig, RolloutAlgorithmConfig):
    """On-policy distillation: what the student learns from, and who answers the prompts.

    Attributes:
        loss: "divergence": of whole next-token distributions, at each of the student's tokens. "reward": policy
            gradient with the advantage teacher's log-prob − student's, at the temperature of sampling: the reverse KL
            from the sampled tokens alone.
        student_fraction: the share of prompts that the student answers; the rest is answered by `others`.
        others: "dataset": by the column `answer`. "teacher": by a teacher, drawn by weight.
    """

    needs_rewards: ClassVar[bool] = False
    compares_siblings: ClassVar[bool] = False

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 1
    loss: Literal["divergence", "reward"] = "divergence"
    student_fraction: Annotated[Real, Field(ge=0, le=1)] = 1.0
    others: Literal["dataset", "teacher"] = "dataset"

    @model_validator(mode="after")
    def _form_fits(self) -> DistillationConfig:
        unread = {"beta": self.beta, "top_k": self.top_k, "tail": self.tail}
        given = [name for name, value in unread.items() if value is not None]
        if self.loss == "reward" and (given or self.divergence != "reverse_kl" or self.temperature != 1.0):
            raise ValueError(
                "loss: reward is the reverse KL of sampled tokens at generation.temperature; leave divergence, beta, "
                "top_k, tail and temperature out, or set loss: divergence"
            )
        if self.loss == "reward" and self.student_fraction < 1:
            raise ValueError("loss: reward learns from what the student sampled alone; expected student_fraction: 1")
        if self.student_fraction < 1 and self.others == "dataset" and self.num_generations_per_prompt > 1:
            raise ValueError(
                f"others: dataset has one answer to a prompt, and num_generations_per_prompt is "
                f"{self.num_generations_per_prompt}; expected 1, or others: teacher"
            )
        return self

    def check(self, run: RolloutRunConfig) -> None:
        super().check(run)
        g = run.generation
        if self.loss == "reward" and (g.top_k or g.top_p < 1 or g.min_p):
            raise ValueError(
                "generation: loss: reward needs samples of the student itself: leave out top_k, top_p, min_p"
            )
        if self.student_fraction < 1 and self.others == "dataset" and run.environment is not None:
            raise ValueError("others: dataset: an environment replies to what is said; expected others: teacher")


class Distillation(Algorithm):
    """Rollouts come from the source, what the teachers say of them is added, one loss is minimised."""

    Config = DistillationConfig
    config: DistillationConfig
    rows = "prompts"
    run_config = RolloutRunConfig

    def engines(self) -> Mapping[str, EngineSpec]:
        samples = self.config.student_fraction < 1 and self.config.others == "teacher"
        return {"policy": EngineSpec()} | Teachers(self.config).specs(samples=samples)

    def source(self, kit: Kit) -> Source:
        run: RolloutRunConfig = kit.config
        config, self.optimizer_steps_per_step = self.config, self.config.optimizer_steps(run)
        self._kit, self._minibatch_rows, self._sense_is_checked = kit, run.policy.train_global_batch_size, False
        self._sampled = Head(("logprobs",), run.generation.temperature, mask="loss_mask", known_only=True)
        self._teachers = Teachers(config, self._sampled if config.loss == "reward" else None)
        self._teachers.check(kit.tokenizer)
        self._policy_loss = PolicyLoss(force_on_policy_ratio=self.optimizer_steps_per_step == 1)
        others = [(name, teacher.weight) for name, teacher in config.names.items() if config.others == "teacher"]
        return MixedSource(kit, config, policy_fraction=config.student_fraction, others=others)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        if not self._sense_is_checked:
            self._sense_is_checked = True
            self._check_sense(kit)
        ref = self._teachers.add(ref, kit)
        return self._with_advantages(ref, kit) if self.config.loss == "reward" else ref

    def _with_advantages(self, ref: BatchRef, kit: Kit) -> BatchRef:
        head = Head(("logprobs",), self._sampled.temperature, mask="loss_mask")
        with kit.phase("log-probs"):
            ref = kit.engines["policy"].infer(ref, head, {"logprobs": "old_logprobs"})
        advantages = [-row for row in _column(ref, kit, "old_logprobs")]
        masks = _column(ref, kit, "loss_mask")
        for name in self._teachers.used:
            parts = zip(_column(ref, kit, f"{name}/weight"), _column(ref, kit, f"{name}/logprobs"), strict=True)
            advantages = [row + weight * theirs for row, (weight, theirs) in zip(advantages, parts, strict=True)]
        advantages = [row * mask for row, mask in zip(advantages, masks, strict=True)]
        tokens = float(sum(mask.sum() for mask in masks))
        total = -float(torch.cat(advantages).double().sum())
        self.metrics = {"reverse_kl": Metric(total / tokens if tokens else 0.0, tokens)}
        return kit.plane.put(ref, {"advantages": advantages})

    def _check_sense(self, kit: Kit) -> None:
        """On the data set's own answers, where it has some."""
        data, answers = kit.train_data, Answers(kit)
        some = [i for i, prompt in enumerate(data.prompts) if has_answer(prompt)][:_SENSE_ROWS]
        found = [answers(Request(f"answer_d{i}", 0, data.prompts[i], tuple(data.ids(i).tolist()))) for i in some]
        if found:
            self._on(found, kit, lambda ref: self._teachers.warn_of_nonsense(ref, kit))

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        epochs, rows = self.config.num_epochs_per_step, self._minibatch_rows
        if self.config.loss == "divergence":
            return [replace(self._teachers.objective(self._kit), epochs=epochs, minibatch_rows=rows)]
        head = Head(self._policy_loss.outputs, self._sampled.temperature)
        return [Objective("policy", head, self._policy_loss, epochs, rows)]

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """Rewards, where there are some, and how far the student is from its teachers on its own answers."""
        before = self.metrics

        def measure(found: Sequence[Rollout]) -> Metrics:
            def measured(ref: BatchRef) -> Metrics:
                ref = self.enrich(ref, kit)
                if self.config.loss == "reward":
                    return self.metrics
                return kit.engines["policy"].evaluate(ref, self._teachers.objective(kit))

            poll()
            return self._on(found, kit, measured)

        measured_all = evaluate(kit.rollouts, kit.validation_data, kit.config.evaluation, poll, measure)
        self.metrics = before
        return measured_all

    def _on(self, rollouts: Sequence[Rollout], kit: Kit, do: Callable[[BatchRef], T]) -> T:
        """Do it with rows that are not the step's, and drop them."""
        ref, columns = rows_of(rollouts)
        ref = kit.plane.put(ref, columns)
        try:
            return do(ref)
        finally:
            kit.plane.drop(ref)


def _column(ref: BatchRef, kit: Kit, name: str) -> Any:
    return kit.plane.get(ref, [name])[name]
