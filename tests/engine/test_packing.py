"""Rows packed into one sequence give what rows side by side give, in value and in gradient; what cannot be packed is
noticed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from surefoot.engine import models
from surefoot.engine.heads import ModelHead
from surefoot.engine.packing import Packed, can_pack
from surefoot.types import Head
from tests.engine import tiny

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
FURTHER: dict[str, dict[str, Any]] = {
    "sliding window": {"model_type": "mistral", **_SMALL, **_ATTENTION, "sliding_window": 3},
    "windows in every other layer": {
        "model_type": "qwen2",
        **_SMALL,
        **_ATTENTION,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "positions from the mask": {"model_type": "opt", **_SMALL, "num_attention_heads": 2, "ffn_dim": 24},
    "a state space": {"model_type": "mamba", **_SMALL, "state_size": 4},
    "distances in place of positions": {"model_type": "bloom", **_SMALL, "n_head": 2},
    "convolutions": {"model_type": "lfm2", **_SMALL, **_ATTENTION, "layer_types": ["conv", "full_attention"]},
}
PACKED = {
    *("untied llama", "tied llama", "tied qwen3", "gpt2", "renamed head", "experts one by one", "scaled logits"),
    *("sliding window", "windows in every other layer", "positions from the mask"),
}
PADDED = {"capped logits", "a state space", "distances in place of positions", "convolutions"}


def made(name: str) -> Any:
    init = (tiny.ARCHITECTURES | FURTHER)[name]
    torch.manual_seed(0)
    init = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 3, **init}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**init), dtype=torch.float32).eval()


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three that begin alike in one way or another, one that is a beginning of the one before, one by itself."""
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = torch.randint(1, 32, (6, 9), generator=generator), torch.tensor([9, 7, 9, 5, 2, 6])
    ids[1, :4], ids[2, :6], ids[3] = ids[0, :4], ids[1, :6], ids[2]
    return ids * (torch.arange(9) < lengths[:, None]), lengths


def test_every_token_stands_once() -> None:
    ids, lengths = rows()
    real = torch.arange(9) < lengths[:, None]
    packed = Packed.of(ids, real)
    assert torch.equal(packed.rows(packed.input_ids[0][:, None].float())[..., 0][real].long(), ids[real])
    assert torch.equal(packed.positions[0][packed.places][real], torch.arange(9).expand(6, -1)[real])
    beginnings = {tuple(row[:end]) for row, n in zip(ids.tolist(), lengths, strict=True) for end in range(1, n + 1)}
    assert packed.input_ids.shape == (1, len(beginnings))
    numbers = torch.arange(54).view(6, 9, 1).float()
    assert torch.equal(packed.packed(numbers)[:, 0].long(), packed.owners)


def found(head: ModelHead, model: Any, weights: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    ids, lengths = rows()
    model.zero_grad()
    out = head(ids, lengths, Head())["logprobs"]
    (out * weights).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(PACKED | PADDED))
def test_packed_rows_get_what_each_gets_by_itself(name: str) -> None:
    model, weights = made(name), torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    ids, lengths = rows()
    with torch.no_grad():
        alone = [model(input_ids=ids[r : r + 1, :n]).logits[0].float() for r, n in enumerate(lengths.tolist())]
    head, padded = ModelHead(model), ModelHead(model)
    assert (head._packs, name) == (name in PACKED, name)
    padded._packs = False
    (ours, our_grads), (theirs, their_grads) = found(head, model, weights), found(padded, model, weights)
    for row, logits in enumerate(alone):
        expected = logits[:-1].log_softmax(-1).gather(-1, ids[row, 1 : len(logits), None])[:, 0]
        torch.testing.assert_close(ours[row, 1 : len(logits)], expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert our_grads.keys() == their_grads.keys()
    for parameter, grad in our_grads.items():
        scale = float(their_grads[parameter].abs().max())
        torch.testing.assert_close(grad, their_grads[parameter], rtol=0, atol=2e-5 * max(scale, 1e-3), msg=parameter)


def test_a_model_that_packs_still_reads_rows_padded_on_either_side() -> None:
    model, ids = made("untied llama"), torch.randint(1, 32, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        before = model(**given).logits
        assert can_pack(model)
        assert can_pack(model)  # once more is no other
        assert torch.equal(model(**given).logits[mask != 0], before[mask != 0])
        model.generate(ids, max_new_tokens=2, do_sample=False)


def test_it_is_tried_without_a_trace() -> None:
    model = made("untied llama").train()
    state = torch.random.get_rng_state()
    assert can_pack(model)
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    before = made("capped logits")
    kind = before.config._attn_implementation
    assert not can_pack(before)
    assert before.config._attn_implementation == kind


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_with_activations_made_again_the_gradient_is_the_same(precision: str) -> None:
    weights, grads = torch.randn(6, 9), []
    for again in (False, True):
        model = made("untied llama").train()
        if again:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            grads.append(found(ModelHead(model), model, weights)[1])
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_a_score_head_reads_packed_rows(tmp_path: Path) -> None:
    model = models.load(tiny.config(tmp_path), tokenizer=tiny.TOKENIZER, seed=1, kind="scalar").model
    (ids, lengths), head, padded = rows(), ModelHead(model), ModelHead(model)
    padded._packs = False
    both = [h(ids, lengths, Head(("scalar",)))["scalar"] for h in (head, padded)]
    assert head._packs
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-6)
    assert not both[0][torch.arange(9) >= lengths[:, None]].any()
