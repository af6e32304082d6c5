"""What algorithms of policy gradient share: their loss, the edits of rewards and advantages, and all of a step but
where the advantages come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.advantages import clip_advantages, overlong_penalty, padded, scale_rewards, stop_penalty
from surefoot.config import Fraction, NonNegativeReal, PositiveReal, Real, Section
from surefoot.errors import ConfigError
from surefoot.losses.kl import adapted_coefficient, kl_values
from surefoot.losses.policy import PolicyLoss
from surefoot.rollout.config import RolloutAlgorithmConfig, RolloutRunConfig
from surefoot.rollout.evaluation import evaluate
from surefoot.rollout.source import RolloutSource
from surefoot.types import Algorithm, BatchRef, Clock, EngineSpec, Head, Kit, Loss, Metrics, Objective, Poll, Source

_LOSS_OPTIONS = [f.name for f in fields(PolicyLoss) if f.name not in ("force_on_policy_ratio", "max_response_length")]


class RewardScalingConfig(Section):
    """Rewards from `source_min` to `source_max` become those from `target_min` to `target_max`, on a straight line;
    what lies outside is clamped first."""

    source_min: Real
    source_max: Real
    target_min: Real = 0.0
    target_max: Real = 1.0

    @model_validator(mode="after")
    def _ranges(self) -> RewardScalingConfig:
        if not (self.source_min < self.source_max and self.target_min < self.target_max):
            raise ValueError("expected source_min < source_max and target_min < target_max")
        return self


class AdaptiveKLConfig(Section):
    """The coefficient of the KL penalty follows the KL that is measured, a mean over tokens, so that this comes to
    `target`. A step changes the coefficient by 20 % · rows / `horizon` at most, and by 20 % where it has more rows."""

    target: PositiveReal
    horizon: PositiveReal = 10_000

    def next(self, coefficient: float, kl: float, rows: int) -> float:
        return adapted_coefficient(coefficient, kl, target=self.target, step=min(rows / self.horizon, 1.0))


class PolicyGradientConfig(RolloutAlgorithmConfig):
    """
    Attributes:
        loss_type: "clip" (PPO's), "cispo", "sapo" or "reinforce". Options that a loss does not read are errors; what is
            null is the loss's own default.
        ratio_clip_min, ratio_clip_max: the ratio of new to old probability counts from 1 − min to 1 + max; with cispo,
            max is the cap itself.
        ratio_clip_c: dual clip: how much a token of negative advantage counts at most.
        sequence_level_importance_ratios: GSPO's ratio, one for all tokens of a completion.
        reduction: "token": all tokens count alike. "sequence": all completions do. "constant": tokens, divided by
            completions × `generation.max_new_tokens`, so that length does not matter.
        reference_policy_kl_penalty: how strongly the policy is kept near what it was before training; 0: not at all,
            and no reference is kept.
        reference_policy_kl_type: its estimator, k1, k2, k3 or k3_plain; default k3.
        entropy_coef: how strongly entropy is rewarded.
        importance_sampling_correction: weights for a sampler whose log-probs are not the trainer's: by "token" or by
            "sequence"; needed with `generation.top_k`, `top_p` or `min_p`, which change what is sampled.
        truncated_importance_sampling_type: "tis" clamps the weights to `truncated_importance_sampling_ratio_min` and
            `truncated_importance_sampling_ratio`, "icepop" drops tokens and "seq-mask-tis" completions outside.
        overlong_filtering: completions cut off by length are not trained.
        overlong_buffer_ratio: DAPO's soft punishment: in this last part of `generation.max_new_tokens` the reward falls
            by up to `overlong_buffer_penalty`.
        missing_eos_penalty: taken off the reward of completions that were cut off.
        advantage_clip_low, advantage_clip_high: bounds of the advantages.
    """

    loss_type: Literal["clip", "cispo", "sapo", "reinforce"] = "clip"
    ratio_clip_min: PositiveReal | None = None
    ratio_clip_max: PositiveReal | None = None
    ratio_clip_c: PositiveReal | None = None
    sapo_temperature_pos: PositiveReal | None = None
    sapo_temperature_neg: PositiveReal | None = None
    sequence_level_importance_ratios: bool = False
    reduction: Literal["token", "sequence", "constant"] = "token"
    reference_policy_kl_penalty: NonNegativeReal = 0.0
    reference_policy_kl_type: Literal["k1", "k2", "k3", "k3_plain"] | None = None
    entropy_coef: NonNegativeReal = 0.0
    importance_sampling_correction: Literal["token", "sequence"] | None = None
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: PositiveReal | None = None
    truncated_importance_sampling_ratio_min: NonNegativeReal | None = None
    overlong_filtering: bool = False
    overlong_buffer_ratio: Fraction = 0.0
    overlong_buffer_penalty: PositiveReal = 1.0
    missing_eos_penalty: NonNegativeReal = 0.0
    reward_scaling: RewardScalingConfig | None = None
    advantage_clip_low: Annotated[Real, Field(le=0)] | None = None
    advantage_clip_high: Annotated[Real, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _loss_and_its_options_agree(self) -> PolicyGradientConfig:
        try:
            self.loss(max_new_tokens=1, on_policy=True)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is part of the reward, and not of the loss."""
        return False

    def loss(self, *, max_new_tokens: int, on_policy: bool) -> PolicyLoss:
        """`on_policy`: each row is trained on once, by the very weights that sampled it. Raises `ConfigError`."""
        options = {name: getattr(self, name) for name in _LOSS_OPTIONS}
        if self.kl_in_reward:
            options |= {"reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": None}
        longest = max_new_tokens if self.reduction == "constant" else None
        return PolicyLoss(**options, force_on_policy_ratio=on_policy, max_response_length=longest)

    def check(self, run: RolloutRunConfig) -> None:
        super().check(run)
        g = run.generation
        if (g.top_k or g.top_p < 1 or g.min_p) and self.importance_sampling_correction is None:
            raise ValueError(
                f"generation: with top_k {g.top_k}, top_p {g.top_p:g} and min_p {g.min_p:g} completions come from "
                "another distribution than the one that is trained: set importance_sampling_correction: token, or "
                "leave these at 0, 1 and 0"
            )

    @property
    def edits_rewards(self) -> bool:
        return self.reward_scaling is not None or self.overlong_buffer_ratio > 0 or self.missing_eos_penalty > 0

    def edited_rewards(self, ref: BatchRef, kit: Kit) -> Tensor:
        """Rewards [rows] scaled, less what long completions and those that were cut off are punished by."""
        columns: dict[str, Any] = kit.plane.get(ref, ["reward", "loss_mask", "truncated"])
        rewards: Tensor = columns["reward"]
        if self.reward_scaling is not None:
            rewards = scale_rewards(rewards, **self.reward_scaling.model_dump())
        if self.overlong_buffer_ratio:
            longest = kit.config.generation.max_new_tokens
            rewards = rewards + overlong_penalty(
                torch.stack([mask.sum() for mask in columns["loss_mask"]]),
                max_response_length=longest,
                overlong_buffer_length=max(round(self.overlong_buffer_ratio * longest), 1),
                overlong_buffer_penalty=self.overlong_buffer_penalty,
            )
        return rewards + stop_penalty(columns["truncated"], missing_eos_penalty=self.missing_eos_penalty)

    def bounded(self, advantages: Tensor) -> Tensor:
        return clip_advantages(advantages, self.advantage_clip_low, self.advantage_clip_high)


class PolicyGradient(Algorithm):
    """Rollouts come from the source, log-probs are added to them, one loss of the policy is minimised. A subclass adds
    the column `advantages`."""

    config: PolicyGradientConfig
    rows = "prompts"
    run_config: ClassVar[type | None] = RolloutRunConfig

    def engines(self) -> Mapping[str, EngineSpec]:
        needed = self.config.reference_policy_kl_penalty > 0
        return {"policy": EngineSpec()} | ({"reference": EngineSpec(trained=False, base_of="policy")} if needed else {})

    def source(self, kit: Kit) -> Source:
        run: RolloutRunConfig = kit.config
        self._run, self.optimizer_steps_per_step = run, self.config.optimizer_steps(run)
        on_policy = self.optimizer_steps_per_step == 1
        self._loss = self.config.loss(max_new_tokens=run.generation.max_new_tokens, on_policy=on_policy)
        return RolloutSource(kit, self.config)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        """Adds log-probs of the own tokens at the temperature of sampling: those of the policy as it is before the
        step, as `old_logprobs`, where something reads them, and those of the reference, where there is one."""
        head = Head(("logprobs",), self._run.generation.temperature, mask="loss_mask")
        with kit.phase("log-probs"):
            if self.config.kl_in_reward or "old_logprobs" in self._loss.fields:
                ref = kit.engines["policy"].infer(ref, head, {"logprobs": "old_logprobs"})
            if "reference" in kit.engines:
                ref = kit.engines["reference"].infer(ref, head, {"logprobs": "reference_logprobs"})
        return ref

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        return [self.objective("policy", Head(self._loss.outputs, self._run.generation.temperature), self._loss)]

    def objective(self, engine: str, head: Head, loss: Loss) -> Objective:
        """Epochs and minibatches are those of the configuration."""
        return Objective(engine, head, loss, self.config.num_epochs_per_step, self._run.policy.train_global_batch_size)

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """Mean rewards and pass@k on the validation prompts."""
        return evaluate(kit.rollouts, kit.validation_data, self._run.evaluation, poll)


def token_kl(ref: BatchRef, kit: Kit, kind: str | None) -> Tensor:
    """KL of the policy before the step against the reference at each own token, else 0 [rows, tokens]. `kind`: of the
    estimator; default: k1."""
    columns: dict[str, Any] = kit.plane.get(ref, ["old_logprobs", "reference_logprobs"])
    return kl_values(padded(columns["old_logprobs"]), padded(columns["reference_logprobs"]), kind or "k1")
