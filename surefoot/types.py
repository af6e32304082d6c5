"""The records that travel and the protocols that parts keep. Imports nothing internal but the metrics.

Read this file first: the loop (`loop.py`) is written against it alone, and so is every algorithm.

Shapes are written as [rows, tokens, ...]. A *row* is one token sequence; a *group* is the rows that must stay together
(the two sides of a preference pair, the completions of one prompt). Rows of one group lie next to each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from surefoot.metrics import Metric as Metric
from surefoot.metrics import Metrics as Metrics
from surefoot.metrics import merge_metrics as merge_metrics

if TYPE_CHECKING:
    from torch import Tensor

# One entry per row. `Tensor` [rows]: one number per row. `list[Tensor]`: one tensor per row, its first dimension the
# row's own tokens, never padded. `list[str]`: text. Padding exists only inside an engine.
Column: TypeAlias = "Tensor | list[Tensor] | list[str]"
Columns: TypeAlias = "Mapping[str, Column]"
Poll: TypeAlias = Callable[[], None]
Rows: TypeAlias = Literal["sequences", "pairs", "prompts"]  # what the rows of an algorithm's data sets are


# ------------------------------------------------------------------------------------------------- checkpointed parts


@runtime_checkable
class Sink(Protocol):
    """One checkpoint being written. Whatever passes through it is hashed from memory, synced and put in the manifest.

    Paths are relative, with forward slashes, inside the part's own folder.
    """

    def json(self, path: str, value: Any) -> None: ...

    def bytes(self, path: str, data: bytes) -> None: ...

    def tensors(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file. Raises `NonFiniteError`, naming the tensor, when a value is NaN or infinite."""

    def stream(self, path: str) -> AbstractContextManager[BinaryIO]: ...

    def local(self, path: str) -> Path:
        """Where a third party may write a file itself, to be taken in with `adopt`. Parent folders are made."""

    def adopt(self, path: str) -> None:
        """Take in a file that a third party wrote at `local(path)`: hash it, sync it, list it."""

    def under(self, folder: str) -> Sink: ...


@runtime_checkable
class Reader(Protocol):
    """One verified checkpoint. Hashes are checked as files are read; a mismatch raises `CorruptCheckpoint`."""

    def json(self, path: str) -> Any: ...

    def bytes(self, path: str) -> bytes: ...

    def tensors(self, path: str) -> dict[str, Tensor]: ...

    def files(self) -> tuple[str, ...]:
        """Every file below this reader's folder, sorted, relative to it."""

    def local(self, path: str = "") -> Path:
        """A file or folder on the local disk whose hashes have been checked."""

    def under(self, folder: str) -> Reader: ...


Writer: TypeAlias = Callable[[Sink], None]


class Saveable(Protocol):
    """A part of the run's state. All parts settle before any is captured."""

    def settle(self) -> None:
        """Finish what is in flight, so that `snapshot` sees a state that a resumed run can continue exactly."""

    def snapshot(self) -> Writer:
        """Capture the state now, cheaply. The writer returned runs in the background, once, with a sink of the part's
        own folder, and must not look at live state."""

    def restore(self, reader: Reader) -> None: ...


class Stager(Protocol):
    """Where tensors are captured so that training may go on while they are written."""

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and prefault room for these tensors, before the first step."""

    def capture(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy the tensors now. Valid until the next `capture`. Raises `RuntimeError` inside a `draining` block."""

    def draining(self) -> AbstractContextManager[None]:
        """Held by the writer while it reads what was captured."""


