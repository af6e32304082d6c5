"""Finds the reward model in a checkpoint or a plain folder. Whether it is one shows before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from surefoot.checkpoint import Arena
from surefoot.checkpoint.reader import LocalReader
from surefoot.checkpoint.verify import open_verified
from surefoot.config import DataConfig, DatasetConfig, EngineConfig, TokenizerConfig
from surefoot.config_file import load_config
from surefoot.engine import models
from surefoot.engine.local import LocalEngine
from surefoot.errors import ModelError
from surefoot.types import DataPlane


@dataclass(frozen=True)
class RewardModel:
    """One that was found to be a reward model by its small files; its weights are not read yet.

    Attributes:
        policy: the model, and how it is run.
        data: how rows become tokens.
        seed: of the run that trained it, if that is known.
        checkpoint: a reader of the part of it that holds the model; `None` for a plain folder.
    """

    policy: EngineConfig
    data: DataConfig
    seed: int = 0
    checkpoint: LocalReader | None = None

    def tokenizer(self, chat_template: str | None) -> Any:
        """Raises `ModelError` when tokenizer or template cannot be found or loaded."""
        if self.checkpoint is None or chat_template is not None:
            name = str(self.policy.model_name if self.checkpoint is None else self.checkpoint.local("weights"))
            section = TokenizerConfig(name=name, chat_template=chat_template)
            return models.load_tokenizer(self.policy.model_copy(update={"tokenizer": section}))
        return models.load_tokenizer_from_checkpoint(self.checkpoint)

    def engine(self, tokenizer: Any, plane: DataPlane) -> LocalEngine:
        """The frozen model, an adapter added to its base. Raises `ModelError`, or `CheckpointError`, when the weights
        cannot be loaded."""
        if self.checkpoint is None:
            loaded = models.load(self.policy, tokenizer=tokenizer, seed=self.seed, kind="scalar")
        else:
            loaded = models.load_from_checkpoint(self.checkpoint, self.policy, tokenizer, seed=self.seed, kind="scalar")
        if loaded.adapter is not None:
            loaded = models.merged(loaded)
        return LocalEngine(loaded.model, loaded.files, self.policy, plane, Arena(), seed=self.seed, trained=False)


def find(model: Path, source: DatasetConfig, policy: dict[str, Any], data: dict[str, Any]) -> RewardModel:
    """The reward model in a checkpoint, its hashes checked, or in a plain folder.

    Args:
        policy, data: what is asked for in these sections, whatever a checkpoint's run says.

    Raises:
        ModelError: there is none.
        CorruptCheckpoint: the checkpoint is damaged.
    """
    if not model.is_dir():
        raise ModelError(f"there is no folder {model.absolute()}: expected a reward model's, or a checkpoint step_N")
    if (model / "manifest.json").is_file():
        return _in_checkpoint(model, {"train": source, "validation": {}, **data}, policy)
    return _in_folder(model, {"train": source, **data}, policy)


def _in_checkpoint(path: Path, data: dict[str, Any], policy: dict[str, Any]) -> RewardModel:
    reader = open_verified(path)
    run = load_config(reader.local("config.yaml"))
    part = reader.under("policy")
    if "weights/adapter_config.json" in part.files():
        task = part.json("weights/adapter_config.json").get("task_type")
        _require(task == "SEQ_CLS", path, "an adapter of a reward model", f"an adapter for {task}")
    else:
        _require_reward_model(path, part.local("weights"))
    section = run.policy.model_copy(update=policy)
    return RewardModel(section, run.data.model_copy(update=data), run.seed, part)


def _in_folder(path: Path, data: dict[str, Any], policy: dict[str, Any]) -> RewardModel:
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"{path} holds an adapter, not a whole model. Score with the checkpoint step_N that it is from, or make a "
            "whole model first: surefoot ckpt export step_N FOLDER --merge"
        )
    if not (path / "config.json").is_file():
        steps = sorted([*path.glob("step_*/manifest.json"), *path.glob("checkpoints/step_*/manifest.json")])
        hint = f"; it holds checkpoints, such as {steps[0].parent}" if steps else ""
        raise ModelError(f"{path} has no config.json: expected a reward model's folder, or a checkpoint step_N{hint}")
    section = EngineConfig(model_name=str(path), **{"max_total_sequence_length": 1, **policy})
    models.check_folder(section, "scalar")
    longest = _require_reward_model(path, path)
    if "max_total_sequence_length" not in policy:
        section = section.model_copy(update={"max_total_sequence_length": longest})
    return RewardModel(section, DataConfig(**data))


def _require_reward_model(named: Path, folder: Path) -> int:
    """The longest row that it reads, in tokens. Raises `ModelError` unless the folder's small files, and the names of
    its weights, are those of a model with one score."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = ", ".join(config.architectures or []) or config.model_type
    wanted = "a model for sequence classification with one label"
    _require("ForSequenceClassification" in kinds, named, wanted, f"a {kinds}")
    _require(config.num_labels == 1, named, wanted, f"one with {config.num_labels} labels")
    has_score = any("score" in name for file in folder.glob("*.safetensors") for name in _names_in(file))
    _require(has_score, named, wanted, "one whose score head is not in its file")
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise ModelError(f"{file} is malformed: {error}") from error


def _require(is_one: bool, path: Path, wanted: str, found: str) -> None:
    if not is_one:
        raise ModelError(f"{path} is no reward model: expected {wanted}, found {found}. Train one with algorithm: rm")
