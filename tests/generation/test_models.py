"""Which way each architecture is sampled, and that all ways give the model's own log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.errors import ModelError
from surefoot.generation import choice
from surefoot.generation.batch import SlotBatch
from surefoot.generation.forward import FusedForward, InterfaceForward
from surefoot.generation.plain import PlainBatch
from surefoot.generation.torch_sampler import TorchSampler
from tests.generation import kit
from tests.generation.kit import PROMPTS, words

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
_LIKE_LLAMA = {**_SIZES, "intermediate_size": 24, "num_key_value_heads": 1}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}

FUSED: dict[str, dict[str, Any]] = {
    "llama": _LIKE_LLAMA,
    "llama, tied": {**_LIKE_LLAMA, "tie_word_embeddings": True},
    "llama, all biases": {**_LIKE_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, as many key heads": {**_LIKE_LLAMA, "num_key_value_heads": 2},
    "llama, scaled positions": {
        **_LIKE_LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": _LIKE_LLAMA,
    "qwen3": {**_LIKE_LLAMA, "head_dim": 12},
    "mistral": {**_LIKE_LLAMA, "sliding_window": 64},
}
INTERFACE: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gpt_neox": {**_SIZES, "intermediate_size": 24},
    "phi": _LIKE_LLAMA,
    "phi3": _LIKE_LLAMA,
    "olmo": _LIKE_LLAMA,
    "olmo2": _LIKE_LLAMA,
    "smollm3": _LIKE_LLAMA,
    "granite": {**_LIKE_LLAMA, "logits_scaling": 3.0},
    "gemma": {**_LIKE_LLAMA, "head_dim": 8},
    "opt": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "mixtral": {**_LIKE_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2},
}
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({**_LIKE_LLAMA, "sliding_window": 8}, "its window of 8 tokens slides"),
    "gemma2": ({**_LIKE_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8}, "softcap"),
    "bloom": ({"hidden_size": 16, "n_layer": 2, "n_head": 2}, "attention cannot be replaced"),
    "mamba": ({"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, "linear_attention"),
}


def made(name: str, settings: dict[str, Any]) -> Any:
    of = kit.model("", model_type=name.partition(",")[0], **settings)
    with torch.no_grad():
        for parameter_name, parameter in of.named_parameters():  # biases and norms that do something
            if parameter.ndim == 1:
                parameter.add_(
                    0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter_name)))
                )
    return of


def check_logprobs(sampler: TorchSampler, of: Any) -> None:
    sampling = words(30, temperature=1.5, stop_ids=(kit.END,))
    found = sampler.generate_many(PROMPTS, seed=3, groups=list("abcdef"), sampling=sampling, samples=3)
    sampler.close()
    for prompt, of_prompt in zip(PROMPTS, found, strict=True):
        for done in of_prompt:
            expected = kit.own_logprobs(of, prompt, done.ids, 1.5)
            torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FUSED)
def test_llama_and_kin_are_computed_by_hand(name: str, caplog: pytest.LogCaptureFixture) -> None:
    sampler = kit.sampler(made(name, FUSED[name]))
    assert isinstance(sampler._batch, SlotBatch)
    assert isinstance(sampler._batch._forward, FusedForward)
    assert sampler.exact and not caplog.records
    check_logprobs(sampler, made(name, FUSED[name]))


@pytest.mark.parametrize("name", INTERFACE)
def test_others_go_through_the_attention_interface(name: str) -> None:
    sampler = kit.sampler(made(name, INTERFACE[name]))
    assert isinstance(sampler._batch, SlotBatch)
    assert isinstance(sampler._batch._forward, InterfaceForward)
    assert sampler.exact == (name != "mixtral")  # experts mix rows
    check_logprobs(sampler, made(name, INTERFACE[name]))


@pytest.mark.parametrize("name", PLAIN)
def test_what_has_no_plain_cache_is_sampled_in_plain_batches(name: str, caplog: pytest.LogCaptureFixture) -> None:
    settings, reason = PLAIN[name]
    sampler = kit.sampler(made(name, settings), slots=7)
    assert isinstance(sampler._batch, PlainBatch)
    assert not sampler.exact
    assert reason in caplog.text
    check_logprobs(sampler, made(name, settings))


@pytest.mark.parametrize("name", FUSED)
def test_by_hand_and_through_the_interface_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = kit.sampler(made(name, FUSED[name]))
    monkeypatch.setattr(choice, "FUSED", set())
    through = kit.sampler(made(name, FUSED[name]))
    assert isinstance(through._batch, SlotBatch)
    assert isinstance(through._batch._forward, InterfaceForward)
    pair = [
        each.generate_many(PROMPTS, seed=0, groups=list("abcdef"), sampling=words(20, temperature=0.0))
        for each in (by_hand, through)
    ]
    for (one,), (other,) in zip(*pair, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    by_hand.close()
    through.close()


def test_a_wide_product_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.generation import forward

    monkeypatch.setattr(forward, "_OUTPUTS", 5)
    name = "llama, all biases"
    check_logprobs(kit.sampler(made(name, FUSED[name])), made(name, FUSED[name]))


def test_long_prompts_are_attended_to_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.generation import cache

    monkeypatch.setattr(cache, "_QUERIES", 6)
    check_logprobs(kit.sampler(), kit.model())


def test_layers_unlike_those_expected_are_noticed() -> None:
    """A model that says llama and is not: the check on a few tokens finds it, and another way is taken."""

    def strange() -> Any:
        of = kit.model()
        norm = of.model.norm
        of.model.norm = torch.nn.Sequential(norm, torch.nn.Tanh())
        of.model.norm.weight, of.model.norm.variance_epsilon = norm.weight, norm.variance_epsilon
        return of

    sampler = kit.sampler(strange())
    assert isinstance(sampler._batch, SlotBatch)
    assert isinstance(sampler._batch._forward, InterfaceForward)
    check_logprobs(sampler, strange())


def test_a_model_that_cannot_run_is_refused() -> None:
    of = kit.model()
    of.model.layers[0].self_attn.o_proj = torch.nn.Linear(3, 3)
    with pytest.raises(ModelError, match="a LlamaForCausalLM cannot be sampled: it does not run on 9 tokens"):
        kit.sampler(of)


def test_ids_that_the_tokenizer_lacks_are_drawn_as_the_model_has_them() -> None:
    """The trainer's log-probs count them, too."""
    of = kit.model(vocab_size=4000)
    sampler = kit.sampler(kit.model(vocab_size=4000))
    found = sampler.generate_many([[5]], seed=0, groups=["a"], sampling=words(30), samples=4)[0]
    assert max(max(done.ids) for done in found) > 32
    for done in found:
        torch.testing.assert_close(torch.tensor(done.logprobs), kit.own_logprobs(of, [5], done.ids), atol=1e-5, rtol=0)
    sampler.close()
