"""Group relative policy optimisation: several completions of each prompt, each judged against its siblings; and the
relatives that differ in the ratio, the clip, the baseline or the reduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator
from torch import Tensor

from surefoot.advantages import Counts, gdpo, group_advantages, padded, per_token, raw_advantages, unpadded
from surefoot.advantages import reinforce_plus_plus as reinforce
from surefoot.algorithms._policy_gradient import PolicyGradient, PolicyGradientConfig, token_kl
from surefoot.types import BatchRef, Kit

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dapo": {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "dynamic_sampling": True, "overlong_buffer_ratio": 0.2},
    "dr_grpo": {"reduction": "constant", "advantage_scale": "none"},
    "gspo": {
        "sequence_level_importance_ratios": True,
        "ratio_clip_min": 3e-4,
        "ratio_clip_max": 4e-4,
        "reduction": "sequence",
    },
    "cispo": {"loss_type": "cispo", "ratio_clip_max": 5.0},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "reduction": "sequence"},
    "rloo": {"loss_type": "reinforce", "leave_one_out": True, "advantage_scale": "none", "reduction": "sequence"},
    "reinforce++": {"advantage": "reinforce++"},
}


class GRPOConfig(PolicyGradientConfig):
    """GRPO. Settings that are not given are the preset's, and without one those below.

    Attributes:
        preset: "dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo" or "reinforce++": sets what makes that method;
            `surefoot config show` prints all of it.
        advantage: "group": against the mean of the prompt's other completions. "gdpo": each reward by itself, then
            summed. "reinforce++": from each token to the end, whitened over the batch; the KL penalty is then part of
            the reward. "raw": the reward itself.
        leave_one_out: the mean is that of the siblings alone.
        advantage_scale: divided by the standard deviation of the group, of the batch, or by none.
        minus_baseline: with "reinforce++": the group's mean is taken off first.
    """

    preset: Literal["dapo", "dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce++"] | None = None
    advantage: Literal["group", "gdpo", "reinforce++", "raw"] = "group"
    leave_one_out: bool = False
    advantage_scale: Literal["group", "batch", "none"] = "group"
    minus_baseline: bool = True

    @property
    def kl_in_reward(self) -> bool:
        return self.advantage == "reinforce++" and self.reference_policy_kl_penalty > 0

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, Mapping) else None
        return {**PRESETS.get(preset, {}), **values} if isinstance(preset, str) else values

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> GRPOConfig:
        alone = self.num_generations_per_prompt == 1
        if alone and (self.advantage in ("group", "gdpo") or (self.advantage == "reinforce++" and self.minus_baseline)):
            raise ValueError(
                f"num_generations_per_prompt: 1 leaves advantage {self.advantage} nothing to compare a completion "
                "with; expected 2 or more, or advantage: raw, or reinforce++ with minus_baseline: false"
            )
        if self.advantage == "gdpo" and self.edits_rewards:
            raise ValueError(
                "advantage gdpo takes each reward as it is: remove reward_scaling, overlong_buffer_ratio and "
                "missing_eos_penalty"
            )
        return self


class GRPO(PolicyGradient):
    """The whole method: rollouts come from the source; log-probs and advantages are added to them; one loss."""

    Config = GRPOConfig
    config: GRPOConfig

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        ref = super().enrich(ref, kit)
        advantages, counts = self._advantages(ref, kit)
        self.metrics = {name: counts.metrics[name] for name in ("abstained_rows", "lone_rows")}
        return kit.plane.put(ref, {"advantages": [self.config.bounded(row) for row in advantages]})

    def _advantages(self, ref: BatchRef, kit: Kit) -> tuple[list[Tensor], Counts]:
        config = self.config
        masks: Any = kit.plane.get(ref, ["loss_mask"])["loss_mask"]
        options: dict[str, Any] = {"leave_one_out": config.leave_one_out, "scale": config.advantage_scale}
        rewards = config.edited_rewards(ref, kit)
        if config.advantage == "reinforce++":
            kl = token_kl(ref, kit, config.reference_policy_kl_type) if config.kl_in_reward else None
            penalties = None if kl is None else config.reference_policy_kl_penalty * kl
            found, counts = reinforce(
                rewards, ref.groups, padded(masks), minus_baseline=config.minus_baseline, penalties=penalties
            )
            return unpadded(found, ref.lengths), counts
        if config.advantage == "gdpo":
            weights = kit.rollouts.weights
            named: dict[str, Any] = kit.plane.get(ref, [f"reward/{name}" for name in weights])
            by_row, counts = gdpo({n: named[f"reward/{n}"] for n in weights}, ref.groups, weights, **options)
        else:
            by_row, counts = group_advantages(rewards, ref.groups, **options)
            by_row = raw_advantages(rewards) if config.advantage == "raw" else by_row
        return per_token(by_row, masks), counts
