"""The engine in this process: one model on one device, and its optimizer if it is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from surefoot.config import EngineConfig
from surefoot.engine.batching import MicroBatch, joined, micro_batches, optimizer_steps
from surefoot.engine.folder import WEIGHTS_FILE, by_name, weights_by_name
from surefoot.engine.frozen import BaseView, frozen_writer, require_same_base, require_same_frozen
from surefoot.engine.heads import ModelHead
from surefoot.engine.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_weights, base_weights, merged_weights
from surefoot.engine.models import resolve_device
from surefoot.engine.optimizer import Optimizer, copy_exactly
from surefoot.errors import ModelError, NonFiniteError, ResumeRefused
from surefoot.seeds import derive_seed
from surefoot.types import (
    BatchRef,
    Column,
    DataPlane,
    Head,
    Loss,
    Metric,
    Metrics,
    Objective,
    Reader,
    Sink,
    Stager,
    Writer,
    merge_metrics,
)
from surefoot.weights import fingerprint


class LocalEngine:
    """Weights are float32, always; `precision: bfloat16` runs the forward pass under autocast.

    Each micro-batch's dropout is drawn from (seed, optimizer step, micro-batch), so a resumed run repeats it. A loss
    that reads the column `loss_mask` is given token outputs on the tokens whose mask is not 0, and 0 elsewhere: the
    rest is never computed.

    With an adapter in the model, the engine's weights are the adapter's: what it trains, saves and restores. A
    checkpoint holds the fingerprint of the base beneath.

    Args:
        model: a Transformers model, from `surefoot.engine.models`. The engine moves it to its device.
        files: the small files of the folder that the model is saved as.
        stager: this engine's own.
        total_optimizer_steps: what the run is to do, if known; where a schedule decays that sets no `decay_steps`.
        save_optimizer: without it a checkpoint can be loaded and not resumed.
        trained: a frozen engine has no optimizer; its fingerprint is saved in place of its weights.
        synced: a frozen engine whose weights are assigned to or changed in place: they are saved.
        num_ids: the tokenizer's highest id and one more, for heads with `known_only`; `None`: all that the model has.
        section: the name of `config` in the run's configuration.
    """

    def __init__(
        self,
        model: Any,
        files: Mapping[str, bytes],
        config: EngineConfig,
        plane: DataPlane,
        stager: Stager,
        *,
        seed: int,
        total_optimizer_steps: int | None = None,
        save_optimizer: bool = True,
        trained: bool = True,
        synced: bool = False,
        num_ids: int | None = None,
        section: str = "policy",
    ) -> None:
        self.device = resolve_device(config.device)
        self.model = model.to(self.device).eval()  # all of it, as `_set_mode` asks the root alone
        self._files, self._config, self._plane, self._stager = dict(files), config, plane, stager
        self._seed, self._save_optimizer, self._captured = seed, save_optimizer, trained or synced
        self._adapted = ADAPTER_CONFIG in files
        self._weights_file = ADAPTER_WEIGHTS if self._adapted else WEIGHTS_FILE
        self._weights = adapter_weights(self.model) if self._adapted else weights_by_name(self.model)
        self._fingerprint: str | None = None
        self._head = ModelHead(self.model, num_ids)
        self._optimizer: Optimizer | None = None
        if not trained:
            if self._adapted:
                raise ValueError("a frozen engine takes no adapter: only a new one, not trained yet, could be put on")
            self.model.requires_grad_(False)
            return
        if config.gradient_checkpointing:
            if not self.model.supports_gradient_checkpointing:
                raise ModelError(
                    f"{type(model).__name__} has no gradient checkpointing: set gradient_checkpointing: false"
                )
            how = {"use_reentrant": False}
            if hasattr(self.model, "activation_checkpointing_enable"):
                self.model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
            else:  # its name in Transformers 5.19
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        self._optimizer = Optimizer(
            self.model,
            config.optimizer,
            config.scheduler,
            max_grad_norm=config.max_grad_norm,
            total_optimizer_steps=total_optimizer_steps,
            section=section,
        )

    # ------------------------------------------------------------------------------------------------ running

    def infer(self, ref: BatchRef, head: Head, into: Mapping[str, str]) -> BatchRef:
        """Outputs land on the CPU, one tensor per row, without padding."""
        fields = [head.inputs, *([head.mask] if head.mask else []), *(head.function.fields if head.function else ())]
        columns = self._plane.get(ref, list(dict.fromkeys(fields)))
        found: dict[str, list[Any]] = {output: [None] * len(ref) for output in into}
        self._set_mode(training=False)
        with torch.no_grad():
            for batch in self._cut(ref, columns, head):
                out = self._forward(batch, head, batch.columns[head.mask] if head.mask else None)
                for output, rows in found.items():
                    for place, length, values in zip(
                        batch.rows, batch.lengths.tolist(), out[output].cpu(), strict=True
                    ):
                        rows[place] = values[:length].clone()
        return self._plane.put(ref, {into[output]: rows for output, rows in found.items()})

    def evaluate(self, ref: BatchRef, objective: Objective) -> Metrics:
        batches, loss = self._batches(ref, objective), objective.loss
        norm = _norm(loss, batches)
        self._set_mode(training=False)
        with torch.no_grad():
            outputs = (self._forward(batch, objective.head, _wanted(loss, batch)) for batch in batches)
            if loss.whole_step:
                return loss(joined(list(outputs)), joined([batch.columns for batch in batches]), norm=norm)[1]
            return merge_metrics(
                loss(out, batch.columns, norm=norm)[1] for out, batch in zip(outputs, batches, strict=True)
            )

    def train(self, ref: BatchRef, objective: Objective) -> Metrics:
        """Besides `grad_norm` (before clipping), `lr` and `optimizer_steps` (done in the whole run), the metrics hold
        `skipped_optimizer_steps`: those whose rows had nothing to train on."""
        measured = []
        for _ in range(objective.epochs):
            for rows in optimizer_steps(ref, objective.minibatch_rows):
                measured.append(self._optimizer_step(rows, objective))
        return merge_metrics(measured)

    def _optimizer_step(self, ref: BatchRef, objective: Objective) -> Metrics:
        optimizer = self._trainable()
        batches = self._batches(ref, objective)
        norm = _norm(objective.loss, batches)
        skipped = bool(norm) and not any(norm.values())
        try:
            measured = self._backward(batches, objective, norm)
            grad_norm, lr = optimizer.grad_norm(), optimizer.lr
            if not math.isfinite(grad_norm):
                where = ", ".join(optimizer.bad_gradients()[:3]) or "none by itself, only their sum"
                raise self._not_finite("the gradient norm", grad_norm, ref.ids, f" (gradients: {where})")
            if not skipped:
                optimizer.step()
        finally:
            optimizer.zero_grad()
        own = {
            "grad_norm": Metric(grad_norm, weight=0.0 if skipped else 1.0),
            "lr": Metric(lr, reduce="last"),
            "optimizer_steps": Metric(float(optimizer.steps), reduce="last"),
            "skipped_optimizer_steps": Metric(float(skipped), reduce="sum"),
        }
        return {**merge_metrics(measured), **own}

    def _backward(
        self, batches: Sequence[MicroBatch], objective: Objective, norm: Mapping[str, float]
    ) -> list[Metrics]:
        self._set_mode(training=True)
        with self._random_state_kept():
            if objective.loss.whole_step and len(batches) > 1:
                return [self._backward_whole(batches, objective, norm)]
            measured: list[Metrics] = []
            for number, batch in enumerate(batches):
                out = self._train_forward(number, batch, objective)
                loss, metrics = objective.loss(out, batch.columns, norm=norm)
                self._check_loss(loss, batch.ids)
                loss.backward()  # type: ignore[no-untyped-call]
                measured.append(metrics)
            return measured

    def _backward_whole(
        self, batches: Sequence[MicroBatch], objective: Objective, norm: Mapping[str, float]
    ) -> Metrics:
        """For a loss that is no sum over groups. First all outputs, without gradients, and the loss on all of them at
        once; then each micro-batch again, back from the loss's gradient in its outputs. Both passes draw the same
        dropout."""
        with torch.no_grad():
            outputs = joined([self._train_forward(number, batch, objective) for number, batch in enumerate(batches)])
        leaves = {name: out.requires_grad_() for name, out in outputs.items() if out.is_floating_point()}
        loss, metrics = objective.loss(outputs, joined([batch.columns for batch in batches]), norm=norm)
        self._check_loss(loss, [row for batch in batches for row in batch.ids])
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        grads = {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
        start = 0
        for number, batch in enumerate(batches):
            out = self._train_forward(number, batch, objective)
            rows, tokens = slice(start, start + len(batch.rows)), slice(batch.input_ids.shape[1])
            torch.autograd.backward([out[name] for name in grads], [grad[rows, tokens] for grad in grads.values()])
            start = rows.stop
        return metrics

    def _train_forward(self, number: int, batch: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        self._draw_from(derive_seed(self._seed, "train", self._trainable().steps, number))
        return self._forward(batch, objective.head, _wanted(objective.loss, batch))

    def _check_loss(self, loss: Tensor, ids: Sequence[str]) -> None:
        if not torch.isfinite(loss):
            raise self._not_finite("the loss", float(loss.detach()), ids)

    def _forward(self, batch: MicroBatch, head: Head, wanted: Tensor | None = None) -> dict[str, Tensor]:
        bfloat16 = self._config.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            return self._head(batch.input_ids, batch.lengths, head, wanted, batch.columns)

    def _batches(self, ref: BatchRef, objective: Objective) -> list[MicroBatch]:
        function = objective.head.function
        fields = dict.fromkeys((objective.head.inputs, *objective.loss.fields, *(function.fields if function else ())))
        return self._cut(ref, self._plane.get(ref, list(fields)), objective.head)

    def _cut(self, ref: BatchRef, columns: Mapping[str, Column], head: Head) -> list[MicroBatch]:
        return micro_batches(ref, columns, head.inputs, self._config.train_micro_batch_size, self.device)

    def _set_mode(self, *, training: bool) -> None:
        """Walking all modules takes a while, so only when it changes something."""
        if self.model.training != training:
            self.model.train(training)

    def _random_state_kept(self) -> AbstractContextManager[None]:
        """Nothing outside sees that the global random state was used."""
        if self.device.type == "cpu":
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[self.device.index or 0], device_type=self.device.type)

    def _draw_from(self, seed: int) -> None:
        """Not `torch.manual_seed`: it seeds every other device too, and formats the stack for each that is absent."""
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def _trainable(self) -> Optimizer:
        if self._optimizer is None:
            raise ValueError("this engine is frozen: it cannot be trained")
        return self._optimizer

    def _not_finite(self, what: str, value: float, ids: Sequence[str], more: str = "") -> NonFiniteError:
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        return NonFiniteError(
            f"{what} is {value}{more} in optimizer step {self._trainable().steps + 1}, rows {shown}. The weights are "
            "as they were before that step. Lower the learning rate or look at these rows"
        )

    # ------------------------------------------------------------------------------------------------ weights, state

    @torch.no_grad()
    def vocabulary_logprobs(self, hidden: Tensor, head: Head) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bfloat16"):
            return self._head.logprobs(hidden.to(self.device), head)

    def weights(self) -> Mapping[str, Tensor]:
        """With an adapter: the whole model's, the adapter merged in, which are copies in part."""
        return by_name(self.model, merged_weights(self.model)) if self._adapted else dict(self._weights)

    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Raises `CheckpointError` when names, shapes or dtypes differ; then nothing was assigned."""
        copy_exactly(weights, self._weights, "what was assigned")
        if not self._adapted:
            self._fingerprint = None

    def base_view(self) -> BaseView:
        """The base beneath this engine's adapter as a frozen engine. Raises `ValueError` when there is no adapter."""
        if not self._adapted:
            raise ValueError("this engine has no adapter: its base is not there any more once it is trained")
        return BaseView(self)

    @property
    def frozen_fingerprint(self) -> str:
        """Of what is never trained: the base beneath an adapter, or a frozen engine's weights. Computed once, and again
        by `restore`: at a save it must not take time."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(base_weights(self.model) if self._adapted else self._weights)
        return self._fingerprint

    @property
    def state_bytes(self) -> int:
        """Size of what a snapshot captures: of a frozen engine nothing."""
        return sum(t.numel() * t.element_size() for t in self._state().values()) if self._captured else 0

    def warm(self) -> None:
        """Make room for captures and take the fingerprint of what is frozen, before the first step."""
        if self._captured:
            self._stager.warm(self._state())
        if self._adapted or not self._captured:
            _ = self.frozen_fingerprint

    def settle(self) -> None:
        pass

    def snapshot(self) -> Writer:
        if not self._captured:
            return frozen_writer(self.frozen_fingerprint)
        captured = self._stager.capture(self._state())
        description = self._optimizer.description() if self._optimizer is not None and self._save_optimizer else None
        base = {"name": self._base_name(), "weights": self.frozen_fingerprint} if self._adapted else None

        def write(sink: Sink) -> None:
            folder = sink.under("weights")
            for name, data in self._files.items():
                folder.bytes(name, data)
            with self._stager.draining():
                folder.tensors(self._weights_file, _part(captured, "weights/"), {"format": "pt"})
                if description is not None:
                    sink.tensors("optimizer/state.safetensors", _part(captured, "optimizer/"))
            if description is not None:
                sink.json("optimizer/state.json", description)
            if base is not None:
                sink.json("base.json", base)

        return write

    def restore(self, reader: Reader) -> None:
        """Raises `ResumeRefused` when the checkpoint has no optimizer state, or frozen weights are others."""
        self._fingerprint = None
        if not self._captured:
            require_same_frozen(reader, self.frozen_fingerprint)
            return
        if self._optimizer is not None and "optimizer/state.json" not in reader.files():
            raise ResumeRefused(
                "the checkpoint has no optimizer state (it was saved with checkpointing.save_optimizer: false): it can "
                "be loaded as a model, not resumed"
            )
        if self._adapted:
            require_same_base(reader, self.frozen_fingerprint)
        file = f"weights/{self._weights_file}"
        copy_exactly(reader.tensors(file), self._weights, file)
        if self._optimizer is not None:
            self._optimizer.restore(reader.json("optimizer/state.json"), reader.tensors("optimizer/state.safetensors"))

    def _state(self) -> dict[str, Tensor]:
        state = {f"weights/{name}": tensor for name, tensor in self._weights.items()}
        if self._optimizer is not None and self._save_optimizer:
            state |= {f"optimizer/{name}": tensor for name, tensor in self._optimizer.tensors().items()}
        return state

    def _base_name(self) -> str:
        return json.loads(self._files[ADAPTER_CONFIG])["base_model_name_or_path"] or "random weights (model_init)"


def _part(captured: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in captured.items() if name.startswith(prefix)}


def _norm(loss: Loss, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """The loss's counts over all rows of the optimizer step."""
    total: dict[str, float] = {}
    for batch in batches:
        for name, count in loss.counts(batch.columns).items():
            total[name] = total.get(name, 0.0) + count
    return total


def _wanted(loss: Loss, batch: MicroBatch) -> Tensor | None:
    return batch.columns["loss_mask"] if "loss_mask" in loss.fields else None
