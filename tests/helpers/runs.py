"""Tiny real runs: real data files, a real tokenizer and model, the real command-line configuration.

`CASES` says what is run: each algorithm of `surefoot/algorithms` at least once, in each form whose state differs. The
contract, resume, fault, golden and torture tests run all of them; a new one is one line here.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from surefoot import build, loop
from surefoot.config import EngineConfig, RunConfig
from surefoot.config_file import load_algorithm, parse_config
from surefoot.demo import task
from surefoot.engine import models
from surefoot.run import Outcome, Run
from tests.helpers.tokenizer_kinds import pieces_of_sums

_LORA = {"lora": {"dim": 4, "dropout": 0.1}}
_GRPO = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
    "generation": {"max_new_tokens": 4, "num_slots": 4},
    "rewards": [{"name": "length", "target": 20, "unit": "characters"}, {"name": "exact_match"}],
}
_TEACHERS = [{"model": "FOLDER/teacher_1"}, {"model": "FOLDER/teacher_2", "weight": 3.0}]
_DISTILLATION = {
    "distillation": {"teachers": _TEACHERS[:1], "num_prompts_per_step": 4, "top_k": 3},
    "generation": {"max_new_tokens": 4, "num_slots": 4},
    "evaluation": {"num_prompts_per_batch": 4},
}
_OFFLINE = {"teachers": _TEACHERS[:1], "val_batch_size": 4}
_OTHER = {"model": "FOLDER/other", "max_total_sequence_length": 64}
_CROSS: dict[str, Any] = {
    "cross_tokenizer": {
        **{"teachers": [_OTHER], "num_prompts_per_step": 4, "top_k": 20, "cache": "FOLDER/cache"},
    },
    "generation": {"max_new_tokens": 4, "num_slots": 4},
    "evaluation": {"num_prompts_per_batch": 4},
}
_PPO = {key: section for key, section in _GRPO.items() if key != "grpo"}
_DPO = {"beta": 0.5, "val_batch_size": 4}

# Case -> the algorithm, and what its configuration has besides the common part; FOLDER is the project's.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"sft": {"val_batch_size": 4}}),
    "sft-lora": ("sft", {"sft": {"val_batch_size": 4}, "policy": _LORA}),
    "dpo": ("dpo", {"dpo": _DPO}),
    "dpo-lora": ("dpo", {"dpo": _DPO, "policy": _LORA}),
    "dpo-mpo": ("dpo", {"dpo": {**_DPO, "preset": "mpo"}}),
    "dpo-precomputed": ("dpo", {"dpo": {**_DPO, "reference": "precomputed", "reference_cache": "FOLDER/cache"}}),
    "dpo-sync": ("dpo", {"dpo": {**_DPO, "sync_reference": {"period": 2}}}),
    "rm": ("rm", {"rm": {"centring": 0.01, "val_batch_size": 4}}),
    "rm-lora": ("rm", {"rm": {"centring": 0.01, "val_batch_size": 4}, "policy": _LORA}),
    "grpo": ("grpo", _GRPO),
    "grpo-4-steps": (
        "grpo",
        {
            **_GRPO,
            "grpo": {**_GRPO["grpo"], "num_epochs_per_step": 2},
            "policy": {"train_global_batch_size": 2},
        },
    ),
    "distillation": ("distillation", _DISTILLATION),
    "distillation-mixed": (
        "distillation",
        {
            **_DISTILLATION,
            "distillation": {
                **{"teachers": _TEACHERS, "divergence": "jsd", "num_prompts_per_step": 4},
                **{"student_fraction": 0.5, "others": "teacher"},
            },
            "policy": _LORA,
        },
    ),
    "distillation-reward": (
        "distillation",
        {
            **_DISTILLATION,
            "distillation": {"teachers": _TEACHERS[:1], "num_prompts_per_step": 4, "loss": "reward"},
            "rewards": _GRPO["rewards"],
        },
    ),
    "distillation-offline": (
        "distillation_offline",
        {"distillation_offline": {**_OFFLINE, "top_k": 3, "precompute": True, "cache": "FOLDER/cache"}},
    ),
    "cross_tokenizer": ("cross_tokenizer", _CROSS),
    "cross_tokenizer-offline": (
        "cross_tokenizer",
        {
            **_CROSS,
            "cross_tokenizer": {
                **_CROSS["cross_tokenizer"],
                **{"teachers": [_OTHER, _TEACHERS[1]]},
                **{"student_fraction": 0, "loss": "projection", "ce_weight": 0.5, "ce_dynamic": True, "top_k": None},
            },
        },
    ),
    "ppo": ("ppo", {**_PPO, "ppo": {"num_prompts_per_step": 4}}),
    "ppo-4-steps": (
        "ppo",
        {
            **_PPO,
            "ppo": {
                "num_prompts_per_step": 4,
                "num_epochs_per_step": 2,
                "bootstrap_truncated": True,
                "reference_policy_kl_penalty": 0.1,
                "adaptive_kl": {"target": 0.01, "horizon": 20},
            },
            "policy": {"train_global_batch_size": 2},
        },
    ),
}

NUM_ROWS = 20


def write_project(folder: Path, *, case: str = "sft", num_rows: int = NUM_ROWS, num_heldout: int = 6) -> Path:
    """Data, a tokenizer and `config.yaml` in `folder`; returns the configuration's path. Of preferences, two rows are
    one line of the file."""
    algorithm, extra = CASES[case]
    size = 2 if load_algorithm(algorithm).rows == "pairs" else 1
    task.write_dataset(folder / "train.jsonl", folder / "heldout.jsonl", 0, num_rows // size, num_heldout // size)
    task.train_tokenizer(task.read_rows(folder / "train.jsonl"), folder / "tokenizer")
    for file in (folder / "train.jsonl", folder / "heldout.jsonl") if size == 2 else ():
        task.write_preferences(task.read_rows(file), file, 0)
    values = {
        "algorithm": algorithm,
        "run_dir": str(folder / "run"),
        "seed": 7,
        "max_num_steps": 6,
        "val_period": 2,
        "policy": {
            "model_init": {**task.model_init(hidden_size=16, num_layers=1), "intermediate_size": 32},
            "tokenizer": {"name": str(folder / "tokenizer")},
            "train_global_batch_size": 4,
            "train_micro_batch_size": 2,
            "max_total_sequence_length": 32,
            "num_threads": 1,
            "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
            "scheduler": {"name": "cosine", "warmup_steps": 2},
        },
        "data": {
            "train": {"path": str(folder / "train.jsonl")},
            "validation": {"heldout": {"path": str(folder / "heldout.jsonl")}},
        },
        "checkpointing": {"save_period": 2},
        "logger": {"progress": "off", "tensorboard": False},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(_merged(values, extra), sort_keys=False).replace("FOLDER", str(folder)))
    if algorithm.startswith(("distillation", "cross_tokenizer")):
        for number in (1, 2):
            write_model(folder / f"teacher_{number}", file, seed=number)
    if algorithm == "cross_tokenizer":
        pieces_of_sums().save_pretrained(folder / "pieces")
        write_model(folder / "other", file, seed=3, tokenizer=folder / "pieces")
    return file


def write_model(folder: Path, file: Path, *, seed: int, tokenizer: Path | None = None, **overrides: Any) -> None:
    """A model like the configuration's, of other random weights, as a folder with its tokenizer, or with another."""
    policy = yaml.safe_load(file.read_text())["policy"]
    init = {"model_init": {**policy["model_init"], "initializer_range": 0.3, **overrides}}
    named = {"tokenizer": {"name": str(tokenizer)}} if tokenizer is not None else {}
    section = EngineConfig.model_validate({**policy, **init, **named, "lora": None})
    loaded = models.load(section, tokenizer=models.load_tokenizer(section), seed=seed)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _merged(values: Any, extra: Any) -> Any:
    """`values` with what `extra` has, section by section."""
    if not (isinstance(values, dict) and isinstance(extra, dict)):
        return extra
    return {**values, **{key: _merged(values.get(key), value) for key, value in extra.items()}}


def config_of(file: Path, *overrides: str) -> RunConfig:
    return parse_config(yaml.safe_load(file.read_text()), overrides)


def started(file: Path, *overrides: str) -> Run:
    return build.start(config_of(file, *overrides), console=quiet())


def resumed(run_dir: Path, *overrides: str, **options: Any) -> Run:
    return build.resume(run_dir, overrides, console=quiet(), **options)


def trained(file: Path, *overrides: str) -> Outcome:
    return loop.train(started(file, *overrides))


def quiet() -> Console:
    return Console(file=io.StringIO())


def metric_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl without its timings: what must be the same bit for bit."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


def state_bytes(checkpoint: Path) -> dict[str, bytes]:
    """Every file that holds the state of training: of all parts but the report. Manifest, configuration and reports
    name their run: they differ."""
    files = (path for path in sorted(checkpoint.glob("*/**/*")) if path.is_file())
    names = {path.relative_to(checkpoint).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith("report/")}
