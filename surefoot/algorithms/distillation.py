"""On-policy distillation: the student answers prompts, a teacher scores the student's tokens, and the student learns
from the divergence; or from the teacher's log-probs as a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator

from surefoot.algorithms._rollout_distillation import RolloutDistillation, RolloutDistillationConfig
from surefoot.algorithms._teachers import SameTokenizerConfig, Teachers
from surefoot.losses.policy import PolicyLoss
from surefoot.rollout.config import RolloutRunConfig
from surefoot.types import BatchRef, Clock, EngineSpec, Head, Kit, Metric, Metrics, Objective


class DistillationConfig(SameTokenizerConfig, RolloutDistillationConfig):
    """On-policy distillation: what the student learns from, and who answers the prompts.

    Attributes:
        loss: "divergence": of whole next-token distributions, at each of the student's tokens. "reward": policy
            gradient with the advantage teacher's log-prob − student's, at the temperature of sampling: the reverse KL
            from the sampled tokens alone.
        student_fraction: the share of prompts that the student answers; the rest is answered by `others`.
        others: "dataset": by the column `answer`. "teacher": by a teacher, drawn by weight.
    """

    or_else: ClassVar[str] = ", or others: teacher"

    loss: Literal["divergence", "reward"] = "divergence"
    others: Literal["dataset", "teacher"] = "dataset"

    @property
    def dataset_answers(self) -> bool:
        return super().dataset_answers and self.others == "dataset"

    @property
    def other_models(self) -> list[tuple[str, float]]:
        return [(name, teacher.weight) for name, teacher in self.names.items() if self.others == "teacher"]

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
        return self

    def check(self, run: RolloutRunConfig) -> None:
        super().check(run)
        g = run.generation
        if self.loss == "reward" and (g.top_k or g.top_p < 1 or g.min_p):
            raise ValueError(
                "distillation.loss: reward needs the student's own samples: leave out generation.top_k, top_p, min_p"
            )


class Distillation(RolloutDistillation):
    """Teachers with the student's tokenizer."""

    Config = DistillationConfig
    config: DistillationConfig

    def engines(self) -> Mapping[str, EngineSpec]:
        samples = self.config.student_fraction < 1 and self.config.others == "teacher"
        return {"policy": EngineSpec()} | self.config.specs(samples=samples)

    def teachers(self, kit: Kit) -> Teachers:
        self._policy_loss = PolicyLoss(force_on_policy_ratio=self.optimizer_steps_per_step == 1)
        self._sampled = Head(("logprobs",), kit.config.generation.temperature, mask="loss_mask", known_only=True)
        return Teachers(self.config, self._sampled if self.config.loss == "reward" else None)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        ref = super().enrich(ref, kit)
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

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        if self.config.loss == "divergence":
            return super().objectives(clock)
        head = Head(self._policy_loss.outputs, self._sampled.temperature)
        return [Objective("policy", head, self._policy_loss, self.config.num_epochs_per_step, self._minibatch_rows)]

    def _measured(self, ref: BatchRef, kit: Kit) -> Metrics:
        return self.metrics if self.config.loss == "reward" else super()._measured(ref, kit)


def _column(ref: BatchRef, kit: Kit, name: str) -> Any:
    return kit.plane.get(ref, [name])[name]
