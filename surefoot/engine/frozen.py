"""Models that are read and never trained: they leave a fingerprint in a checkpoint, in place of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.engine.lora import adapter_off, base_weights
from surefoot.errors import ResumeRefused
from surefoot.types import BatchRef, Head, Metrics, Objective, Reader, Writer

if TYPE_CHECKING:
    from surefoot.engine.local import LocalEngine


def frozen_writer(fingerprint: str) -> Writer:
    return lambda sink: sink.json("frozen.json", {"weights": fingerprint})


def require_same_frozen(reader: Reader, live: str) -> None:
    """Raises `ResumeRefused` when the checkpoint was made with other frozen weights."""
    saved = reader.json("frozen.json")["weights"]
    if saved != live:
        raise ResumeRefused(
            f"the frozen model's weights have the fingerprint {live}; the checkpoint's {saved}. Put the old model "
            "back, or start a new run"
        )


def require_same_base(reader: Reader, live: str) -> None:
    """Raises `ResumeRefused` when the checkpoint's adapter was trained on another base than the live one.

    Args:
        reader: of the engine's own folder.
    """
    saved = reader.json("base.json")
    if saved["weights"] != live:
        raise ResumeRefused(
            f"the adapter was trained on {saved['name']} with the weights' fingerprint {saved['weights']}; the base "
            f"that is there now has {live}. Put the old base back, or start a new run"
        )


class BaseView:
    """The model of another engine with its adapter off: a frozen `Engine` that takes no memory of its own."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def infer(self, ref: BatchRef, head: Head, into: Mapping[str, str]) -> BatchRef:
        with adapter_off(self._engine.model):
            return self._engine.infer(ref, head, into)

    def evaluate(self, ref: BatchRef, objective: Objective) -> Metrics:
        with adapter_off(self._engine.model):
            return self._engine.evaluate(ref, objective)

    def train(self, ref: BatchRef, objective: Objective) -> Metrics:
        raise ValueError("this engine is frozen: it cannot be trained")

    def vocabulary_logprobs(self, hidden: Tensor, head: Head) -> Tensor:
        with adapter_off(self._engine.model):
            return self._engine.vocabulary_logprobs(hidden, head)

    def weights(self) -> Mapping[str, Tensor]:
        return base_weights(self._engine.model)

    def assign(self, weights: Mapping[str, Tensor]) -> None:
        raise ValueError("this engine is a view of another one's base: nothing can be assigned to it")

    def settle(self) -> None:
        pass

    def snapshot(self) -> Writer:
        return frozen_writer(self._engine.frozen_fingerprint)

    def restore(self, reader: Reader) -> None:
        require_same_frozen(reader, self._engine.frozen_fingerprint)
