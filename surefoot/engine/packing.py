"""The rows of a micro-batch as one sequence without padding, in which what rows begin with alike stands once.

Attention alone looks from token to token: for it, and for nothing else, rows are laid side by side again. So nothing
is computed for padding, and a prompt is computed once for all its completions, or for both sides of a pair.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_ATTENTION = "surefoot_packed"  # as `sdpa`, but where rows are packed


@dataclass(frozen=True, slots=True)
class Packed:
    """
    Attributes:
        input_ids, positions: [1, tokens].
        places: [rows, longest], where a row's tokens are among these; padding points anywhere.
        owners: [tokens], where each of these is in the flattened [rows, longest].
    """

    input_ids: Tensor
    positions: Tensor
    places: Tensor
    owners: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, real: Tensor) -> Packed:
        """`input_ids` [rows, longest], padded on the right; `real` [rows, longest], false for padding. A row shares
        with the row before it the tokens that both begin with.

        >>> packed = Packed.of(torch.tensor([[5, 6, 7], [5, 8, 0]]), torch.tensor([[True] * 3, [True, True, False]]))
        >>> packed.input_ids.tolist(), packed.positions.tolist(), packed.places[:, :2].tolist()
        ([[5, 6, 7, 8]], [[0, 1, 2, 1]], [[0, 1], [0, 3]])
        """
        rows, longest = input_ids.shape
        own = real.clone()
        alike = (input_ids[1:] == input_ids[:-1]) & real[1:] & real[:-1]
        own[1:] &= alike.long().cumprod(1) == 0
        owners = own.flatten().nonzero()[:, 0]
        number = torch.zeros(rows * longest, dtype=torch.long, device=input_ids.device)
        number[owners] = torch.arange(len(owners), device=input_ids.device)
        row = torch.arange(rows, device=input_ids.device)[:, None]
        owner_row = torch.where(own, row, 0).cummax(0).values
        places = number.view(rows, longest).gather(0, owner_row)
        positions = torch.arange(longest, device=input_ids.device).expand(rows, -1).flatten()[owners]
        return cls(input_ids.flatten()[owners][None], positions[None], places, owners)

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model that packs is called with."""
        mask = self.input_ids.new_ones(1, 1, 1, 1)  # of four dimensions: taken for a mask that is done, and not read
        return {
            "input_ids": self.input_ids,
            "position_ids": self.positions,
            "attention_mask": mask,
            "packed": self,
            "use_cache": False,
        }

    def rows(self, packed: Tensor) -> Tensor:
        """[tokens, ...] side by side, [rows, longest, ...]."""
        return chosen(packed, self.places.flatten()).view(*self.places.shape, *packed.shape[1:])

    def packed(self, rows: Tensor) -> Tensor:
        """The reverse, [tokens, ...]."""
        return chosen(rows.flatten(0, 1), self.owners)


def chosen(values: Tensor, places: Tensor) -> Tensor:
    """As `index_select`, whose backward pass is slower on a CPU and not deterministic on a GPU."""
    return F.embedding(places, values.flatten(1)).view(len(places), *values.shape[1:])


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    packed: Packed | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`query`: [1, heads, tokens, head_dim]; gives [1, tokens, heads, head_dim], as Transformers expects."""
    if packed is None:
        options |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return cast(tuple[Tensor, None], sdpa_attention_forward(module, query, key, value, mask, **options))
    strange = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if strange or not getattr(module, "is_causal", True):
        raise NotImplementedError(
            f"{type(module).__name__} has {', '.join(strange) or 'attention to what comes later'}"
        )
    q, k, v = (packed.rows(part[0].transpose(0, 1)).transpose(1, 2) for part in (query, key, value))
    longest = q.shape[2]
    window = None
    if sliding_window is not None and sliding_window < longest:
        window = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=window,
        is_causal=window is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return packed.packed(out.transpose(1, 2))[None], None


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


@torch.no_grad()
def can_pack(model: Any) -> bool:
    """Whether the model gives packed rows the logits, or scores, that it gives each by itself: found by trying. If so,
    it runs on `Packed.inputs` from now on, and on other inputs as before; else it is left as it was."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not model._supports_attention_backend or kinds - {"full_attention", "sliding_attention"}:
        return False
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    training, before = model.training, config._attn_implementation
    if before != "sdpa":
        return bool(before == _ATTENTION)
    model.eval()
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[1, 5, 2, 7, 3], [1, 5, 4, 6, 8]], device=model.device) % size
    expected = _hidden(model, {"input_ids": ids, "use_cache": False})
    packed = Packed.of(ids, torch.ones_like(ids, dtype=torch.bool))
    try:
        model.set_attn_implementation(_ATTENTION)
        found = packed.rows(_hidden(model, packed.inputs)[0])
        same = torch.allclose(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    except Exception:  # layers unlike those that this is made for raise all sorts of things
        same = False
    finally:
        model.train(training)
    if not same:
        model.set_attn_implementation(before)
    return same


def _hidden(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    found: Tensor = getattr(model, str(model.base_model_prefix), model)(**inputs)[0]
    return found
