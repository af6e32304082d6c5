"""The configuration: one strict YAML file per run.

Every section is a frozen pydantic model that refuses unknown keys, wrong types and values out of range. `load_config`
turns what is refused into one `ConfigError` that names each key's path, the value found, what was expected and the
nearest valid key. Loading reads no model and no data, so it fails before anything heavy starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _number_from_text(value: Any) -> Any:
    """YAML 1.1 reads `2e-5` as text, and quoted numbers are text by intention or by accident: both mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _finite(value: Any) -> Any:
    value = _number_from_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _whole_from_number(value: Any) -> Any:
    """`10.0`, `1e3` and `"10"` mean a whole number; `10.5` does not."""
    number = _number_from_text(value)
    return int(number) if isinstance(number, float) and number.is_integer() else value


def _off_from_yaml(value: Any) -> Any:
    """YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value


Real = Annotated[float, BeforeValidator(_finite)]
PositiveReal = Annotated[float, BeforeValidator(_finite), Field(gt=0)]
NonNegativeReal = Annotated[float, BeforeValidator(_finite), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_finite), Field(ge=0, lt=1)]
Share = Annotated[float, BeforeValidator(_finite), Field(ge=0, le=1)]
PositiveInt = Annotated[int, BeforeValidator(_whole_from_number), Field(gt=0)]
RowsOfPairs = Annotated[PositiveInt, Field(multiple_of=2)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole_from_number), Field(ge=0)]
Place = Annotated[str, Field(min_length=1)]  # a path or a hub name; an empty one would be the working directory


class Section(BaseModel):
    """Base of all sections: frozen, strict types, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class AlgorithmConfig(Section):
    """Base of an algorithm's own section. Its key in the file is the algorithm's name.

    `places` are keys of folders: they may change on a resume, for what lies there is compared by its content.
    """

    places: ClassVar[tuple[str, ...]] = ()

    def check_run(self, run: RunConfig) -> None:
        """What this section asks of the others. Raises `ValueError`."""

    def measures(self) -> Sequence[str]:
        """Names of what validation measures. Empty: they are not known, and `metric_name` is not checked."""
        return ()


# -------------------------------------------------------------------------------------------------------- the engine


class TokenizerConfig(Section):
    """`name`: folder or hub name; default: the model's own. `chat_template`: default the tokenizer's own; else a path
    to a Jinja file, or the Jinja text itself."""

    name: Place | None = None
    chat_template: str | None = None


LR_OF_LORA = 2e-4


class OptimizerConfig(Section):
    """AdamW, decoupled weight decay on matrices only (biases and norms are not decayed).

    Attributes:
        lr: with a section `lora` beside it the default is 2e-4: what trains whole models is hardly felt by an adapter.
    """

    name: Literal["adamw"] = "adamw"
    lr: PositiveReal = 1e-5
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveReal = 1e-8
    weight_decay: NonNegativeReal = 0.0


