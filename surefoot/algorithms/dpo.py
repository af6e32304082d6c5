"""Direct preference optimisation: make the chosen answer likelier and the rejected one less likely, against a frozen
reference; fifteen losses, alone or mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from surefoot.config import AlgorithmConfig, PositiveInt, PositiveReal, Real, Section
from surefoot.data.source import training_source, validate
from surefoot.errors import ConfigError
from surefoot.losses.preference import LossEntry, PreferenceLoss, next_shift
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
    Rows,
    Source,
    Writer,
)

PRESETS = {"mpo": (LossEntry("sigmoid", 0.8), LossEntry("bco_pair", 0.2), LossEntry("sft", 1.0))}


class PreferenceLossConfig(Section):
    """One loss of the mix, by its name in `surefoot/losses/pairs.py`. What is left out has the loss's own default; an
    option that the loss does not read is an error."""

    name: str
    weight: PositiveReal = 1.0
    beta: PositiveReal | None = None
    label_smoothing: Real | None = None
    discopop_tau: PositiveReal | None = None


class DPOConfig(AlgorithmConfig):
    """Which losses are minimised, and against what.

    Attributes:
        losses: with their weights; default: `sigmoid` alone, the DPO of the first paper.
        preset: "mpo" in place of `losses`: 0.8 sigmoid + 0.2 bco_pair + 1.0 sft (arXiv:2411.10442).
        beta: of each loss that reads one and sets none itself; default: 0.1.
        reference: "frozen": the policy as it was before training; under `policy.lora` that is the same model with its
            adapter off, else a second one in memory. "none": log-probs under the reference count as 0.
        length_average: log-probs of an answer are divided by its tokens.
        ld_alpha: how much tokens beyond the pair's shorter answer count, from 0 to 1 (LD-DPO).
        wpo: weight pairs by how likely they are under the policy (WPO).
        val_batch_size: rows of one validation batch, two to a pair; it changes speed and memory, and a result only with
            aot and aot_unpaired, which sort the pairs of a batch.
    """

    losses: list[PreferenceLossConfig] = Field(default=[])
    preset: Literal["mpo"] | None = None
    beta: PositiveReal | None = None
    reference: Literal["frozen", "none"] = "frozen"
    length_average: bool = False
    ld_alpha: Annotated[Real, Field(ge=0, le=1)] | None = None
    wpo: bool = False
    val_batch_size: PositiveInt = 32

    @model_validator(mode="after")
    def _losses_fit_their_options(self) -> DPOConfig:
        if self.losses and self.preset is not None:
            raise ValueError(f"expected losses or preset, found both (preset: {self.preset})")
        try:
            self.loss()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def loss(self) -> PreferenceLoss:
        """Raises `ConfigError` when a loss or an option cannot be used."""
        given = tuple(LossEntry(**entry.model_dump()) for entry in self.losses)
        entries = PRESETS[self.preset] if self.preset else given or (LossEntry("sigmoid"),)
        loss = PreferenceLoss(
            entries, self.reference == "frozen", self.length_average, ld_alpha=self.ld_alpha, wpo=self.wpo
        )
        if self.beta is None:
            return loss
        open_to_it = [entry.beta is None and "beta" in entry.options for entry in entries]
        if not any(open_to_it):
            raise ConfigError("beta: every loss sets its own or reads none: remove beta")
        shared = [
            replace(entry, beta=self.beta) if is_open else entry
            for entry, is_open in zip(entries, open_to_it, strict=True)
        ]
        return replace(loss, entries=tuple(shared))


class DPO(Algorithm):
    """The whole method: rows come as pairs, the reference's log-probs are added to them, one loss is minimised. Its
    running state is BCO's shift."""

    Config = DPOConfig
    config: DPOConfig
    rows: ClassVar[Rows] = "pairs"

    def __init__(self, config: DPOConfig) -> None:
        super().__init__(config)
        self._loss = config.loss()

    def engines(self) -> Mapping[str, EngineSpec]:
        reference = {"reference": EngineSpec(trained=False, base_of="policy")} if self._loss.reference else {}
        return {"policy": EngineSpec(), **reference}

    def source(self, kit: Kit) -> Source:
        return training_source(kit)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        if not self._loss.reference:
            return ref
        return kit.engines["reference"].infer(ref, Head(("logprobs",)), {"logprobs": "reference_logprobs"})

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        return [Objective("policy", Head(self._loss.outputs), self._loss)]

    def observe(self, metrics: Metrics, kit: Kit) -> None:
        if "bco/mean_reward" in metrics:
            self._loss = replace(self._loss, shift=next_shift(self._loss.shift, metrics))

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """The loss, its parts, rewards, accuracy and log-probs, on each set and over all of them."""
        (objective,) = self.objectives(Clock())
        policy = kit.engines["policy"]

        def measure(batch: BatchRef) -> Metrics:
            return policy.evaluate(self.enrich(batch, kit), objective)

        return self._with_totals(validate(kit, poll, self.config.val_batch_size, measure))

    def _with_totals(self, measured: Metrics) -> Metrics:
        """`loss` made anew of its parts: a batch weighs by pairs in it and by tokens in `loss/sft`, so that a mean over
        batches would depend on how the rows were cut."""
        totals: dict[str, Metric] = {}
        for name, metric in measured.items():
            if name == "loss" or name.endswith("/loss"):
                parts = [entry.weight * measured[f"{name}/{entry.name}"].value for entry in self._loss.entries]
                totals[name] = replace(metric, value=sum(parts))
        return {**measured, **totals}

    def snapshot(self) -> Writer:
        state = {"shift": self._loss.shift}
        return lambda sink: sink.json("dpo.json", state)

    def restore(self, reader: Reader) -> None:
        self._loss = replace(self._loss, shift=float(reader.json("dpo.json")["shift"]))
