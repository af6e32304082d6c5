"""A model's logits, with attention handed in from outside: by hand for Llama and its kin, through Transformers'
attention interface for others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

Attend: TypeAlias = Callable[[int, Tensor, Tensor, float], Tensor]  # layer, q, kv, scale; as `cache.Decode`


_OUTPUTS = 768


class Forward(Protocol):
    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, last: Tensor) -> Tensor:
        """Logits of one token of each row, [rows, vocabulary].

        Args:
            ids, positions: [rows, tokens].
            last: [rows], which token.
        """
        ...


# ------------------------------------------------------------------------------------------------------ Llama and kin


class FusedForward:
    """Few, large operations: queries, keys and values are one product, gate and up another. The model's own parameters
    become windows on the joined weights, so that a new value put into one is seen here.

    Args:
        model: a Transformers model of a type in `choice.FUSED`, in which no window slides.
        length: tokens of the longest sequence, padding included.
    """

    def __init__(self, model: Any, length: int) -> None:
        self._embed, self._norm, self._head = model.model.embed_tokens, model.model.norm, model.lm_head
        self._layers = [_Layer(layer) for layer in model.model.layers]
        places = torch.arange(length, device=model.device)[None]
        cos, sin = model.model.rotary_emb(self._embed.weight, places)
        # Turning a half by -x is turning it by x with the sine's sign changed.
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0, :, None], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)[:, None]

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, last: Tensor) -> Tensor:
        rows, tokens = ids.shape
        x = F.embedding(ids.flatten(), self._embed.weight)
        places = positions.flatten()
        turn = self._cos[places], self._sin[places]
        for number, layer in enumerate(self._layers):
            x = layer(number, x, turn, attend)
        if tokens > 1:
            x = x.view(rows, tokens, -1)[torch.arange(rows, device=x.device), last]
        return _linear(_rms(x, self._norm), self._head.weight, self._head.bias)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._scale, self._head_dim = attention.scaling, attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._key_heads = attention.k_proj.out_features // self._head_dim
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self._out, self._down, self._act, self._width = (
            attention.o_proj,
            mlp.down_proj,
            mlp.act_fn,
            mlp.gate_proj.out_features,
        )

    def __call__(self, number: int, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads, both = self._heads, self._heads + self._key_heads
        qkv = _linear(_rms(x, self._norms[0]), *self._qkv).view(len(x), -1, self._head_dim)
        for norm, part in zip(self._head_norms, (qkv[:, :heads], qkv[:, heads:both]), strict=True):
            if norm is not None:
                part.copy_(_rms(part, norm))
        turned = qkv[:, :both]
        halves_swapped = turned.roll(self._head_dim // 2, -1)
        turned.mul_(turn[0]).addcmul_(halves_swapped, turn[1])
        x = _add(x, attend(number, qkv[:, :heads], qkv[:, heads:], self._scale), self._out)
        gate_up = _linear(_rms(x, self._norms[1]), *self._gate_up)
        return _add(x, self._act(gate_up[:, : self._width]).mul_(gate_up[:, self._width :]), self._down)


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias for several layers that read the same; theirs become windows on it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    sizes = [linear.out_features for linear in linears]
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight.data = part
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if None in biases:
        return weight, None
    bias = torch.cat([linear.bias.data for linear in linears])
    for linear, part in zip(linears, torch.split(bias, sizes), strict=True):
        linear.bias.data = part
    return weight, bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """On a CPU, many outputs in pieces: for few rows, that is up to 1.4 times as fast as all of them at once."""
    if len(weight) <= 2 * _OUTPUTS or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(weight), _OUTPUTS):
        piece = slice(start, start + _OUTPUTS)
        torch.mm(x, weight[piece].t(), out=out[:, piece])
    return out if bias is None else out.add_(bias)


def _add(x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
    x = torch.addmm(x, y, linear.weight.t())
    return x if linear.bias is None else x.add_(linear.bias)


def _rms(x: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


# ------------------------------------------------------------------------------------------------------------- others


class InterfaceForward:
    """Transformers' own layers, with their attention replaced through its attention interface."""

    NAME = "surefoot_slots"

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation(self.NAME)
        self._model = model
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, last: Tensor) -> Tensor:
        rows = torch.arange(len(ids), device=ids.device)
        keep = {"logits_to_keep": last} if self._keeps else {}
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),  # some models warn without one
            position_ids=positions,
            use_cache=False,
            attend=attend,
            **keep,
        ).logits
        return logits[rows, rows if self._keeps else last]


def _interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """`query`: [rows, heads, tokens, head_dim]; gives [rows, tokens, heads, head_dim], as Transformers expects."""
    strange = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if strange or key.shape != value.shape or "attend" not in options:
        raise NotImplementedError(
            f"{type(module).__name__} has {', '.join(strange) or 'keys and values of its own kind'}"
        )
    rows, heads, tokens, head_dim = query.shape
    q = query.transpose(1, 2).reshape(rows * tokens, heads, head_dim)
    kv = torch.cat((key, value), 1).transpose(1, 2).reshape(rows * tokens, -1, head_dim)
    return options["attend"](module.layer_idx, q, kv, scaling).view(rows, tokens, heads, head_dim), None


AttentionInterface.register(InterfaceForward.NAME, _interface)
