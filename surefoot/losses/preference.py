"""The loss of direct preference optimisation: a weighted sum of the losses in `pairs.py`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import ConfigError
from surefoot.losses.pairs import BETA, LOSSES, Pairs, Side
from surefoot.types import Metric, Metrics

if TYPE_CHECKING:
    from torch import Tensor

SHIFT_DECAY = 0.99
_SORTED = {"aot", "aot_unpaired"}  # no sums over pairs
_PER_TOKEN = {"ipo", "sigmoid_norm", "sft"}  # averages over tokens by themselves


@dataclass(frozen=True, slots=True)
class LossEntry:
    """One weighted loss. An option that is `None` has the loss's own default; one that the loss does not read must be
    `None`."""

    name: str
    weight: float = 1.0
    beta: float | None = None
    label_smoothing: float | None = None
    discopop_tau: float | None = None

    @property
    def options(self) -> dict[str, float]:
        """All options that the loss reads, with their values."""
        read = inspect.signature(LOSSES[self.name]).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in read if parameter.kind is parameter.KEYWORD_ONLY}
        return defaults | {name: value for name, value in self._given().items() if name in defaults}

    def check(self, path: str) -> None:
        """Raises `ConfigError`, naming `path` and the option."""
        if self.name not in LOSSES:
            raise ConfigError(f"{path}: there is no loss {self.name!r}; expected one of {', '.join(LOSSES)}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"{path} ({self.name}): weight must be above 0, found {self.weight}")
        options = self.options
        for option in self._given():
            if option not in options:
                reads = ", ".join(options) or "no option"
                raise ConfigError(
                    f"{path} ({self.name}): this loss ignores {option}, it reads {reads}: remove {option}"
                )
        for option, value in options.items():
            _check_option(f"{path} ({self.name})", option, value)
        if self.name == "exo_pair" and not options["label_smoothing"]:
            raise ConfigError(f"{path} (exo_pair): label_smoothing must be above 0, such as 0.001: its log is taken")

    def _given(self) -> dict[str, float]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if name not in ("name", "weight") and value is not None}


def _check_option(where: str, option: str, value: float) -> None:
    if option == "label_smoothing":
        if not 0 <= value < 0.5:
            raise ConfigError(f"{where}: label_smoothing must lie in [0, 0.5), found {value}")
    elif not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{where}: {option} must be above 0, found {value}")


PRESETS: Mapping[str, tuple[LossEntry, ...]] = {
    "mpo": (LossEntry("sigmoid", 0.8), LossEntry("bco_pair", 0.2), LossEntry("sft", 1.0)),
}


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Σ weight · mean over pairs of each entry's loss; `sft`'s mean is over the chosen sides' tokens.

    Rows come as pairs, the chosen one first. Reads the output `logprobs` [rows, tokens] and the columns `loss_mask`
    and `reference_logprobs`, both [rows, tokens]. A pair with a side on which nothing is trained is left out of every
    mean and counted in `skipped_pairs`: its loss and gradient are 0.

    Attributes:
        entries: the losses, each name once.
        reference: without one its log-probs are 0 and its column is not read.
        length_average: log-probs of a side are divided by its number of tokens. Losses that are per token by themselves
            stay as they are.
        ld_alpha: LD-DPO (arXiv:2409.06411): tokens beyond the pair's shorter side count this much, in [0, 1].
        wpo: WPO (arXiv:2406.11827, eq. 2): each pair's losses are weighted by how likely its two sides are under the
            policy, exp(mean over tokens of (log-prob − log Σ probs²)), without gradient. Reads `log_sum_sq_probs`.
        shift: BCO's δ, from before the step; see `next_shift`.

    Raises:
        ConfigError: an entry or an option cannot be used, or no entry reads it; names both.
    """

    entries: tuple[LossEntry, ...]
    reference: bool = True
    length_average: bool = False
    ld_alpha: float | None = None
    wpo: bool = False
    shift: float = 0.0

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if not names:
            raise ConfigError("losses: expected at least one loss, found none")
        for number, entry in enumerate(self.entries):
            entry.check(f"losses[{number}]")
            if names.index(entry.name) != number:
                raise ConfigError(
                    f"losses[{number}]: {entry.name} is there twice: give it once, with the sum of weights"
                )
        self._check_whole(set(names))

    def _check_whole(self, names: set[str]) -> None:
        """The options of the whole: in range, and read by some entry."""
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ConfigError(f"ld_alpha must lie in [0, 1], found {self.ld_alpha}")
        if self.length_average and names <= _PER_TOKEN:
            raise ConfigError(f"length_average: {sorted(names)} are per token by themselves: remove length_average")
        if self.ld_alpha is not None and names == {"sft"}:
            raise ConfigError("ld_alpha: sft ignores it: remove ld_alpha")
        if self.shift and "bco_pair" not in names:
            raise ConfigError(f"shift: only bco_pair reads it, found {self.shift} with {sorted(names)}")
        if "sppo_hard" in names and not self.reference:
            raise ConfigError(
                "sppo_hard wants log-ratios of ±1/2β; without a reference it makes rejected answers likelier, up to a "
                "log-prob of −1/2β: take a reference, or another loss"
            )
        if self.wpo and self.whole_step:
            raise ConfigError("wpo weights pairs, but aot and aot_unpaired compare sorted sides, not pairs: remove one")

    @classmethod
    def of(cls, given: Sequence[LossEntry], preset: str | None, beta: float | None, **whole: Any) -> PreferenceLoss:
        """As a configuration says it: the entries given, or a preset's, or `sigmoid` alone; `beta` for those that read
        one and set none; `whole`: the attributes. Raises `ConfigError`, also where nothing takes `beta`."""
        if given and preset is not None:
            raise ConfigError(f"expected losses or preset, found both (preset: {preset})")
        loss = cls(PRESETS[preset] if preset else tuple(given) or (LossEntry("sigmoid"),), **whole)
        if beta is None:
            return loss
        takes = [entry.beta is None and "beta" in entry.options for entry in loss.entries]
        if not any(takes):
            raise ConfigError("beta: every loss sets its own or reads none: remove beta")
        pairs = zip(loss.entries, takes, strict=True)
        return replace(loss, entries=tuple(replace(entry, beta=beta) if take else entry for entry, take in pairs))

    @property
    def fields(self) -> tuple[str, ...]:
        return ("loss_mask", "reference_logprobs") if self.reference else ("loss_mask",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the head must put out."""
        return ("logprobs", "log_sum_sq_probs") if self.wpo else ("logprobs",)

    @property
    def measures(self) -> list[str]:
        """Names of the metrics."""
        none = torch.zeros(0, 1)
        out, columns = dict.fromkeys(self.outputs, none), dict.fromkeys(self.fields, none)
        return list(self(out, columns, norm=self.counts(columns))[1])

    @property
    def whole_step(self) -> bool:
        return any(entry.name in _SORTED for entry in self.entries)

    @property
    def reward_beta(self) -> float:
        """β of the logged rewards βΔ: that of the first entry which has one."""
        return next((entry.options["beta"] for entry in self.entries if "beta" in entry.options), BETA)

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]:
        """`pairs`, and `chosen_tokens` of these pairs."""
        lengths = _lengths(columns["loss_mask"] != 0)
        valid = (lengths > 0).all(1)
        return {"pairs": float(valid.sum()), "chosen_tokens": float(lengths[valid, 0].sum())}

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """The rows' share of the step's loss, and metrics: `loss`, each entry's as `loss/<name>` without its weight,
        `rewards/…` and `logps/…` as means over pairs, and with `bco_pair` the `bco/mean_reward` of `next_shift`."""
        own = self.counts(columns)
        pairs, weights = self._pairs(out, columns)
        total = pairs.chosen_nll.new_zeros(())
        metrics: dict[str, Metric] = {}
        for entry in self.entries:
            count = "chosen_tokens" if entry.name == "sft" else "pairs"
            summed = (LOSSES[entry.name](pairs, **entry.options) * weights).sum()
            total = total + entry.weight * summed / (norm[count] or 1.0)
            metrics[f"loss/{entry.name}"] = _mean(summed, own[count])
        # Weighted by pairs, so that the shares of one step merge to the step's loss, also where sft counts tokens.
        return total, {"loss": _mean(total * norm["pairs"], own["pairs"]), **metrics, **self._measured(pairs, columns)}

    def with_totals(self, measured: Metrics) -> dict[str, Metric]:
        """What validation measured, each `loss` made anew of its parts: a batch weighs by pairs in it and by tokens in
        `loss/sft`, so that a mean over batches would depend on how the rows were cut."""
        totals = {
            name: replace(metric, value=sum(e.weight * measured[f"{name}/{e.name}"].value for e in self.entries))
            for name, metric in measured.items()
            if name.rpartition("/")[2] == "loss"
        }
        return {**measured, **totals}

    def _pairs(self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> tuple[Pairs, Tensor]:
        """The pairs that have something to train on, on both sides, and the weight [pairs] of each."""
        mask = columns["loss_mask"] != 0
        kept = (_lengths(mask) > 0).all(1).repeat_interleave(2)
        mask, logprobs = mask[kept], out["logprobs"][kept].masked_fill(~mask[kept], 0.0)
        reference = torch.zeros_like(logprobs)
        if self.reference:
            reference = columns["reference_logprobs"][kept].to(logprobs.dtype).masked_fill(~mask, 0.0)
        lengths = _lengths(mask)
        token_weights = self._token_weights(mask, lengths, logprobs.dtype)
        ratios = ((logprobs - reference) * token_weights).sum(1).view(-1, 2)
        scale = lengths if self.length_average else torch.ones_like(lengths)
        policy_sums, reference_sums = ((x * token_weights).sum(1).view(-1, 2) / scale for x in (logprobs, reference))
        sides = [
            Side(policy_sums[:, i], reference_sums[:, i], (ratios / scale)[:, i], (ratios / lengths)[:, i])
            for i in (0, 1)
        ]
        weights = torch.ones_like(policy_sums[:, 0])
        if self.wpo:
            aligned = (logprobs - out["log_sum_sq_probs"][kept]).masked_fill(~mask, 0.0).detach()
            weights = (aligned.sum(1).view(-1, 2) / lengths).sum(1).exp()
        return Pairs(sides[0], sides[1], -logprobs.sum(1)[0::2], self.shift), weights

    def _token_weights(self, mask: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        weights = mask.to(dtype)
        if self.ld_alpha is None:
            return weights
        shared = lengths.min(1).values.repeat_interleave(2)
        return weights.masked_fill(mask & (mask.cumsum(1) > shared[:, None]), self.ld_alpha)

    def _measured(self, pairs: Pairs, columns: Mapping[str, Tensor]) -> dict[str, Metric]:
        chosen, rejected = pairs.chosen.ratios.detach(), pairs.rejected.ratios.detach()
        count, beta = float(len(chosen)), self.reward_beta
        means = {
            "rewards/chosen": beta * chosen,
            "rewards/rejected": beta * rejected,
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "rewards/margins": beta * (chosen - rejected),
            "logps/chosen": pairs.chosen.logprobs.detach(),
            "logps/rejected": pairs.rejected.logprobs.detach(),
        }
        for entry in self.entries:
            if entry.name == "bco_pair":
                means["bco/mean_reward"] = entry.options["beta"] * (chosen + rejected) / 2
        metrics = {name: _mean(values.sum(), count) for name, values in means.items()}
        mask = columns["loss_mask"]
        metrics["num_tokens"] = Metric(float((mask != 0).sum()), reduce="sum")
        metrics["skipped_pairs"] = Metric(len(mask) / 2 - count, reduce="sum")
        return metrics


def next_shift(shift: float, metrics: Metrics) -> float:
    """BCO's δ after a step with these metrics: 0.99 δ + 0.01 · mean of βΔ over both sides. A step whose pairs were all
    left out changes nothing."""
    measured = metrics["bco/mean_reward"]
    return SHIFT_DECAY * shift + (1 - SHIFT_DECAY) * measured.value if measured.weight else shift


def _lengths(mask: Tensor) -> Tensor:
    """Trained tokens as [pairs, 2]. Raises `ValueError` when a row has no partner."""
    if len(mask) % 2:
        raise ValueError(f"preference rows come in pairs, the chosen one first; found {len(mask)} rows")
    return mask.sum(1).view(-1, 2)


def _mean(total: Tensor, count: float) -> Metric:
    return Metric(float(total.detach()) / count if count else 0.0, weight=count)