class Cache(Protocol):
    """Tensors on disk that outlive the run. All follow from one key: what came of other things is not here."""

    def read(self, name: str) -> dict[str, Tensor] | None:
        """What `write` wrote under this name, bit for bit, or `None`."""

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write all of it or nothing. Raises `StorageFailed` when it cannot be written."""


@dataclass(frozen=True, slots=True)
class SaveEvent:
    """What the checkpoint manager tells the reports. May come from the background thread."""

    kind: Literal["writing", "finished", "failed", "pruned"]
    step: int
    path: str
    seconds: float = 0.0
    num_bytes: int = 0
    message: str = ""


# ---------------------------------------------------------------------------------------------------- data in motion


@dataclass(frozen=True, slots=True)
class BatchRef:
    """The receipt for rows that lie in a `DataPlane`. Stages add columns; nothing else changes.

    Attributes:
        ids: "<group>_g<i>", minted once, when the row is born.
        groups: identity of each row's group, never its text; "e<epoch>_d<draw>" for dataset rows.
        lengths: tokens of each row.
        versions: weight version each row was sampled with; 0 for dataset rows.
        fields: names of the columns present for all rows.
    """

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    lengths: tuple[int, ...]
    versions: tuple[int, ...]
    fields: frozenset[str]

    def __len__(self) -> int:
        return len(self.ids)

    def with_fields(self, names: Iterable[str]) -> BatchRef:
        return BatchRef(self.ids, self.groups, self.lengths, self.versions, self.fields | frozenset(names))

    def rows(self, start: int, stop: int) -> BatchRef:
        cut = slice(start, stop)
        return BatchRef(self.ids[cut], self.groups[cut], self.lengths[cut], self.versions[cut], self.fields)


class DataPlane(Saveable, Protocol):
    """Holds the columns. In memory by default."""

    def put(self, ref: BatchRef, columns: Columns) -> BatchRef:
        """Store one entry per row of `ref` in every column. Returns the receipt with the new names.

        Raises:
            ValueError: a column has another number of rows than `ref`.
        """

    def get(self, ref: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """The named columns of these rows, in the receipt's order.

        Raises:
            KeyError: a column is missing for a row; names both.
        """

    def drop(self, ref: BatchRef) -> None: ...


@dataclass
class Clock:
    """How far the run is. A `Saveable`, written as one small JSON file.

    Attributes:
        step: turns of the loop done.
        version: version of the weights last published; counts steps.
        epoch: passes over the training data begun, from 0.
        rows, tokens: trained so far, in total.
        validated: the last step whose validation is done; -1 before the first.
    """

    step: int = 0
    version: int = 0
    epoch: int = 0
    rows: int = 0
    tokens: int = 0
    validated: int = -1

    def advance(self, batch: BatchRef, epoch: int) -> None:
        self.step += 1
        self.version = self.step
        self.epoch = epoch
        self.rows += len(batch)
        self.tokens += sum(batch.lengths)

    def settle(self) -> None:
        pass

    def snapshot(self) -> Writer:
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return lambda sink: sink.json("clock.json", state)

    def restore(self, reader: Reader) -> None:
        for name, value in reader.json("clock.json").items():
            setattr(self, name, int(value))


class Source(Saveable, Protocol):
    """Where batches come from: dataset rows, or finished rollouts. All randomness is a function of the seed and the
    position, so the state to save is small."""

    @property
    def epoch(self) -> int:
        """Passes over the data begun, from 0, at the last row handed out."""

    @property
    def exhausted(self) -> str:
        """Why there are no more rows, in words, with counts; empty as long as there may be some."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps that one pass over the data gives; `None` where it cannot be known."""

    @property
    def metrics(self) -> Metrics:
        """What the last `take` measured of its rows; nothing where they only come out of a file."""

    def take(self, clock: Clock, poll: Poll) -> BatchRef | None:
        """The next step's rows, or `None` when there are no more. A wait calls `poll` often; when `poll` raises, the
        position stays where it was."""

    def retire(self, ref: BatchRef, live: Future[int]) -> None:
        """The rows are trained: drop them. `live` yields the weight version that the generators now run."""

    def close(self) -> None:
        """End what the source started. Safe to call twice."""


# ----------------------------------------------------------------------------------------------------------- engines


class TokenFunction(Protocol):
    """A pure function of each token's whole distribution, which is too large to be kept: the engine applies it to a
    chunk of tokens at a time, and again in the backward pass, so that only what it returns stays in memory.

    Attributes:
        fields: names of the columns [rows, tokens, ...] that it reads.
        outputs: names of what it returns, which the engine's outputs then hold as [rows, tokens, ...].
    """

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """
        Args:
            logprobs: [n, vocabulary], what predicts each of n tokens, at the head's temperature; in no certain order.
            columns: the same tokens' entries [n, ...] of `fields`.

        Returns:
            [n, ...] for each of `outputs`.
        """


