"""Every form of the policy loss, and one with all that goes together, for tests that hold for each."""

from __future__ import annotations

from typing import Any

from surefoot.losses.policy import PolicyLoss

WEIGHTS: dict[str, Any] = {"importance_sampling_correction": "token"}
BOUNDS: dict[str, Any] = {"truncated_importance_sampling_ratio_min": 0.7, "truncated_importance_sampling_ratio": 1.4}
EVERY: dict[str, PolicyLoss] = {
    "clip": PolicyLoss(),
    "dual clip": PolicyLoss(ratio_clip_max=0.28, ratio_clip_c=1.3),
    "gspo": PolicyLoss(sequence_level_importance_ratios=True, reduction="sequence"),
    "cispo": PolicyLoss("cispo", ratio_clip_max=1.2),
    "sapo": PolicyLoss("sapo", reduction="sequence"),
    "sapo, sequence": PolicyLoss("sapo", sequence_level_importance_ratios=True),
    "reinforce": PolicyLoss("reinforce", reduction="constant", max_response_length=10),
    "dr_grpo": PolicyLoss(reduction="constant", max_response_length=10),
    "on policy": PolicyLoss(force_on_policy_ratio=True),
    "overlong": PolicyLoss(overlong_filtering=True, reduction="sequence"),
    "entropy": PolicyLoss(entropy_coef=0.1),
    **{
        k: PolicyLoss(reference_policy_kl_penalty=0.2, reference_policy_kl_type=k)
        for k in ("k1", "k2", "k3", "k3_plain")
    },
    "weights": PolicyLoss(importance_sampling_correction="sequence"),
    **{
        kind: PolicyLoss(truncated_importance_sampling_type=kind, **WEIGHTS, **BOUNDS)
        for kind in ("tis", "icepop", "seq-mask-tis")
    },
    "all": PolicyLoss(
        **{"overlong_filtering": True, "entropy_coef": 0.1, "reference_policy_kl_penalty": 0.1, "ratio_clip_c": 3.0},
        **{"sequence_level_importance_ratios": True, "truncated_importance_sampling_type": "icepop"},
        **WEIGHTS,
        **BOUNDS,
    ),
}
