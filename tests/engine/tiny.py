"""Tiny models, and rows for them. No network, no files but those a test asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from surefoot.config import EngineConfig
from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine.local import LocalEngine
from surefoot.losses.supervised import NLL
from surefoot.types import BatchRef, Head, Objective
from tests.helpers.memory_store import CloningStager
from tests.helpers.tokenizers import words

NLL_OBJECTIVE = Objective("policy", Head(), NLL())
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLAMA = {**_SIZES, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 64}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "untied llama": {"model_type": "llama", **_LLAMA},
    "tied llama": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "tied qwen3": {"model_type": "qwen3", **_LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "renamed head": {"model_type": "gpt_neox", **_SIZES, "intermediate_size": 24, "max_position_embeddings": 64},
    "experts one by one": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2},
    "capped logits": {"model_type": "gemma2", **_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8},
    "scaled logits": {"model_type": "granite", **_LLAMA, "logits_scaling": 3.0},
}
VOCABULARY = [f"w{i}" for i in range(28)]
TOKENIZER = words(VOCABULARY)


def tokenizer_folder(path: Path, tokenizer: Any = TOKENIZER) -> Path:
    tokenizer.save_pretrained(path)
    return path


def base_folder(path: Path, name: str = "untied llama", tokenizer: Any = TOKENIZER, **settings: Any) -> Path:
    """A model's folder as a user has it, written by Transformers alone."""
    from transformers import AutoConfig

    init = {**ARCHITECTURES[name], **settings}
    init = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 3, **init}
    config = AutoConfig.for_model(**init)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def config(tmp_path: Path, name: str = "untied llama", **settings: Any) -> EngineConfig:
    """A configuration that draws random weights; its tokenizer is put into `tmp_path`."""
    folder = tokenizer_folder(tmp_path / "tokenizer")
    base = {
        "model_init": {**ARCHITECTURES[name], "initializer_range": 0.3},
        "tokenizer": {"name": str(folder)},
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "max_total_sequence_length": 32,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "device": "cpu",
    }
    return EngineConfig.model_validate({**base, **settings})


def engine(configuration: EngineConfig, *, double: bool = False, **options: Any) -> tuple[LocalEngine, MemoryPlane]:
    from surefoot.engine import models

    loaded = models.load(configuration, tokenizer=models.load_tokenizer(configuration), seed=7)
    if double:
        loaded.model.double()
    plane = MemoryPlane()
    made = LocalEngine(loaded.model, loaded.files, configuration, plane, CloningStager(), seed=7, **options)
    return made, plane


def rows(
    plane: MemoryPlane, lengths: Sequence[int], *, seed: int = 0, group_rows: int = 1, masked_rows: Sequence[int] = ()
) -> BatchRef:
    """Rows of random tokens, the second half of each trained on; `masked_rows` have nothing to train on."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, len(TOKENIZER), (n,), generator=generator) for n in lengths]
    masks = [(torch.arange(n) >= n / 2).float() * (row not in masked_rows) for row, n in enumerate(lengths)]
    groups = tuple(f"e0_d{seed}_{row // group_rows}" for row in range(len(lengths)))
    names = tuple(f"{group}_g{row % group_rows}" for row, group in enumerate(groups))
    ref = BatchRef(names, groups, tuple(lengths), (0,) * len(lengths), frozenset())
    return plane.put(ref, {"input_ids": ids, "loss_mask": masks})


def gradients(of: LocalEngine, plane: MemoryPlane, ref: BatchRef, objective: Objective = NLL_OBJECTIVE) -> torch.Tensor:
    """All gradients of one optimizer step, joined. The step itself is taken by nobody."""
    batches = of._batches(ref, objective)
    from surefoot.engine.local import _norm

    of._backward(batches, objective, _norm(objective.loss, batches))
    joined = torch.cat([p.grad.flatten() for p in of.model.parameters() if p.grad is not None])
    of._optimizer.zero_grad()  # type: ignore[union-attr]
    return joined
