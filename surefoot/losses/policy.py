"""The loss of policy-gradient methods: GRPO and its relatives, REINFORCE, PPO's policy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from surefoot.errors import ConfigError
from surefoot.losses.kl import KINDS, kl_penalty
from surefoot.losses.mismatch import TRUNCATIONS, Weights, importance_weights
from surefoot.losses.policy_metrics import Measured, policy_metrics
from surefoot.losses.ratios import LOSSES, sequence_ratio, token_ratio
from surefoot.types import Metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

REDUCTIONS = ("token", "sequence", "constant")
_OPTIONS = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "sapo_temperature_pos", "sapo_temperature_neg")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Σ over trained tokens of (weight · policy loss + β · KL − c · entropy), reduced over the optimizer step's rows.

    Reads the outputs `logprobs` and `entropy` [rows, tokens] and the columns in `fields`, all [rows, tokens] except
    `truncated` [rows]. Rows on which nothing is trained are in no mean and are counted in `skipped_rows`; where that is
    all rows the loss is 0 and so is its gradient. The defaults are GRPO with DAPO's reduction and without KL.

    Attributes:
        loss_type: "clip", "cispo", "sapo" or "reinforce", from `ratios.py`. The five options below belong to one of
            them; `None` is the loss's own default, and one that the loss does not read must be `None`.
        sequence_level_importance_ratios: GSPO's ratio, one for all tokens of a row.
        force_on_policy_ratio: o is the policy's own log-prob without gradient, so the ratio is 1 to the bit; the column
            `old_logprobs` is not read. Right where a step's rows have exactly one optimizer step: then o, as computed
            before the step, would be the same number but for rounding. With more steps it would hide that the policy
            has moved.
        importance_sampling_correction: weights exp(o − g) for a generator g that is not the trainer: "token" or
            "sequence".
        truncated_importance_sampling_type: "tis", "icepop" or "seq-mask-tis", from `mismatch.py`, with the bounds
            `truncated_importance_sampling_ratio_min` and `truncated_importance_sampling_ratio`.
        reference_policy_kl_penalty: β. 0: no reference is read.
        reference_policy_kl_type: from `kl.py`; default: k3, with the gradient of KL(policy‖reference).
        entropy_coef: c, reduced as the rest is.
        reduction: "token": Σ / tokens (DAPO, BNPO). "sequence": the mean of the rows' means (GRPO). "constant":
            Σ / (rows · max_response_length) (Dr. GRPO, arXiv:2503.20783).
        max_response_length: tokens; with "constant" alone.
        overlong_filtering: rows whose column `truncated` is not 0 are not trained.

    Raises:
        ConfigError: an option is out of range or does not go with another one; names both.
    """

    loss_type: str = "clip"
    ratio_clip_min: float | None = None
    ratio_clip_max: float | None = None
    ratio_clip_c: float | None = None
    sapo_temperature_pos: float | None = None
    sapo_temperature_neg: float | None = None
    sequence_level_importance_ratios: bool = False
    force_on_policy_ratio: bool = False
    importance_sampling_correction: str | None = None
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: str | None = None
    entropy_coef: float = 0.0
    reduction: str = "token"
    max_response_length: int | None = None
    overlong_filtering: bool = False
    whole_step: ClassVar[bool] = False
    outputs: ClassVar[tuple[str, ...]] = ("logprobs", "entropy")

    def __post_init__(self) -> None:
        _check_loss_type(self)
        _check_correction(self)
        _check_kl_and_entropy(self)
        _one_of("reduction", self.reduction, REDUCTIONS)
        if self.reduction == "constant" and not (self.max_response_length and self.max_response_length > 0):
            raise ConfigError(
                "reduction: constant divides by max_response_length: set it to the most tokens that a response may "
                f"have, found {self.max_response_length}"
            )
        if self.reduction != "constant" and self.max_response_length is not None:
            raise ConfigError(f"max_response_length: reduction {self.reduction} ignores it: remove one")

    @property
    def fields(self) -> tuple[str, ...]:
        needed = {
            "old_logprobs": not self.force_on_policy_ratio,
            "reference_logprobs": self.reference_policy_kl_penalty > 0,
            "truncated": self.overlong_filtering,
        }
        return (
            "loss_mask",
            "advantages",
            "generator_logprobs",
            *(name for name, is_needed in needed.items() if is_needed),
        )

    @property
    def options(self) -> dict[str, Any]:
        """All options that the loss type reads, with their values."""
        read = inspect.signature(LOSSES[self.loss_type]).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in read if parameter.kind is parameter.KEYWORD_ONLY}
        given = {name: getattr(self, name) for name in defaults}
        return defaults | {name: value for name, value in given.items() if value is not None}

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """`tokens` trained, and `sequences` with at least one of them."""
        mask = self._mask(columns)
        return {"tokens": float(mask.sum()), "sequences": float(mask.any(1).sum())}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and the metrics that `policy_metrics.py` lists."""
        mask = self._mask(columns)
        logprobs = out["logprobs"].masked_fill(~mask, 0.0)

        def column(name: str) -> Tensor:
            return columns[name].to(logprobs.dtype).masked_fill(~mask, 0.0)

        old = logprobs.detach() if self.force_on_policy_ratio else column("old_logprobs")
        advantages, gap = column("advantages"), old - column("generator_logprobs")
        own_ratio = token_ratio(logprobs, old)
        ratio = sequence_ratio(logprobs, old, mask) if self.sequence_level_importance_ratios else own_ratio
        weights = self._weights(gap, mask)
        per_token = LOSSES[self.loss_type](ratio, logprobs, advantages, **self.options) * weights.used
        kl = entropy = None
        if self.reference_policy_kl_penalty:
            kind = self.reference_policy_kl_type or "k3"
            kl = kl_penalty(logprobs, column("reference_logprobs"), own_ratio, kind)
            per_token = per_token + self.reference_policy_kl_penalty * kl
        if self.entropy_coef or "entropy" in out:
            entropy = out["entropy"].masked_fill(~mask, 0.0)
            per_token = per_token - self.entropy_coef * entropy if self.entropy_coef else per_token
        total = (per_token * self._shares(mask, norm, per_token.dtype)).sum()
        measured = Measured(total, mask, ratio, advantages, gap, weights, kl, entropy)
        unit = "tokens" if self.reduction == "token" else "sequences"
        return total, policy_metrics(measured, self.loss_type, self.options, norm[unit], self.counts(columns)[unit])

    def _mask(self, columns: Mapping[str, Tensor]) -> Tensor:
        mask = columns["loss_mask"] != 0
        return mask & (columns["truncated"] == 0)[:, None] if self.overlong_filtering else mask

    def _weights(self, gap: Tensor, mask: Tensor) -> Weights:
        return importance_weights(
            gap,
            mask,
            level=self.importance_sampling_correction,
            truncation=self.truncated_importance_sampling_type,
            low=self.truncated_importance_sampling_ratio_min or 0.0,
            high=self.truncated_importance_sampling_ratio or math.inf,
        )

    def _shares(self, mask: Tensor, norm: Mapping[str, float], dtype: torch.dtype) -> Tensor:
        """How much each token counts [rows, tokens], 0 outside the mask."""
        shares = mask.to(dtype)
        if self.reduction == "token":
            return shares / (norm["tokens"] or 1.0)
        lengths = self.max_response_length or shares.sum(1, keepdim=True).clamp(min=1)
        return shares / lengths / (norm["sequences"] or 1.0)


# ------------------------------------------------------------------------------------------------------------- checks


def _check_loss_type(loss: PolicyLoss) -> None:
    name = loss.loss_type
    _one_of("loss_type", name, tuple(LOSSES))
    for option in _OPTIONS:
        value = getattr(loss, option)
        if value is None:
            continue
        if option not in loss.options:
            reads = ", ".join(loss.options) or "no option"
            raise ConfigError(f"{option}: loss_type {name} ignores it, it reads {reads}: remove {option}")
        _in_range(option, value, above=1.0 if option == "ratio_clip_c" else 0.0)
    if name == "clip" and loss.options["ratio_clip_min"] > 1:
        raise ConfigError(f"ratio_clip_min must lie in (0, 1], found {loss.ratio_clip_min}: ratios are above 0")
    if name == "reinforce" and loss.sequence_level_importance_ratios:
        raise ConfigError("sequence_level_importance_ratios: loss_type reinforce has no ratio: remove one")


def _check_correction(loss: PolicyLoss) -> None:
    level, kind = loss.importance_sampling_correction, loss.truncated_importance_sampling_type
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    if level is not None:
        _one_of("importance_sampling_correction", level, ("token", "sequence"))
    if kind is None:
        if low is not None or high is not None:
            option = "truncated_importance_sampling_ratio" + ("" if low is None else "_min")
            raise ConfigError(f"{option}: nothing reads it without truncated_importance_sampling_type: set that too")
        return
    where = f"truncated_importance_sampling_type {kind}"
    _one_of("truncated_importance_sampling_type", kind, TRUNCATIONS)
    if level is None:
        raise ConfigError(
            f"{where}: there are no weights without importance_sampling_correction: set it to token or sequence"
        )
    if kind == "seq-mask-tis" and level == "sequence":
        raise ConfigError(
            f"{where}: drops rows and weighs tokens: set importance_sampling_correction: token, found sequence"
        )
    if high is None:
        raise ConfigError(f"{where}: set truncated_importance_sampling_ratio, the upper bound of the weights")
    if low is None and kind != "tis":
        raise ConfigError(f"{where}: set truncated_importance_sampling_ratio_min, the lower bound of the weights")
    _in_range("truncated_importance_sampling_ratio", high)
    if low is not None and not 0 <= low <= high:
        raise ConfigError(
            "truncated_importance_sampling_ratio_min must lie between 0 and truncated_importance_sampling_ratio "
            f"({high}), found {low}"
        )


def _check_kl_and_entropy(loss: PolicyLoss) -> None:
    for option in ("reference_policy_kl_penalty", "entropy_coef"):
        value = getattr(loss, option)
        if value:
            _in_range(option, value)
    if loss.reference_policy_kl_type is not None:
        _one_of("reference_policy_kl_type", loss.reference_policy_kl_type, KINDS)
        if not loss.reference_policy_kl_penalty:
            raise ConfigError(
                "reference_policy_kl_type: with reference_policy_kl_penalty 0 nothing reads it: remove it, or set a "
                "penalty"
            )


def _in_range(option: str, value: float, above: float = 0.0) -> None:
    if not (math.isfinite(value) and value > above):
        raise ConfigError(f"{option} must be above {above:g}, found {value}")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option}: expected one of {', '.join(allowed)}, found {value!r}")
