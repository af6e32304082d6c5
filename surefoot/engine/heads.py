"""From a model's hidden states to log-probs, entropies, top-k, logits or scalars, without the whole logits in memory.

Logits are made for a chunk of tokens at a time and made again in the backward pass, and only for tokens that something
reads. The result equals log_softmax and gather over all tokens, in value and in gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surefoot.engine.packing import Packed, can_pack, chosen
from surefoot.errors import ModelError
from surefoot.types import Head

# A chunk holds this many tokens, and more where the vocabulary is small: 2**23 logits are 32 MiB in float32.
CHUNK_TOKENS = 256
CHUNK_LOGITS = 2**23
# A head's function keeps some dozen arrays of a chunk's size: its chunks are so many times smaller.
FUNCTION_CUT = 4
# Up to this many logits (128 MiB) are kept: making them again would cost a third of the head's time to save little.
KEPT_LOGITS = 2**25
_TOKEN_OUTPUTS = {"logprobs", "entropy", "log_sum_sq_probs", "topk", "logits", "hidden"}
NO_MASS = -1e4  # as the log of a probability that is 0


class ModelHead:
    """Runs a model and gives the outputs that a `Head` asks for. `num_ids`: of a head with `known_only`."""

    def __init__(self, model: nn.Module, num_ids: int | None = None) -> None:
        self._model, self._num_ids = model, num_ids
        self._base: nn.Module = getattr(model, str(model.base_model_prefix), model)
        score = getattr(model, "score", None)  # an adapter's copy of it passes its attributes on
        self._score: nn.Module | None = score if getattr(score, "out_features", None) == 1 else None
        self._lm_head: nn.Linear | None = None
        if self._score is None:
            self._lm_head = _separable_head(model, self._base)
        self._packs = can_pack(model)

    def __call__(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        head: Head,
        wanted: Tensor | None = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Outputs padded with zeros to [rows, tokens, ...], aligned as `Head` says.

        Args:
            input_ids: [rows, tokens], padded on the right.
            lengths: [rows].
            wanted: [rows, tokens]; token outputs are computed where it is not 0 and are 0 elsewhere.
            columns: [rows, tokens, ...], what the head's function reads.

        Raises:
            ValueError: the head asks for something unknown.
            ModelError: the head asks for a scalar of a model that has none, or the reverse.
        """
        self._check(head)
        real = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        if head.outputs == ("scalar",):
            return {"scalar": self._scalars(input_ids, real)}
        predicted = real.clone()
        predicted[:, 0] = False
        if wanted is not None:
            predicted &= wanted != 0
        places = predicted.flatten().nonzero().squeeze(1)
        # What predicts a token stands one place before it, in the same row.
        hidden = self._last(self._base if self._lm_head is not None else self._model, input_ids, real, places - 1)
        read = {
            name: (columns or {})[name].flatten(0, 1)[places]
            for name in (head.function.fields if head.function else ())
        }
        num_ids = self._num_ids if head.known_only else None
        values = token_outputs(hidden, input_ids.flatten()[places], self._lm_head, head, num_ids, read)
        return {name: _scatter(value, places, input_ids.shape) for name, value in values.items()}

    def logprobs(self, hidden: Tensor, head: Head) -> Tensor:
        """Over the vocabulary [..., ids], from the output "hidden"."""
        logits = hidden if self._lm_head is None else self._lm_head(hidden)
        return _scaled(logits, head, self._num_ids if head.known_only else None).log_softmax(-1)

    def _check(self, head: Head) -> None:
        unknown = set(head.outputs) - _TOKEN_OUTPUTS - {"scalar"}
        if unknown or not head.outputs or (len(head.outputs) > 1 and "scalar" in head.outputs):
            raise ValueError(f"expected scalar alone or some of {sorted(_TOKEN_OUTPUTS)}, found {head.outputs}")
        if head.temperature <= 0:
            raise ValueError(f"temperature must be above 0, found {head.temperature}")
        if "topk" in head.outputs and head.k < 1:
            raise ValueError(f"topk needs k of at least 1, found {head.k}")
        if ("scalar" in head.outputs) != (self._score is not None):
            kind = type(self._model).__name__
            raise ModelError(
                f"{kind} cannot give {head.outputs}: "
                + ("it has no" if self._score is None else "it has a")
                + " score head with one output"
            )

    def _scalars(self, input_ids: Tensor, real: Tensor) -> Tensor:
        assert self._score is not None
        places = real.flatten().nonzero().squeeze(1)
        scores = self._score(self._last(self._base, input_ids, real, places)).squeeze(-1)
        scores = scores.float() if scores.dtype == torch.bfloat16 else scores  # autocast's: too coarse to be compared
        return _scatter(scores, places, input_ids.shape)

    def _last(self, module: nn.Module, input_ids: Tensor, real: Tensor, places: Tensor) -> Tensor:
        """What `module` puts out first, its last hidden states or its logits, at `places` of the flattened rows."""
        if not self._packs:
            out: Tensor = module(input_ids=input_ids, attention_mask=real.long(), use_cache=False)[0]
            return chosen(out.flatten(0, 1), places)
        packed = Packed.of(input_ids, real)
        return chosen(module(**packed.inputs)[0][0], packed.places.flatten()[places])