class SchedulerConfig(Section):
    """The learning rate as a function of the optimizer steps done: linear warm-up, then `name`.

    `decay_steps`: optimizer steps at which the decay ends; default: all that the run is to do. `min_lr_ratio`: where
    the decay ends, as a share of the full rate.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    min_lr_ratio: Share = 0.0

    @model_validator(mode="after")
    def _decays_after_the_warm_up(self) -> SchedulerConfig:
        if self.name == "constant" and (self.decay_steps is not None or self.min_lr_ratio):
            raise ValueError(
                "decay_steps and min_lr_ratio have no effect with name: constant; expected linear or cosine"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) must be above warmup_steps ({self.warmup_steps}): both count from "
                "the run's start"
            )
        return self


class LoraConfig(Section):
    """A low-rank adapter that is trained in place of the model's own weights, which stay as they are.

    Modules are named by patterns over their names or the ends of these: `q_proj`, `layers.[0-3].*`, `lm_head`. A
    pattern that matches nothing is an error. Tied embeddings are adapted each by itself.

    Attributes:
        dim: the rank, at most the smaller side of each layer. The adapter's product is scaled by `alpha` / `dim`.
        target_modules: what is adapted: linear layers and embeddings; "all-linear": every linear layer but the head.
        exclude_modules: which of these stay frozen after all, for example whole layers.
        modules_to_save: trained in full beside the adapter and saved with it: embeddings, norms, the head.
    """

    dim: PositiveInt = 16
    alpha: PositiveReal = 32.0
    dropout: Fraction = 0.0
    target_modules: Annotated[list[str], Field(min_length=1)] = ["all-linear"]
    exclude_modules: list[str] = []
    modules_to_save: list[str] = []


class ModelConfig(Section):
    """A model and how it is trained.

    Exactly one of `model_name` (a local folder or a hub name) and `model_init` (a Transformers configuration with its
    `model_type`, for random weights drawn from the run's seed) is given.

    Attributes:
        train_micro_batch_size: rows in memory at a time; it changes speed and memory, never the result.
        precision: bfloat16 computes in autocast; weights and optimizer stay float32.
    """

    model_name: Place | None = None
    model_init: dict[str, Any] | None = None
    train_micro_batch_size: PositiveInt = 4
    precision: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None
    max_grad_norm: PositiveReal | None = 1.0
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @model_validator(mode="before")
    @classmethod
    def _an_adapter_has_a_rate_of_its_own(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("lora") is not None:
            optimizer = values.get("optimizer", {})
            if isinstance(optimizer, Mapping):
                return {**values, "optimizer": {"lr": LR_OF_LORA, **optimizer}}
        return values

    @model_validator(mode="after")
    def _one_model(self) -> ModelConfig:
        if (self.model_name is None) == (self.model_init is None):
            found = "neither" if self.model_name is None else "both"
            raise ValueError(f"expected exactly one of model_name and model_init, found {found}")
        if self.model_init is not None and "model_type" not in self.model_init:
            raise ValueError("model_init needs model_type (such as llama)")
        return self


class EngineConfig(ModelConfig):
    """The model that a run is about, how it is trained, and what a run has once, whatever other models are in it.

    Exactly one of `model_name` (a local folder or a hub name) and `model_init` (a Transformers configuration with its
    `model_type`, for random weights drawn from the run's seed) is given.

    Attributes:
        train_global_batch_size: rows per optimizer step, computed `train_micro_batch_size` at a time.
        max_total_sequence_length: in tokens; longer rows are cut.
        num_threads: default: PyTorch's choice. For a tiny model, or on a busy machine, 1 is often fastest.
    """

    tokenizer: TokenizerConfig = TokenizerConfig()
    train_global_batch_size: PositiveInt = 32
    max_total_sequence_length: PositiveInt = 512
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    num_threads: Annotated[PositiveInt, Field(le=1024)] | None = None

    @model_validator(mode="after")
    def _a_tokenizer_and_whole_batches(self) -> EngineConfig:
        if self.model_init is not None and self.tokenizer.name is None:
            raise ValueError("a model made from model_init needs tokenizer.name: there is no model to take one from")
        if self.train_global_batch_size % self.train_micro_batch_size:
            raise ValueError(
                f"train_global_batch_size ({self.train_global_batch_size}) must be a multiple of "
                f"train_micro_batch_size ({self.train_micro_batch_size})"
            )
        return self


# ---------------------------------------------------------------------------------------------------------- the data


class DatasetConfig(Section):
    """One data set.

    Attributes:
        path: a .jsonl, .json or .parquet file, a folder that `datasets` saved, or a hub name.
        split: for folders with several splits and for hub names.
        format: by the file's ending unless said. "environment": `max_rows` rows that the run's environment makes from
            the seed and `path`, which is then just a name.
        columns: our name -> the file's name, for example {prompt: question, completion: answer}.
        max_rows: the first rows only.
        on_bad_row: "error" stops before training and lists the rows; "skip" leaves them out and counts them.
    """

    path: Place
    split: str | None = None
    format: Literal["auto", "jsonl", "json", "parquet", "folder", "hub", "environment"] = "auto"
    columns: dict[str, str] = {}
    max_rows: PositiveInt | None = None
    on_bad_row: Literal["error", "skip"] = "error"


class DataConfig(Section):
    """The training set, the validation sets by name, and how rows become tokens.

    Attributes:
        train_on: which assistant turns carry loss: all, or the last.
        prompt_format: how string `prompt` + `completion` rows are rendered: "chat" as a user and an assistant turn of
            the chat template, "plain" joined as they stand with an end-of-sequence token, "auto" chat where the
            tokenizer has a template.
        system_prompt: put before each chat that has no system turn.
        fold_system: put the system turn's text at the start of the first user turn, for templates that refuse it.
        shuffle: a new order each epoch, a function of (seed, epoch); else file order.
        drop_last: drop an epoch's last short batch instead of training it.
        ranking: which of the ranked `completions` of a row are compared: the best with the worst, or each with all that
            rank below it.
        num_workers: tokenizing processes; 0: this one. The result does not depend on it.
    """

    train: DatasetConfig
    validation: dict[str, DatasetConfig] = {}
    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    system_prompt: str | None = None
    fold_system: bool = False
    ranking: Literal["best_worst", "all_pairs"] = "best_worst"
    shuffle: bool = True
    drop_last: bool = False
    num_workers: Annotated[NonNegativeInt, Field(le=256)] = 0

    @model_validator(mode="after")
    def _plain_names(self) -> DataConfig:
        for name in self.validation:
            if not re.fullmatch(r"[^\s/:]+", name):
                raise ValueError(
                    f"validation: expected a set's name without spaces, slashes and colons, found {name!r}"
                )
        return self


# -------------------------------------------------------------------------------------------------------- generation


class GenerationConfig(Section):
    """How completions are sampled from the policy.

    Attributes:
        backend: "torch" samples in this process, "vllm" with vLLM, in a process beside it.
        max_new_tokens: of one completion; prompts that leave less room in `policy.max_total_sequence_length` are
            dropped.
        temperature: log-probs are taken at it on every side. 0 takes the likeliest token, which only a validation may.
        top_k: sample among so many likeliest tokens; 0: off. Likewise `top_p`, off at 1, by the mass of the likeliest,
            and `min_p`, off at 0, by a share of the likeliest's probability.
        stop: texts that end a completion, besides the model's own end-of-turn tokens.
        num_slots: completions sampled at a time, at most.
        exact: a completion and its log-probs do not depend, in a single bit, on what else is being sampled. Without it
            sampling is a little faster, and a resumed run is not the straight one bit for bit. vLLM cannot do it.
        precision: of the sampler; default: the policy's. In bfloat16 its log-probs are not the trainer's: see
            `importance_sampling_correction`.
        kv_cache_gib: room for the keys and values of all running completions, with vLLM.
    """

    backend: Literal["torch", "vllm"] = "torch"
    max_new_tokens: PositiveInt = 128
    temperature: NonNegativeReal = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    min_p: Fraction = 0.0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    num_slots: PositiveInt = 64
    exact: bool = True
    precision: Literal["float32", "bfloat16"] | None = None
    kv_cache_gib: PositiveReal = 1.0

    def check(self, temperature: float) -> None:
        """Raises `ValueError` when the backend does not sample as told, or at this temperature."""
        if self.backend != "vllm":
            return
        if self.exact:
            raise ValueError(
                "generation.exact: with vLLM a completion depends, in its last bits, on what else is being sampled; "
                "set it to false, or generation.backend to torch"
            )
        reason = why_not_vllm(temperature, top_p=self.top_p, min_p=self.min_p)
        if reason:
            raise ValueError(f"generation.backend: vllm: {reason}")


def why_not_vllm(temperature: float, *, top_p: float, min_p: float) -> str:
    """In words, why vLLM would sample otherwise than told; empty if it does as told."""
    if temperature != 0 and not 0.01 <= temperature <= 2:
        return f"vLLM samples at temperatures from 0.01 to 2, or at 0, found {temperature:g}"
    if top_p < 1 and min_p > 0:
        return (
            f"vLLM applies min_p before top_p, and so samples from other tokens than those of top_p {top_p:g}, then "
            f"min_p {min_p:g}: set one of the two"
        )
    return ""


# ------------------------------------------------------------------------------------------------- checkpoints, views


class CheckpointingConfig(Section):
    """When to save and what to keep. A checkpoint survives if any rule keeps it.

    Attributes:
        checkpoint_dir: default `<run_dir>/checkpoints`.
        save_period: save at steps divisible by it; these are kept, all of them or the best `keep_top_k`.
        keep_top_k: by `metric_name`, or the newest where none is named; `None` keeps all.
        metric_name: `train:<m>`, `val:<m>` or `val:<set>/<m>`.
        ft_save_period: further saves in between for fault tolerance, of which the newest `ft_keep_latest_k` stay.
        checkpoint_must_save_by: DD:HH:MM:SS from the process's start; saves and stops in time.
        save_optimizer: without it a checkpoint can be loaded but not resumed.
        is_async: write in the background.
        rescue_dir: where to save the live state, synchronously, when a background save has failed.
    """

    enabled: bool = True
    checkpoint_dir: Place | None = None
    save_period: PositiveInt = 100
    keep_top_k: PositiveInt | None = None
    metric_name: str | None = None
    higher_is_better: bool = False
    ft_save_period: PositiveInt | None = None
    ft_keep_latest_k: PositiveInt = 1
    checkpoint_must_save_by: str | None = None
    save_optimizer: bool = True
    is_async: bool = True
    rescue_dir: Place | None = None

    @model_validator(mode="after")
    def _names_and_times(self) -> CheckpointingConfig:
        if self.metric_name is not None and not re.fullmatch(r"(train|val):\S+", self.metric_name):
            raise ValueError(
                f"metric_name: expected train:<metric>, val:<metric> or val:<set>/<metric>, found {self.metric_name!r}"
            )
        if self.checkpoint_must_save_by is not None:
            parse_duration_s(self.checkpoint_must_save_by)
        return self


def parse_duration_s(text: str) -> int:
    """Seconds in "DD:HH:MM:SS".

    >>> parse_duration_s("00:03:30:00")
    12600

    Raises:
        ValueError: the text has another form, or a part is out of range.
    """
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", text)
    days, hours, minutes, seconds = (int(part) for part in match.groups()) if match else (0, 99, 0, 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(f"checkpoint_must_save_by: expected DD:HH:MM:SS, such as 00:03:45:00, found {text!r}")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class LoggerConfig(Section):
    """Where metrics go besides `<run_dir>/metrics.jsonl`, which is always written.

    Attributes:
        progress: "auto" draws a live view on a terminal and prints plain lines elsewhere.
        log_period: steps between plain lines.
    """

    progress: Annotated[Literal["auto", "live", "plain", "off"], BeforeValidator(_off_from_yaml)] = "auto"
    log_period: PositiveInt = 1
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "surefoot"
    wandb_mode: Literal["online", "offline"] = "online"


# ------------------------------------------------------------------------------------------------------- the whole run


_METRIC_GROUPS = ("reward", "rewards", "logps", "loss", "scores", "bco")  # of metrics whose own names have a slash


class RunConfig(Section):
    """A whole run. The algorithm's own section, named by the algorithm, is added by `load_config`.

    Attributes:
        max_num_steps: the run ends at this step or after `max_num_epochs`, whichever comes first; one must be given.
        val_period: validate at steps divisible by it; 0: never.
    """

    algorithm: str
    run_dir: Place
    seed: NonNegativeInt = 42
    max_num_steps: PositiveInt | None = None
    max_num_epochs: PositiveInt | None = None
    val_period: NonNegativeInt = 0
    val_at_start: bool = False
    val_at_end: bool = False
    policy: EngineConfig
    data: DataConfig
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()

    @classmethod
    def further_models(cls) -> list[str]:
        """The sections of models beside the policy, which are the fields of type `ModelConfig`. A key that is left out
        in one is the policy's; a section in it, such as `optimizer`, is given as a whole."""
        return [name for name, info in cls.model_fields.items() if info.annotation is ModelConfig]

    def engine(self, section: str) -> EngineConfig:
        """All settings of the model in this section."""
        return self.policy if section == "policy" else self.policy.model_copy(update=dict(getattr(self, section)))

    @model_validator(mode="before")
    @classmethod
    def _further_models_are_like_the_policy(cls, values: Any) -> Any:
        for name in cls.further_models():
            policy, own = values.get("policy"), values.get(name, {})
            if isinstance(policy, Mapping) and isinstance(own, Mapping):
                shared = {key: value for key, value in policy.items() if key in ModelConfig.model_fields}
                if own.get("model_name") is not None or own.get("model_init") is not None:
                    shared |= {"model_name": None, "model_init": None}
                values = {**values, name: {**shared, **own}}
        return values

    @model_validator(mode="after")
    def _further_models_have_whole_batches(self) -> RunConfig:
        for name in self.further_models():
            rows, at_a_time = self.policy.train_global_batch_size, getattr(self, name).train_micro_batch_size
            if rows % at_a_time:
                raise ValueError(
                    f"policy.train_global_batch_size ({rows}) must be a multiple of {name}.train_micro_batch_size "
                    f"({at_a_time})"
                )
        return self

    @model_validator(mode="after")
    def _ends_and_measures(self) -> RunConfig:
        if self.max_num_steps is None and self.max_num_epochs is None:
            raise ValueError("max_num_steps: nothing says when the run ends; give it, max_num_epochs, or both")
        metric = self.checkpointing.metric_name or ""
        measures = self.val_period or self.val_at_start or self.val_at_end or metric.startswith("val:")
        if measures and not self.data.validation:
            raise ValueError("val_period, val_at_start, val_at_end and metric_name val:… need a set in data.validation")
        named, slash, _ = metric.removeprefix("val:").partition("/")
        known = {*self.data.validation, *_METRIC_GROUPS}
        if metric.startswith("val:") and slash and named not in known:
            sets = ", ".join(self.data.validation)
            raise ValueError(f"checkpointing.metric_name: there is no validation set {named!r}, only {sets}")
        return self
