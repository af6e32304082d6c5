"""Direct preference optimisation: make the chosen answer likelier and the rejected one less likely, against a
reference; fifteen losses, alone or mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from surefoot.config import AlgorithmConfig, Place, PositiveInt, PositiveReal, Real, RowsOfPairs, RunConfig, Section
from surefoot.data.source import DatasetSource, training_source, validate
from surefoot.losses.preference import LossEntry, PreferenceLoss, next_shift
from surefoot.types import Algorithm, BatchRef, Clock, EngineSpec, Head, Kit, Metrics, Objective, Poll, Reader, Writer


class PreferenceLossConfig(Section):
    """One loss of the mix, by its name in `surefoot/losses/pairs.py`. What is left out has the loss's own default; an
    option that the loss does not read is an error."""

    name: str
    weight: PositiveReal = 1.0
    beta: PositiveReal | None = None
    label_smoothing: Real | None = None
    discopop_tau: PositiveReal | None = None


class SyncConfig(Section):
    """TR-DPO (arXiv:2404.09656): every `period` steps, reference ← `mixup` · policy + (1 − `mixup`) · reference."""

    period: PositiveInt
    mixup: Annotated[Real, Field(gt=0, le=1)] = 0.6


class DPOConfig(AlgorithmConfig):
    """Which losses are minimised, and against what.

    Attributes:
        losses: with their weights; default: `sigmoid` alone, the DPO of the first paper.
        preset: "mpo" in place of `losses`: 0.8 sigmoid + 0.2 bco_pair + 1.0 sft (arXiv:2411.10442).
        beta: of each loss that reads one and sets none itself; default: 0.1.
        reference: "frozen": the policy as it was before training; under `policy.lora` that is the same model with its
            adapter off, else a second one in memory. "precomputed": its log-probs of all rows are computed before the
            first step, so that there is no second model. "none": log-probs under the reference count as 0.
        reference_model: the folder of another model to be the reference; its tokenizer must be the policy's.
        reference_cache: where precomputed log-probs are kept; default: surefoot/reference_logprobs in ~/.cache.
        sync_reference: how the reference follows the policy, if it does.
        length_average: log-probs of an answer are divided by its tokens.
        ld_alpha: how much tokens beyond the pair's shorter answer count, from 0 to 1 (LD-DPO).
        wpo: weight pairs by how likely they are under the policy (WPO).
        val_batch_size: rows of one validation batch, two to a pair; it changes speed and memory, and a result only with
            aot and aot_unpaired, which sort the pairs of a batch.
    """

    places: ClassVar[tuple[str, ...]] = ("reference_model", "reference_cache")

    losses: list[PreferenceLossConfig] = Field(default=[])
    preset: Literal["mpo"] | None = None
    beta: PositiveReal | None = None
    reference: Literal["frozen", "precomputed", "none"] = "frozen"
    reference_model: Place | None = None
    reference_cache: Place | None = None
    sync_reference: SyncConfig | None = None
    length_average: bool = False
    ld_alpha: Annotated[Real, Field(ge=0, le=1)] | None = None
    wpo: bool = False
    val_batch_size: RowsOfPairs = 32

    @model_validator(mode="after")
    def _options_fit(self) -> DPOConfig:
        need = {"reference_model": "frozen, precomputed", "reference_cache": "precomputed", "sync_reference": "frozen"}
        for key, kinds in need.items():
            if getattr(self, key) is not None and self.reference not in kinds:
                raise ValueError(f"{key} needs reference: {kinds}; found {self.reference}")
        self.loss()
        return self

    def check_run(self, run: RunConfig) -> None:
        if self.sync_reference is not None and run.policy.lora is not None:
            raise ValueError("dpo.sync_reference mixes whole models; under policy.lora only an adapter is trained")

    def loss(self) -> PreferenceLoss:
        """Raises `ConfigError` when a loss or an option cannot be used."""
        entries = [LossEntry(**entry.model_dump()) for entry in self.losses]
        whole = self.model_dump(include={"length_average", "ld_alpha", "wpo"})
        return PreferenceLoss.of(entries, self.preset, self.beta, reference=self.reference != "none", **whole)

    def measures(self) -> Sequence[str]:
        return self.loss().measures


class DPO(Algorithm):
    """Rows come as pairs, the reference's log-probs are added, one loss is minimised. Its state: BCO's shift, steps."""

    Config = DPOConfig
    config: DPOConfig
    rows = "pairs"

    def __init__(self, config: DPOConfig) -> None:
        super().__init__(config)
        self._loss, self._steps = config.loss(), 0

    def engines(self) -> Mapping[str, EngineSpec]:
        config, specs = self.config, {"policy": EngineSpec()}
        if config.reference != "none":
            specs["reference"] = EngineSpec(
                trained=False,
                model=config.reference_model,
                synced=config.sync_reference is not None,
                precomputed=Head() if config.reference == "precomputed" else None,
                cache=config.reference_cache,
            )
        return specs

    def source(self, kit: Kit) -> DatasetSource:
        return training_source(kit)

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        into = {"logprobs": "reference_logprobs"}
        return kit.engines["reference"].infer(ref, Head(), into) if self._loss.reference else ref

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        return [Objective("policy", Head(self._loss.outputs), self._loss)]

    def observe(self, metrics: Metrics, kit: Kit) -> None:
        self._steps += 1
        if "bco/mean_reward" in metrics:
            self._loss = replace(self._loss, shift=next_shift(self._loss.shift, metrics))
        sync = self.config.sync_reference
        if sync is not None and self._steps % sync.period == 0:
            policy = kit.engines["policy"].weights()
            for name, tensor in kit.engines["reference"].weights().items():
                tensor.lerp_(policy[name], sync.mixup)

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """The loss, its parts, rewards, accuracy and log-probs, on each set and over all of them."""
        policy, (objective,) = kit.engines["policy"], self.objectives(Clock())
        rows = self.config.val_batch_size
        found = validate(kit, poll, rows, lambda batch: policy.evaluate(self.enrich(batch, kit), objective))
        return self._loss.with_totals(found)

    def snapshot(self) -> Writer:
        state = {"shift": self._loss.shift, "steps": self._steps}
        return lambda sink: sink.json("dpo.json", state)

    def restore(self, reader: Reader) -> None:
        state = reader.json("dpo.json")
        self._loss, self._steps = replace(self._loss, shift=float(state["shift"])), int(state["steps"])
