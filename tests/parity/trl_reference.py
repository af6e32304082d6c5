"""TRL's own loss functions, driven from small stubs. Needs trl 1.16; nothing here is imported without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tests.parity.cases import (
    GOLD_VOCABULARIES,
    LONGEST,
    MARGINS,
    SCORES,
    Case,
    DistillCase,
    GoldCase,
    PolicyCase,
    distilled,
    gold_rows,
    policy_rows,
    rows,
)

VERSION = "1.16"
Values: TypeAlias = "dict[str, Any]"


def installed() -> bool:
    try:
        return version("trl").startswith(f"{VERSION}.")
    except PackageNotFoundError:
        return False


class _Model(nn.Module):
    """Gives prepared outputs, whatever it is asked."""

    is_gradient_checkpointing = False

    def __init__(self, **outputs: Any) -> None:
        super().__init__()
        self._outputs = SimpleNamespace(**outputs)

    def forward(self, **inputs: Any) -> SimpleNamespace:
        return self._outputs


def preference(case: Case) -> Values:
    """`loss`, `gradient` [rows, tokens] in the log-probs (in our order and alignment), and TRL's metrics."""
    from trl.trainer.dpo_trainer import DPOTrainer

    data = rows(case.pairs, case.empty_pair)
    order = [*range(0, 2 * case.pairs, 2), *range(1, 2 * case.pairs, 2)]  # all chosen sides first
    logprobs = data.logprobs.clone().requires_grad_()
    zeros = torch.zeros_like(data.loss_mask)[order, 1:]
    model = _Model(
        log_probs=(logprobs * data.loss_mask)[order, 1:],
        log_sum_sq_probs=data.log_sum_sq_probs[order, 1:],
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
    )
    trainer = SimpleNamespace(
        model=model,
        ref_model=_Model(log_probs=data.reference_logprobs[order, 1:]),
        **_settings(case),
        **_trainer(),
    )
    inputs = {
        "input_ids": torch.zeros(data.loss_mask.shape, dtype=torch.long),
        "attention_mask": data.attention_mask[order].long(),
        "completion_mask": data.loss_mask[order].long(),
    }
    loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    loss.backward()
    assert logprobs.grad is not None
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items() if "/" in name}
    return {**_values(loss, logprobs.grad), "metrics": {n: v for n, v in metrics.items() if "logits" not in n}}


def _settings(case: Case) -> dict[str, Any]:
    given: dict[str, float] = {}
    for _, _, options in case.entries:
        given |= options
    settings = {
        "loss_types": [name for name, _, _ in case.entries],
        "loss_weights": [weight for _, weight, _ in case.entries],
        "beta": given.get("beta", 0.1),
        "label_smoothing": given.get("label_smoothing", 0.0),
        "ld_alpha": case.options.get("ld_alpha"),
        "use_weighting": case.options.get("wpo", False),
        "f_divergence_type": "reverse_kl",
        "precompute_ref_logps": False,
        "args": SimpleNamespace(discopop_tau=given.get("discopop_tau", 0.05), gradient_checkpointing_kwargs=None),
    }
    return settings | dict(case.theirs)


def reward(margins: bool, centring: float) -> Values:
    """`loss`, `gradient` [pairs, 2] in the scores, and TRL's accuracy, margin and mean score."""
    from trl.trainer.reward_trainer import RewardTrainer

    scores = torch.tensor(SCORES).requires_grad_()
    model = _Model(logits=scores.t().reshape(-1, 1))
    trainer = SimpleNamespace(
        model=model, args=SimpleNamespace(center_rewards_coefficient=centring or None), **_trainer()
    )
    inputs = {"attention_mask": torch.ones(2 * len(SCORES), 1)}
    loss = RewardTrainer.compute_loss(trainer, model, inputs | ({"margin": torch.tensor(MARGINS)} if margins else {}))
    loss.backward()
    assert scores.grad is not None
    metrics = trainer._metrics["train"]
    named: Mapping[str, float] = {name: metrics[name][0] for name in ("accuracy", "margin", "mean_reward")}
    return {**_values(loss, scores.grad), "metrics": named}