@dataclass(frozen=True, slots=True)
class Head:
    """What the model is to put out for each row.

    Token outputs are aligned with the row's tokens: `logprobs[r, t]` is log p(token t | tokens < t), and entry 0, which
    nothing predicts, is 0.

    Attributes:
        outputs: any of "logprobs", "entropy", "log_sum_sq_probs" (log Σ p² over the vocabulary), "topk", "logits",
            "hidden", "scalar". "topk" gives `topk_ids` and `topk_logprobs` [rows, tokens, k], the likeliest first, and
            `topk_rest` [rows, tokens], the log of the probability outside of these, -1e4 where that is none; "logits"
            [rows, tokens, vocabulary]; "hidden" [rows, tokens, width] what `Engine.vocabulary_logprobs` reads; "scalar"
            needs a model with one label and gives one number per token.
        temperature: logits are divided by it.
        k: for "topk".
        inputs: name of the column of token ids to read.
        mask: name of a column [tokens]: token outputs are computed where it is not 0, and are 0 elsewhere. A loss that
            reads `loss_mask` masks by it in any case.
        known_only: ids that the tokenizer lacks, with which vocabularies are padded, have no probability: "logits" and
            distributions end with the tokenizer's highest id. Ids beyond it must not be targets.
        function: its outputs are put out too.
    """

    outputs: tuple[str, ...] = ("logprobs",)
    temperature: float = 1.0
    k: int = 0
    inputs: str = "input_ids"
    mask: str | None = None
    known_only: bool = False
    function: TokenFunction | None = field(default=None, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that is put out."""
        own = (("topk_ids", "topk_logprobs", "topk_rest") if name == "topk" else (name,) for name in self.outputs)
        return sum(own, ()) + (() if self.function is None else self.function.outputs)


class Loss(Protocol):
    """A pure function from a model's outputs and the rows' columns to a number to minimise.

    Reductions divide by `norm`, which is `counts` summed over **all rows of one optimizer step**, so the gradient does
    not depend on how the rows were split, padded or packed. Columns come as tensors, token columns padded with zeros
    on the right to [rows, tokens, ...]. The engine adds `attention_mask` [rows, tokens], 1 on the rows' own tokens.

    Attributes:
        fields: names of the columns read, besides `attention_mask`.
        whole_step: the loss is no sum over groups (it sorts, for example): it must see all rows of an optimizer step
            at once. The engine then runs the model twice, first for the outputs alone.
    """

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def whole_step(self) -> bool: ...

    def counts(self, columns: Mapping[str, Tensor]) -> dict[str, float]: ...

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], *, norm: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]: ...


@dataclass(frozen=True)
class Objective:
    """One thing to train (or to measure): which engine, on what outputs, by which loss, how often.

    Attributes:
        epochs: passes over the step's rows.
        minibatch_rows: rows of one optimizer step; `None`: all rows of the step.
    """

    engine: str
    head: Head
    loss: Loss
    epochs: int = 1
    minibatch_rows: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that an algorithm needs.

    Attributes:
        kind: "causal_lm", or "scalar" for one number per token (reward and value models).
        section: of the configuration: which model it is, how it is run and trained.
        trained: a frozen engine has no optimizer and is not captured; its fingerprint is.
        base_of: a frozen engine is the named engine's model as it was before training: with LoRA a view of the same
            model with its adapter off, else a second one.
        model: a frozen engine's own folder, in place of that. Its tokenizer must be the policy's, or:
        own_tokenizer: it reads with its folder's tokenizer (`Kit.tokenizers`), whatever that is, rows that are made for
            it.
        max_length: tokens of a row of its own; default: the policy's.
        synced: an engine that is not trained, yet changed: it is captured and restored like a trained one.
        precomputed: what a frozen engine puts out on all rows of the data sets by this head is computed before the
            first step, kept in the folder `cache`, and looked up: the model is in memory for that time at most.
        samples: a copy of a frozen engine's model answers prompts too, under the engine's name (`kit.rollouts`).
    """

    kind: Literal["causal_lm", "scalar"] = "causal_lm"
    section: str = "policy"
    trained: bool = True
    base_of: str = "policy"
    model: str | None = None
    own_tokenizer: bool = False
    max_length: int | None = None
    synced: bool = False
    precomputed: Head | None = None
    cache: str | None = None
    samples: bool = False


class Engine(Saveable, Protocol):
    """A model, and its optimizer if it is trained. Splits rows by group into micro-batches, pads them, runs them."""

    def infer(self, ref: BatchRef, head: Head, into: Mapping[str, str]) -> BatchRef:
        """Run the model without gradients and store its outputs as columns; `into` maps output to column name."""

    def train(self, ref: BatchRef, objective: Objective) -> Metrics:
        """One or several optimizer steps on these rows. Adds `grad_norm`, `lr` and `optimizer_steps` to the loss's
        own metrics.

        Raises:
            NonFiniteError: a loss or a gradient norm is NaN or infinite; the weights are as before that optimizer step.
        """

    def evaluate(self, ref: BatchRef, objective: Objective) -> Metrics:
        """The loss's metrics without gradients."""

    def vocabulary_logprobs(self, hidden: Tensor, head: Head) -> Tensor:
        """From what this engine put out as "hidden" to log-probs [..., vocabulary], without gradients, by the head's
        temperature and `known_only`. So a loss compares whole distributions with nothing but hidden states in between.

        Raises:
            ValueError: the model is not in this process: take "topk".
        """

    def weights(self) -> Mapping[str, Tensor]:
        """The live weights by their names in a Hugging Face folder, tied ones once; those of the whole model, with an
        adapter merged in."""

    def assign(self, weights: Mapping[str, Tensor]) -> None: ...


# -------------------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `top_k` 0, `top_p` 1 and `min_p` 0 are off; they apply in this order, after the temperature.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k most likely tokens.
        top_p: only the most likely tokens whose probabilities first add up to `top_p`.
        min_p: only tokens at least `min_p` times as likely as the most likely one.
        stop_ids: tokens that end the completion, as its last.
        stop: texts that end the completion, after the token that completes one.
        ban_ids: tokens that are never drawn; for benchmarks, since the engines' log-probs know nothing of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ban_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled tokens, the log-prob of each under the distribution it was drawn from, and the weights that drew it.

    That distribution is the model's at the temperature, over its whole vocabulary; with top-k, top-p, min-p or bans it
    is the truncated one, renormalised. A greedy token is not drawn: its log-prob is the model's at temperature 1.

    Attributes:
        ids: with the token that ended it, where one did.
        finish_reason: "length" at `max_new_tokens` or at the longest sequence that the generator takes.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    version: int


class Generator(Protocol):
    """Token ids in, token ids out. The sample's randomness follows from (seed, group, index) alone: the turns of one
    conversation need a group's name, or a seed, each of their own."""

    @property
    def version(self) -> int:
        """Of the weights now sampled with; 0 before the first `assign`."""

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, group: str, index: int, sampling: Sampling, session: str | None
    ) -> Completion:
        """Calls made together run together. `session` names what belongs together, for generators that are several.

        Raises:
            DataError: the prompt is empty, too long, or has ids that the model lacks.
            ConfigError: a sampling setting is out of range.
        """

    def assign(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights, by the names of the model's Hugging Face folder. Raises `ModelError` if they do not fit."""

    def weights_checksum(self) -> str:
        """Of all weights, to prove that they arrived."""

    def close(self) -> None:
        """End what was started. Safe to call twice."""


class WeightSync(Protocol):
    """Carries weights from the engine that trains to the generators."""

    def publish(self, weights: Callable[[], Mapping[str, Tensor]], version: int) -> Future[int]:
        """Start the transfer; the future yields the version that the generators run when it is done."""


# -------------------------------------------------------------------------------------------------------- algorithms


@dataclass(frozen=True)
class Kit:
    """What `build` hands an algorithm.

    Attributes:
        config: the whole run's configuration, a `surefoot.config.RunConfig`.
        tokenizer: a Hugging Face tokenizer.
        train_data: the prepared training set, a `surefoot.data.Dataset`; likewise `validation_data` by set name.
        engines: by the names that `Algorithm.engines` asked for.
        rollouts: a `surefoot.rollout.Rollouts`, which samples and scores completions, where rows are prompts.
        phase: times a part of a step under a name, as the report's does.
        record: shows and keeps a step's rollouts, by columns.
        tokenizers: of engines that have their own, by the engines' names.
    """

    config: Any
    tokenizer: Any
    train_data: Any
    validation_data: Mapping[str, Any]
    engines: Mapping[str, Engine]
    plane: DataPlane
    rollouts: Any = None
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    record: Callable[[int, Columns], None] = lambda step, columns: None
    tokenizers: Mapping[str, Any] = field(default_factory=dict)


class Algorithm(ABC):
    """A training method: the engines it needs, the source of its rows, the columns it adds, what it minimises.

    A new algorithm is one file with one subclass. Only `objectives` and `source` must be written; the rest does nothing
    until overridden. Running state (an adaptive coefficient, a shift) is changed in `observe` alone and saved through
    `snapshot` and `restore`.

    Attributes:
        rows: what the rows of the data sets are: texts to learn, preferences, or prompts to answer.
        run_config: of the whole run, a subclass of `surefoot.config.RunConfig` where that has further sections.
        metrics: what `enrich` measured of the step's rows.
        optimizer_steps_per_step: of an engine that is trained in it, with all its rows; known once `source` was called.
    """

    Config: ClassVar[type]
    rows: ClassVar[Rows] = "sequences"
    run_config: ClassVar[type | None] = None

    def __init__(self, config: Any) -> None:
        self.config = config
        self.metrics: Metrics = {}
        self.optimizer_steps_per_step = 1

    def engines(self) -> Mapping[str, EngineSpec]:
        return {"policy": EngineSpec()}

    @abstractmethod
    def source(self, kit: Kit) -> Source: ...

    @abstractmethod
    def objectives(self, clock: Clock) -> Sequence[Objective]: ...

    def optimizer_steps(self, engine: str, steps: int) -> int:
        """That a trained engine does in so many steps from the run's start, each with all its rows; known once `source`
        was called."""
        return steps * self.optimizer_steps_per_step

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        """Add columns: reference log-probs, advantages, teacher top-k."""
        return ref

    def observe(self, metrics: Metrics, kit: Kit) -> None:
        """Update running state from the step's metrics."""

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """Measure on the validation sets: "<metric>" over all sets, "<set>/<metric>" for each. Calls `poll` often."""
        return {}

    def settle(self) -> None:
        pass

    def snapshot(self) -> Writer:
        return lambda sink: None

    def restore(self, reader: Reader) -> None:
        pass
