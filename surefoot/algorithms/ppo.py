"""Proximal policy optimisation (arXiv:1707.06347): a value model learns how much reward is still to come, and a token
is judged by how much better things went than that model had expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from surefoot.advantages import at_last_token, gae, padded, unpadded
from surefoot.algorithms._policy_gradient import AdaptiveKLConfig, PolicyGradient, PolicyGradientConfig, token_kl
from surefoot.config import ModelConfig, NonNegativeInt, NonNegativeReal, PositiveInt, PositiveReal, Share
from surefoot.losses.policy_metrics import mean_of, spread
from surefoot.losses.value import ValueLoss, state_values
from surefoot.rollout.config import RolloutRunConfig
from surefoot.types import BatchRef, Clock, EngineSpec, Head, Kit, Metric, Metrics, Objective, Reader, Writer

_GAE_OPTIONS = {*signature(gae).parameters}


class PPOConfig(PolicyGradientConfig):
    """PPO. The KL penalty against the policy before training is part of each token's reward.

    Attributes:
        gae_gamma: how much a reward counts one token earlier.
        gae_lambda: from 0, where an advantage is a token's own surprise, to 1, where it is all that came, less the
            value. `gae_lambda_value` and `gae_lambda_policy`, where they are set, stand in for it in the value model's
            targets and in the advantages.
        length_adaptive_alpha: α above 0: the advantages' λ is 1 − 1 / (α · tokens), completion by completion.
        bootstrap_truncated: what a completion that was cut off would still have got is what the value model says of its
            end; else nothing.
        normalize_advantages: they are whitened over the step's tokens.
        cliprange_value: how far the value of a token may move away from that before the step and still be pulled on;
            null: as far as it may.
        critic_warmup_steps: in so many first steps the value model alone is trained.
        adaptive_kl: `reference_policy_kl_penalty` is where the coefficient begins; default: it stays there.
        reference_policy_kl_type: its estimator, k1, k2 or k3; default k1.
    """

    compares_siblings: ClassVar[bool] = False

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 1
    reference_policy_kl_type: Literal["k1", "k2", "k3"] | None = None
    gae_gamma: Share = 1.0
    gae_lambda: Share = 0.95
    gae_lambda_value: Share | None = None
    gae_lambda_policy: Share | None = None
    length_adaptive_alpha: NonNegativeReal = 0.0
    bootstrap_truncated: bool = False
    normalize_advantages: bool = True
    cliprange_value: PositiveReal | None = 0.2
    critic_warmup_steps: NonNegativeInt = 0
    adaptive_kl: AdaptiveKLConfig | None = None

    @property
    def kl_in_reward(self) -> bool:
        return self.reference_policy_kl_penalty > 0

    @model_validator(mode="after")
    def _settings_agree(self) -> PPOConfig:
        if self.length_adaptive_alpha and self.gae_lambda_policy is not None:
            raise ValueError("length_adaptive_alpha and gae_lambda_policy both set the advantages' λ: remove one")
        if self.bootstrap_truncated and self.overlong_filtering:
            raise ValueError("bootstrap_truncated: overlong_filtering leaves out what was cut off: remove one")
        if self.adaptive_kl is not None and not self.kl_in_reward:
            raise ValueError(
                "adaptive_kl: reference_policy_kl_penalty is 0, so no reference is kept: set where it begins"
            )
        return self

    def check(self, run: RolloutRunConfig) -> None:
        super().check(run)
        first, last = self.critic_warmup_steps, run.max_num_steps
        if last is not None and first >= last:
            raise ValueError(f"ppo.critic_warmup_steps ({first}) leaves none of max_num_steps ({last}) to the policy")


class PPORunConfig(RolloutRunConfig):
    """`value`: the value model. What is left out in it is the policy's; so is the model, with a new score head."""

    value: ModelConfig


class PPO(PolicyGradient):
    """The whole method: rollouts get log-probs, values, advantages and returns; then two losses, the value model's and
    the policy's. Its state: the KL coefficient."""

    Config = PPOConfig
    config: PPOConfig
    run_config = PPORunConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self._kl_coefficient, self._value_loss = config.reference_policy_kl_penalty, ValueLoss(config.cliprange_value)

    def engines(self) -> Mapping[str, EngineSpec]:
        return {**super().engines(), "value": EngineSpec(kind="scalar", section="value")}

    def optimizer_steps(self, engine: str, steps: int) -> int:
        warm_up = self.config.critic_warmup_steps if engine == "policy" else 0
        return super().optimizer_steps(engine, max(steps - warm_up, 0))

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        ref, config = super().enrich(ref, kit), self.config
        with kit.phase("values"):
            ref = kit.engines["value"].infer(ref, Head(("scalar",)), {"scalar": "scalars"})
        columns: dict[str, Any] = kit.plane.get(ref, ["loss_mask", "scalars", "truncated"])
        mask, scalars, truncated = padded(columns["loss_mask"]), padded(columns["scalars"]), columns["truncated"] != 0
        kl = token_kl(ref, kit, config.reference_policy_kl_type) if config.kl_in_reward else None
        rewards, old_values = config.edited_rewards(ref, kit), state_values(scalars)
        advantages, returns = gae(
            rewards.masked_fill(truncated & config.overlong_filtering, math.nan),
            old_values,
            mask,
            penalties=None if kl is None else self._kl_coefficient * kl,
            final_values=at_last_token(scalars, mask) * (truncated & config.bootstrap_truncated),
            **config.model_dump(include=_GAE_OPTIONS),
        )
        advantages = config.bounded(advantages)
        self.metrics = {
            "abstained_rows": Metric(float(rewards.isnan().sum()), reduce="sum"),
            **spread("advantages", advantages[mask != 0]),
        }
        if kl is not None:
            measured = mean_of(kl[mask != 0])
            self.metrics |= {"kl": measured, "kl_coefficient": Metric(self._kl_coefficient, reduce="last")}
        made = {"old_values": old_values, "advantages": advantages, "returns": returns}
        return kit.plane.put(ref, {name: unpadded(values, ref.lengths) for name, values in made.items()})

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        value = self.objective("value", Head(("scalar",)), self._value_loss)
        return [value] if clock.step < self.config.critic_warmup_steps else [value, *super().objectives(clock)]

    def observe(self, metrics: Metrics, kit: Kit) -> None:
        """The coefficient waits for the policy's first step: before it there is no KL."""
        adaptive = self.config.adaptive_kl
        if adaptive is not None and "loss" in metrics:
            self._kl_coefficient = adaptive.next(self._kl_coefficient, metrics["kl"].value, self.config.rows_per_step)

    def snapshot(self) -> Writer:
        state = {"kl_coefficient": self._kl_coefficient}
        return lambda sink: sink.json("ppo.json", state)

    def restore(self, reader: Reader) -> None:
        if self.config.adaptive_kl is not None:  # else it is what the configuration says, which may have been changed
            self._kl_coefficient = float(reader.json("ppo.json")["kl_coefficient"])