def policy(case: PolicyCase) -> Values:
    """`loss`, `gradient` [rows, tokens] in the log-probs and entropies, and TRL's metrics."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    data = policy_rows(case.empty_row)
    logprobs, entropy = data.logprobs.clone().requires_grad_(), data.entropy.clone().requires_grad_()
    given = dict(case.theirs)
    own, at_most = given.pop("old", data.old_logprobs[:, 1:]), given.pop("weights_at_most", None)
    settings = {**_POLICY, **given}
    trainer = SimpleNamespace(
        model=_Model(),
        args=SimpleNamespace(**{name: settings[name] for name in _ARGS}),
        use_vllm=at_most is not None,
        _entropy_bonus_enabled=bool(settings["entropy_coef"]),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs[:, 1:], entropy[:, 1:], None),
        **settings,
        **_trainer(),
    )
    trainer.accelerator.reduce = lambda totals, reduction: totals
    trainer.accelerator.num_processes, trainer.accelerator.sync_gradients = 1, False
    mask = data.loss_mask[:, 1:]
    inputs = {
        **{"prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask, "completion_mask": mask},
        "advantages": data.advantages.sum(1) / data.loss_mask.sum(1).clamp(min=1),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": data.reference_logprobs[:, 1:],
        "old_per_token_logps": own,
    }
    if at_most is not None:  # TRL makes these weights where it generates
        inputs["importance_sampling_ratio"] = (own - data.generator_logprobs[:, 1:]).exp().clamp(max=at_most)
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    grads = torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True, materialize_grads=True)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items() if name in _POLICY_METRICS}
    return {"loss": float(loss.detach()), "gradient": torch.stack(grads).tolist(), "metrics": metrics}


def distillation(case: DistillCase) -> Values:
    """`loss`, `gradient` in the student's hidden states and `head_gradient` in its head."""
    data = distilled()
    hidden, head = data.student.clone().requires_grad_(), data.student_head.clone().requires_grad_()
    student, teacher = hidden @ head.t(), data.teacher @ data.teacher_head.t()
    if case.theirs == "chunked":
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        sides = (hidden, data.teacher, head, data.teacher_head, data.mask)
        loss, _, _ = _chunked_divergence_loss(*sides, case.beta, temperature=case.temperature)
    elif case.theirs == "top-k":
        loss = _top_k(case, student, teacher, data.mask)
    else:
        from trl.experimental.gkd.gkd_trainer import GKDTrainer

        labels = torch.where(data.mask != 0, 1, -100)
        options = {"beta": case.beta, "temperature": case.temperature}
        loss = GKDTrainer.generalized_jsd_loss(student, teacher, labels, **options)
    grads = torch.autograd.grad(loss, [hidden, head])
    return {**_values(loss, grads[0]), "head_gradient": grads[1].tolist()}


def _top_k(case: DistillCase, student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """As TRL's server distillation has it for what a server sends of the teacher."""
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

    assert case.top_k is not None
    theirs, ids = teacher.log_softmax(-1).topk(case.top_k, dim=-1)
    ours, valid = student.log_softmax(-1).gather(-1, ids), torch.ones_like(ids, dtype=torch.bool)
    if case.tail:
        (ours, cells), (theirs, _) = _add_tail_bucket(ours, valid), _add_tail_bucket(theirs, valid)
    else:
        ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
        cells = valid
    return _jsd_divergence(ours, theirs, case.beta, cells).sum(-1)[mask != 0].mean()


_POLICY_METRICS = {"kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
_ARGS = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg", "steps_per_generation")
_POLICY: dict[str, Any] = {
    **{"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": 0.0},
    **{"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    **{"steps_per_generation": 1, "current_gradient_accumulation_steps": 1, "max_completion_length": LONGEST},
    **{"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_adaptive_entropy": False},
    "vllm_importance_sampling_correction": True,
}


def gold(case: GoldCase) -> Values:
    """`loss` and `gradient` [rows, tokens, vocabulary] in the student's logits, in our alignment: the logits at a token
    predict that token. TRL's "bayesian" merge shifts by one, and its "observed" merge does not."""
    from trl.experimental.gold.gold_trainer import ULDLoss

    student, teacher = gold_rows()
    config = SimpleNamespace(
        uld_crossentropy_weight=case.ce_weight,
        uld_distillation_weight=1.0,
        uld_student_temperature=case.temperature,
        uld_teacher_temperature=case.temperature,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        uld_token_merge_strategy=case.merge,
        uld_use_hybrid_loss=case.hybrid,
        uld_hybrid_matched_weight=case.weights[0] if case.weights else None,
        uld_hybrid_unmatched_weight=case.weights[1] if case.weights else None,
        beta=case.beta,
    )
    ours, theirs = (SimpleNamespace(get_vocab=lambda names=names: names) for names in GOLD_VOCABULARIES)
    logits = student.logits.clone().requires_grad_()
    shifted = [_one_earlier(x) if case.merge == "bayesian" else x for x in (logits, teacher.logits)]
    sides = [(side.labels, side.ids, side.offsets) for side in (student, teacher)]
    labels, ids, offsets = zip(*sides, strict=True)
    loss = ULDLoss(config, ours, theirs)(*shifted, *labels, *ids, *offsets)
    loss.backward()
    assert logits.grad is not None
    return _values(loss, logits.grad)


def _one_earlier(logits: Tensor) -> Tensor:
    return torch.cat([logits[:, 1:], logits[:, :1] * 0], 1)


def _trainer() -> dict[str, Any]:
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=_same, gather_for_metrics=_same)
    return {
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _values(loss: Tensor, gradient: Tensor) -> Values:
    return {"loss": float(loss.detach()), "gradient": gradient.tolist()}