def token_outputs(
    hidden: Tensor,
    targets: Tensor,
    lm_head: nn.Linear | None,
    head: Head,
    num_ids: int | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs for single tokens, chunk by chunk.

    Args:
        hidden: [tokens, width], what predicts each token; the logits themselves where `lm_head` is `None`.
        targets: [tokens], the tokens' ids.
        lm_head: from [n, width] to logits [n, vocabulary].
        num_ids: so many of the logits count, from the first on; `None`: all.
        columns: [tokens, ...], what the head's function reads.

    Returns:
        Each of `head.names` [tokens, ...].
    """
    vocabulary = hidden.shape[-1] if lm_head is None else lm_head.out_features
    size = max(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary)
    size = size if head.function is None else max(size // FUNCTION_CUT, 1)
    tokens = _Tokens(targets, columns or {})
    made = {"hidden": hidden} if "hidden" in head.outputs else {}
    if set(head.names) <= made.keys():
        return made
    if lm_head is None:
        parts = [_outputs(hidden[chunk], tokens.part(chunk), head, num_ids) for chunk in _chunks(len(targets), size)]
        return made | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    kept = max(size, KEPT_LOGITS // vocabulary) if head.function is None else size
    if len(targets) <= kept or "logits" in head.outputs:
        return made | _outputs(lm_head(hidden), tokens, head, num_ids)
    values = _Chunked.apply(hidden, lm_head.weight, lm_head.bias, tokens, head, num_ids, size)  # type: ignore[no-untyped-call]
    return made | dict(zip(_names(head), values, strict=True))


@dataclass(frozen=True)
class _Tokens:
    """What is read of the tokens besides their hidden states: `targets` [tokens], and the columns of a function."""

    targets: Tensor
    columns: Mapping[str, Tensor]

    def part(self, chunk: slice) -> _Tokens:
        return _Tokens(self.targets[chunk], {name: column[chunk] for name, column in self.columns.items()})


def _chunks(tokens: int, size: int) -> list[slice]:
    """At least one, if an empty one."""
    return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


def _names(head: Head) -> list[str]:
    return [name for name in head.names if name != "hidden"]


def _scaled(logits: Tensor, head: Head, num_ids: int | None) -> Tensor:
    logits = logits[..., :num_ids]
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits / head.temperature if head.temperature != 1.0 else logits


def _outputs(logits: Tensor, tokens: _Tokens, head: Head, num_ids: int | None) -> dict[str, Tensor]:
    logits, targets = _scaled(logits, head, num_ids), tokens.targets
    if head.names == ("logprobs",):  # the fused form: one array of the logits' size fewer
        return {"logprobs": -F.cross_entropy(logits, targets, reduction="none")}
    logprobs = logits.log_softmax(-1)
    made: dict[str, Tensor] = {}
    if "logprobs" in head.outputs:
        made["logprobs"] = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    if "entropy" in head.outputs:
        made["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    if "log_sum_sq_probs" in head.outputs:
        made["log_sum_sq_probs"] = (2 * logprobs).logsumexp(-1)
    if "topk" in head.outputs:
        made["topk_logprobs"], made["topk_ids"] = logprobs.topk(head.k, dim=-1)
        others = logprobs.scatter(-1, made["topk_ids"], -torch.inf)
        made["topk_rest"] = others.logsumexp(-1).clamp(min=NO_MASS)
    if "logits" in head.outputs:
        made["logits"] = logits
    return made | (head.function(logprobs, tokens.columns) if head.function is not None else {})


class _Chunked(torch.autograd.Function):
    """The outputs of all tokens with the logits of one chunk in memory at a time, in both directions.

    Rather than `torch.utils.checkpoint`, because the gradient of the weight, as large as the weight, is then added up
    in place instead of once per chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: _Tokens,
        head: Head,
        num_ids: int | None,
        size: int,
    ) -> tuple[Tensor, ...]:
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.head, ctx.num_ids, ctx.size, ctx.tokens = head, num_ids, size, tokens
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)
        cast = weight.to(ctx.dtype)
        parts = []
        for chunk in _chunks(len(hidden), size):
            parts.append(_outputs(_linear(hidden[chunk], cast, bias, ctx.dtype), tokens.part(chunk), head, num_ids))
        made = {name: torch.cat([part[name] for part in parts]) for name in _names(head)}
        if "topk_ids" in made:
            ctx.mark_non_differentiable(made["topk_ids"])
        return tuple(made.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        cast = weight.to(ctx.dtype)
        for chunk in _chunks(len(hidden), ctx.size):
            logits = _linear(hidden[chunk], cast, bias, ctx.dtype).requires_grad_()
            with torch.enable_grad():
                made = _outputs(logits, ctx.tokens.part(chunk), ctx.head, ctx.num_ids)
            read = [(made[n], g[chunk]) for n, g in zip(_names(ctx.head), grads, strict=True) if g is not None]
            (d_logits,) = torch.autograd.grad([value for value, _ in read], logits, [grad for _, grad in read])
            d_hidden[chunk] = d_logits @ cast
            if d_weight is not None:
                part = hidden[chunk].to(ctx.dtype)
                if d_weight.dtype == ctx.dtype:
                    d_weight.addmm_(d_logits.t(), part)
                else:
                    d_weight += d_logits.t() @ part
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(dtype), weight, None if bias is None else bias.to(dtype))


def _scatter(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    out = values.new_zeros((shape.numel(), *values.shape[1:]))
    return out.index_copy(0, places, values).reshape(*shape, *values.shape[1:])


@torch.no_grad()
def _separable_head(model: nn.Module, base: nn.Module) -> nn.Linear | None:
    """The language-model head, if the model's logits are exactly that head applied to its last hidden states.

    Some architectures scale or cap their logits afterwards. So the model is run on a few tokens and its logits are
    compared bit for bit, and once more with hidden states put in by a hook, large enough for a cap to show.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or base is model:
        return None
    hidden = torch.randn(1, 4, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
    hidden *= 50.0 / head(hidden).abs().max().clamp(min=1e-20)
    probe = {"input_ids": torch.zeros(1, 4, dtype=torch.long, device=head.weight.device), "use_cache": False}

    def put_in(module: nn.Module, inputs: object, output: Any) -> Any:
        output.last_hidden_state = hidden
        return output

    training = model.training
    model.eval()
    plain = torch.equal(model(**probe).logits, head(base(**probe).last_hidden_state))
    hook = base.register_forward_hook(put_in)
    try:
        large = torch.equal(model(**probe).logits, head(hidden))
    finally:
        hook.remove()
        model.train(training)
    return head if plain and large else None
