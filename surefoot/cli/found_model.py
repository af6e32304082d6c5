"""Finds the model in a checkpoint or a plain folder. Whether it is of the kind that is needed shows before its weights
are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from surefoot.checkpoint import Arena
from surefoot.checkpoint.reader import LocalReader
from surefoot.checkpoint.verify import open_verified
from surefoot.config import DataConfig, DatasetConfig, EngineConfig, RunConfig, TokenizerConfig
from surefoot.config_file import load_config
from surefoot.engine import models
from surefoot.engine.local import LocalEngine
from surefoot.errors import ModelError
from surefoot.types import DataPlane

Kind: TypeAlias = Literal["causal_lm", "scalar"]
_NAMES = {"causal_lm": "a language model", "scalar": "a reward model"}
_TASKS = {"causal_lm": "CAUSAL_LM", "scalar": "SEQ_CLS"}


@dataclass(frozen=True)
class FoundModel:
    """One that was found to be of its kind by its small files; its weights are not read yet.

    Attributes:
        policy: the model, and how it is run.
        data: how rows become tokens.
        run: that trained it, if that is known.
        checkpoint: a reader of the part of it that holds the model; `None` for a plain folder.
    """

    kind: Kind
    policy: EngineConfig
    data: DataConfig
    run: RunConfig | None = None
    checkpoint: LocalReader | None = None

    @property
    def seed(self) -> int:
        return self.run.seed if self.run is not None else 0

    def tokenizer(self, chat_template: str | None) -> Any:
        """Raises `ModelError` when tokenizer or template cannot be found or loaded."""
        if self.checkpoint is None or chat_template is not None:
            name = str(self.policy.model_name if self.checkpoint is None else self.checkpoint.local("weights"))
            section = TokenizerConfig(name=name, chat_template=chat_template)
            return models.load_tokenizer(self.policy.model_copy(update={"tokenizer": section}))
        return models.load_tokenizer_from_checkpoint(self.checkpoint)

    def load(self, tokenizer: Any) -> models.LoadedModel:
        """An adapter added to its base. Raises `ModelError` or `CheckpointError` when weights cannot be loaded."""
        if self.checkpoint is None:
            loaded = models.load(self.policy, tokenizer=tokenizer, seed=self.seed, kind=self.kind)
        else:
            loaded = models.load_from_checkpoint(
                self.checkpoint, self.policy, tokenizer, seed=self.seed, kind=self.kind
            )
        return loaded if loaded.adapter is None else models.merged(loaded)

    def engine(self, tokenizer: Any, plane: DataPlane) -> LocalEngine:
        """The frozen model. Raises as `load` does."""
        loaded = self.load(tokenizer)
        return LocalEngine(loaded.model, loaded.files, self.policy, plane, Arena(), seed=self.seed, trained=False)


def find(model: Path, source: DatasetConfig, policy: dict[str, Any], data: dict[str, Any], kind: Kind) -> FoundModel:
    """The model in a checkpoint, its hashes checked, or in a plain folder.

    Args:
        policy, data: what is asked for in these sections, whatever a checkpoint's run says; `model_name` is where the
            base of a checkpoint's adapter is now.

    Raises:
        ModelError: there is none of this kind.
        CorruptCheckpoint: the checkpoint is damaged.
    """
    if not model.is_dir():
        raise ModelError(f"there is no folder {model.absolute()}: expected {_NAMES[kind]}'s, or a checkpoint step_N")
    if (model / "manifest.json").is_file():
        return _in_checkpoint(model, {"train": source, "validation": {}, **data}, policy, kind)
    return _in_folder(model, {"train": source, **data}, policy, kind)


def _in_checkpoint(path: Path, data: dict[str, Any], policy: dict[str, Any], kind: Kind) -> FoundModel:
    reader = open_verified(path)
    run = load_config(reader.local("config.yaml"))
    update = {key: value for key, value in policy.items() if key != "model_name"}
    part, section = reader.under("policy"), run.policy.model_copy(update=update)
    if "weights/adapter_config.json" in part.files():
        task = part.json("weights/adapter_config.json").get("task_type")
        _require(task == _TASKS[kind], path, kind, f"an adapter of {_NAMES[kind]}", f"an adapter for {task}")
        section = on_base(section, policy.get("model_name"))
        models.check_base(section)
    else:
        _refuse_base(path, policy)
        longest, asked = _require_kind(path, part.local("weights"), kind), section.max_total_sequence_length
        if asked > longest:
            raise ModelError(
                f"max_total_sequence_length is {asked}, but {path} reads at most {longest} tokens: lower it"
            )
    return FoundModel(kind, section, run.data.model_copy(update=data), run, part)


def on_base(section: EngineConfig, base: str | None) -> EngineConfig:
    """The section of an adapter's model, whose base is now elsewhere, or still where it says.

    Raises:
        ModelError: there is no folder of a base, for its weights were drawn.
    """
    if base is None:
        return section
    if section.model_init is not None:
        raise ModelError(
            "--base: the base of this adapter is no folder, the run drew it from its seed: leave out --base"
        )
    return section.model_copy(update={"model_name": base})


def _refuse_base(path: Path, policy: dict[str, Any]) -> None:
    if "model_name" in policy:
        raise ModelError(f"--base: {path} holds a whole model, which needs no base: leave out --base")


def _in_folder(path: Path, data: dict[str, Any], policy: dict[str, Any], kind: Kind) -> FoundModel:
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{path} holds an adapter, not a whole model. Name the checkpoint step_N that it is from, or make a "
            "whole model first: surefoot ckpt export step_N FOLDER --merge"
        )
    if not (path / "config.json").is_file():
        steps = [file.parent for at in ("", "checkpoints/") for file in path.glob(f"{at}step_*/manifest.json")]
        newest = max(steps, key=lambda step: (len(step.name), step.name), default=None)
        hint = f"; it holds checkpoints, such as {newest}" if newest else ""
        raise ModelError(f"{path} has no config.json: expected {_NAMES[kind]}'s folder, or a checkpoint step_N{hint}")
    _refuse_base(path, policy)
    section = EngineConfig(model_name=str(path), **{"max_total_sequence_length": 1, **policy})
    models.check_folder(section, kind)
    longest = _require_kind(path, path, kind)
    if "max_total_sequence_length" not in policy:
        section = section.model_copy(update={"max_total_sequence_length": longest})
    return FoundModel(kind, section, DataConfig(**data))


def _require_kind(named: Path, folder: Path, kind: Kind) -> int:
    """The longest row that it reads, in tokens. Raises `ModelError` unless the folder's small files, and of a reward
    model the names of its weights, are those of such a model."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = ", ".join(config.architectures or []) or config.model_type
    classifies = "ForSequenceClassification" in kinds
    if kind == "causal_lm":
        _require(not classifies, named, kind, "a causal language model", f"a {kinds}")
    else:
        wanted = "a model for sequence classification with one label"
        _require(classifies, named, kind, wanted, f"a {kinds}")
        _require(config.num_labels == 1, named, kind, wanted, f"one with {config.num_labels} labels")
        has_score = any("score" in name for file in folder.glob("*.safetensors") for name in _names_in(file))
        _require(has_score, named, kind, wanted, "one whose score head is not in its file")
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise ModelError(f"{file} is malformed: {error}") from error


def _require(is_one: bool, path: Path, kind: Kind, wanted: str, found: str) -> None:
    if not is_one:
        how = {"causal_lm": "sft, dpo or grpo", "scalar": "rm"}[kind]
        no = _NAMES[kind].removeprefix("a ")
        raise ModelError(f"{path} is no {no}: expected {wanted}, found {found}. Train one with algorithm: {how}")
