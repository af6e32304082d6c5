"""Samplers over tiny models, and the engine's log-probs of what they sampled."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine.folder import weights_by_name
from surefoot.engine.local import LocalEngine
from surefoot.generation.torch_sampler import TorchSampler
from surefoot.types import BatchRef, Completion, Head, Sampling
from tests.engine import tiny

END = 3  # the tokenizer's end of turn
LENGTH = 64
# Of several buckets of the prefill and of the cache.
PROMPTS = [[5], [7, 8, 9], list(range(4, 20)), list(range(4, 21)), [30, 6, 11] * 7, list(range(31, 4, -1))]


def model(name: str = "untied llama", **settings: Any) -> Any:
    """Random weights, large enough that tokens matter."""
    init = {"vocab_size": len(tiny.TOKENIZER), "bos_token_id": 1, "eos_token_id": END, "pad_token_id": END}
    init |= {**tiny.ARCHITECTURES.get(name, {}), "initializer_range": 0.3, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**init), dtype=torch.float32).eval()


def sampler(of: Any = None, **options: Any) -> TorchSampler:
    options = {"max_total_sequence_length": LENGTH, "tokenizer": tiny.TOKENIZER, "slots": 64, **options}
    return TorchSampler(model() if of is None else of, **options)


def engine(tmp_path: Path, name: str) -> tuple[LocalEngine, MemoryPlane]:
    return tiny.engine(tiny.config(tmp_path, name, max_total_sequence_length=LENGTH))


def sampler_of(trained: LocalEngine, **options: Any) -> TorchSampler:
    """With weights of its own, by the names that the engine publishes."""
    own = copy.deepcopy(trained.model)
    return sampler(own, weights=weights_by_name(own), **options)


def engine_logprobs(
    trained: LocalEngine,
    plane: MemoryPlane,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    temperature: float,
) -> list[torch.Tensor]:
    """Of each completion's tokens after its prompt."""
    rows = [torch.tensor([*p, *c.ids]) for p, c in zip(prompts, completions, strict=True)]
    names = tuple(f"e0_d{i}" for i in range(len(rows)))
    lengths = tuple(len(row) for row in rows)
    ref = BatchRef(tuple(f"{name}_g0" for name in names), names, lengths, (0,) * len(rows), frozenset())
    ref = plane.put(ref, {"input_ids": rows})
    ref = trained.infer(ref, Head(temperature=temperature), into={"logprobs": "found"})
    found = plane.get(ref, ["found"])["found"]
    plane.drop(ref)
    return [row[len(prompt) :] for row, prompt in zip(found, prompts, strict=True)]  # type: ignore[misc]


def own_logprobs(of: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Of the ids after the prompt, through Transformers alone, without padding."""
    whole = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = of(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits[0]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs[:-1].gather(1, whole[0, 1:, None])[len(prompt) - 1 :, 0]


def words(count: int, **options: Any) -> Sampling:
    return Sampling(max_new_tokens=count, **options)
