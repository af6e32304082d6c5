"""Which way a model is sampled: in slots where its attention allows that, and checked on a few tokens; else plainly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.generation.batch import SlotBatch
from surefoot.generation.cache import Decode, KVCache, Prefill
from surefoot.generation.forward import Forward, FusedForward, InterfaceForward
from surefoot.generation.plain import PlainBatch

logger = logging.getLogger(__name__)

Batch: TypeAlias = SlotBatch | PlainBatch

# Llama, and kin with the same layers but for biases, or norms of queries and keys.
FUSED = {"llama", "qwen2", "qwen3", "mistral"}


def batch_for(model: Any, *, slots: int, length: int, exact: bool) -> tuple[Batch, bool]:
    """The running batch for such a model, and whether its samples are exact.

    Raises:
        ModelError: the model cannot run at all, or the cache does not fit into memory.
    """
    config, kind = model.config.get_text_config(), type(model).__name__
    reason = _why_not_full(config, length)
    if not reason and not model._supports_attention_backend:
        reason = "its attention cannot be replaced through Transformers' interface"
    ids = torch.arange(min(9, length), device=model.device) * 7 % model.get_input_embeddings().weight.shape[0]
    try:
        expected = model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False).logits[0]
    except Exception as error:
        raise ModelError(f"a {kind} cannot be sampled: it does not run on {len(ids)} tokens ({error})") from error
    for make in () if reason else _forwards(model, length + -length % 16):
        try:
            forward = make()
            cache = _checked(forward, ids, expected, slots, length)
        except ModelError:
            raise
        except Exception as error:  # layers unlike those that the way was made for raise all sorts of things
            reason = f"{type(error).__name__}: {error}"
            continue
        if not exact:
            cache.row_counts = sorted({*range(8, slots, 8), slots})
            return SlotBatch(forward, cache, prefill_tokens=512, exact=False), False
        mixes = _why_rows_mix(config, forward, cache)
        if mixes:
            logger.warning("a %s is not sampled exactly: %s", kind, mixes)
        return SlotBatch(forward, cache, prefill_tokens=_prefill_tokens(forward, cache), exact=True), not mixes
    logger.warning("a %s is sampled in plain batches, slower and not exactly: %s", kind, reason)
    return PlainBatch(model, slots), False


def _why_not_full(config: Any, length: int) -> str:
    """In words, why not every layer of such a model attends to all that came before; empty if they do."""
    window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if slides and window is not None and window < length:
        return f"its window of {window} tokens slides"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}"
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings", getattr(config, "max_position_embeddings", length))
    if rope.get("rope_type") in ("dynamic", "longrope") and original < length:
        return f"its positions are encoded by the length of the whole batch ({rope['rope_type']})"
    return ""


def _forwards(model: Any, length: int) -> Iterator[Callable[[], Forward]]:
    if model.config.model_type in FUSED:
        yield lambda: FusedForward(model, length)
    before = model.config._attn_implementation
    yield lambda: InterfaceForward(model)
    model.set_attn_implementation(before)  # asked for more, since it failed


def _checked(forward: Forward, ids: Tensor, expected: Tensor, slots: int, length: int) -> KVCache:
    """The cache for this model, once a prompt and further tokens have given the logits that the model itself gives."""
    prompt = max(1, len(ids) - 2)
    prefill = Prefill(1, 16)
    padded = torch.nn.functional.pad(ids[:prompt], (0, 16 - prompt))[None]
    places = torch.arange(16, device=ids.device)[None].clamp(max=length - 1)
    logits = [forward(padded, places, prefill, torch.tensor([prompt - 1], device=ids.device))[0]]
    _, _, heads, _, head_dim = prefill.kept[0].shape
    kept = prefill.kept[0]
    cache = KVCache(len(prefill.kept), slots, heads, length, head_dim, kept.dtype, kept.device)
    cache.load(0, prefill.kv(0, prompt))
    cache.row_counts = [1]
    for place in range(prompt, len(ids)):
        row = torch.tensor([place], device=ids.device)
        decode = Decode(cache, row, [min(16, cache.length)])
        logits.append(forward(ids[row][:, None], row[:, None], decode, torch.zeros_like(row))[0])
    expected = expected[prompt - 1 :]
    difference, scale = (torch.stack(logits) - expected).abs().max(), expected.abs().max()
    if not difference <= scale * (1e-3 if expected.dtype == torch.float32 else 0.1):
        raise ValueError(f"its logits differ by {float(difference):.2g} from its own, of up to {float(scale):.2g}")
    cache.row_counts = [slots]
    return cache


# What follows asks this machine, and this number of threads, which shapes give a row the same bits. Which way a library
# computes a product depends on shapes alone, so equal rows of one trial stand for all.


def _why_rows_mix(config: Any, forward: Forward, cache: KVCache) -> str:
    """In words, why a sample depends on the others; empty if it does not. Sets `row_counts` of the cache."""
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if any((getattr(config, name, None) or 0) > 1 for name in experts):
        return "its tokens are sent to experts, each of which computes another number of rows each time"
    whole = _alike(forward, cache, cache.slots)
    if whole is None:
        return "on this machine, equal rows of one product get unequal bits"
    counts = []
    for count in range(8, cache.slots, max(8, cache.slots // 16)):
        cache.row_counts = [count]  # also of the calls of attention
        found = _alike(forward, cache, count)
        counts += [count] if found is not None and torch.equal(found, whole) else []
    cache.row_counts = [*counts, cache.slots]
    return ""


def _alike(forward: Forward, cache: KVCache, count: int) -> Tensor | None:
    """The logits of one token after another, in so many rows alike; `None` if the rows differ."""
    ids = torch.ones(count, dtype=torch.long, device=cache.data.device)
    places = torch.zeros_like(ids)
    for place in range(min(2, cache.length)):
        decode = Decode(cache, places + place, [min(32, cache.length)] * count)
        logits = forward(ids[:, None], (places + place)[:, None], decode, places)
    return logits[0] if bool((logits == logits[0]).all()) else None


def _prefill_tokens(forward: Forward, cache: KVCache) -> int:
    """How many tokens of short prompts to compute together: 64 if a prompt's place among others makes no difference."""
    ids = torch.ones(4, 16, dtype=torch.long, device=cache.data.device)
    places = torch.arange(16, device=ids.device).clamp(max=cache.limit - 1).expand(4, -1)
    prefill = Prefill(4, 16)
    logits = forward(ids, places, prefill, torch.full((4,), 15, device=ids.device))
    alike = [bool((logits == logits[0]).all()), *(bool((kept == kept[:, :1]).all()) for kept in prefill.kept)]
    return 64 if all(alike) else 0
