"""LoRA by peft: which modules get an adapter, its folder in peft's own format, and the base beneath it."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from surefoot.config import LoraConfig
from surefoot.errors import ModelError
from surefoot.seeds import derive_seed

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# What peft warns of and is meant: tied embeddings are adapted each by itself, some layers are stored transposed.
_EXPECTED = "Model (has|with) `tie_word_emb|Input and output embeddings|fan_in_fan_out|`is_gradient_checkpointing`"


def attach(model: Any, config: LoraConfig, *, seed: int, score: bool, base: str | None) -> peft.PeftModel:
    """Put an adapter into the model, drawn from the seed. What the model puts out stays the same until it is trained.

    Args:
        score: the model has a score head, which no base has: it is trained in full beside the adapter.
        base: what `adapter_config.json` names as the model beneath: an absolute folder or a hub name.

    Raises:
        ModelError: a pattern matches nothing, or every target is excluded.
    """
    adapted, saved = _chosen(model, config, score)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS if score else peft.TaskType.CAUSAL_LM,
        r=config.dim,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,  # some readers expect a whole one
        lora_dropout=config.dropout,
        target_modules=adapted,
        modules_to_save=saved or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in adapted),
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng(devices=[]), _as_expected():
        torch.default_generator.manual_seed(derive_seed(seed, "lora"))
        made = peft.PeftModel(model, settings)
    _require_exactly(model, adapted, saved)
    return made.eval()  # peft's new modules are in training mode, whatever the model was


def check(model: Any, config: LoraConfig, *, score: bool) -> None:
    """What names and shapes alone tell; the model may be one without values.

    Raises:
        ModelError: as `attach` does; or the rank is above what a product of a layer's size can have.
    """
    sizes = {name: tuple(model.get_submodule(name).weight.shape) for name in _chosen(model, config, score)[0]}
    small = [name for name in sizes if min(sizes[name]) < config.dim]
    if small:
        name = min(small, key=lambda each: min(sizes[each]))
        ends = ", ".join(dict.fromkeys(each.rpartition(".")[2] for each in small))
        raise ModelError(
            f"lora.dim: found {config.dim}, but {name} is {' x '.join(map(str, sizes[name]))}: expected at most its "
            f"smaller side, {min(sizes[name])}. Lower dim, or name what is smaller in exclude_modules: {ends}"
        )


def _chosen(model: Any, config: LoraConfig, score: bool) -> tuple[list[str], list[str]]:
    """The modules that are adapted, and those that are trained in full."""
    targets, saved = _targets(model, config, score), _saved(model, config, score)
    adapted = [name for name in targets if name not in saved]
    if not adapted:
        raise ModelError("lora: every module that target_modules names is excluded or in modules_to_save")
    return adapted, saved


def _targets(model: Any, config: LoraConfig, score: bool) -> list[str]:
    head = model.score if score else model.get_output_embeddings()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | Conv1D)}
    linear = [n for n, m in layers.items() if not isinstance(m, nn.Embedding) and m is not head]
    patterns = [p for p in config.target_modules if p != "all-linear"]
    found = set(linear if len(patterns) < len(config.target_modules) else ())
    found |= _matching(patterns, layers, "target_modules")
    found -= _matching(config.exclude_modules, found, "exclude_modules")
    return [name for name in layers if name in found]


def _saved(model: Any, config: LoraConfig, score: bool) -> list[str]:
    own = [name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None]
    found = _matching(config.modules_to_save, own, "modules_to_save") | ({"score"} if score else set())
    return [name for name in own if name in found]


def _matching(patterns: Sequence[str], names: Iterable[str], key: str) -> set[str]:
    """Names that match a pattern as a whole or from one of their dots on."""
    names, found = list(names), set()
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not hits:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            near = difflib.get_close_matches(pattern, [*ends, *names], n=3, cutoff=0.5) or ends[:8]
            raise ModelError(f"lora.{key}: {pattern!r} matches no module; there are, for example, {', '.join(near)}")
        found |= hits
    return found


def _require_exactly(model: Any, adapted: Sequence[str], saved: Sequence[str]) -> None:
    """peft finds modules by the ends of their names: it must have found those meant and no other."""
    made = {n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)}
    if made != {*adapted, *saved}:
        odd = ", ".join(sorted(made ^ {*adapted, *saved})[:5])
        raise ModelError(f"lora: peft cannot adapt these modules of {type(model).__name__} as asked: {odd}")


@contextmanager
def _as_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_EXPECTED)
        yield


def adapter_config(made: peft.PeftModel) -> bytes:
    """`adapter_config.json` as peft writes it for inference, its sets in one order, so that equal adapters have equal
    bytes."""
    settings = {**made.peft_config["default"].to_dict(), "inference_mode": True}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    return json.dumps(plain, indent=2, sort_keys=True).encode()


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """The adapter's live tensors by their names in `adapter_model.safetensors`; writing into one writes into the
    model."""
    found = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {f"base_model.model.{name}": tensor for name, tensor in found.items()}


def base_weights(model: Any) -> dict[str, Tensor]:
    """The live tensors beneath the adapter, by their names in the model without one."""
    adapter = {tensor.data_ptr() for tensor in adapter_weights(model).values()}
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in model.state_dict().items()
        if tensor.data_ptr() not in adapter
    }


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """What `merge` would make of the model, which stays as it is, by the modules' names: new tensors where the adapter
    has a part in them, the live ones elsewhere."""
    merged = base_weights(model)
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            merged |= {f"{name}.{part}": t for part, t in module.modules_to_save["default"].state_dict().items()}
        elif isinstance(module, BaseTunerLayer):
            own = module.get_base_layer().weight.detach()
            merged[f"{name}.weight"] = own + module.get_delta_weight("default").to(own)
    return merged


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Inside, the model is the base, bit for bit."""
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge(made: peft.PeftModel) -> Any:
    """The Transformers model whose own weights include the adapter. `made` is used up.

    Where one of two tied embeddings was adapted, they become two, and the configuration says so.
    """
    model = made.get_base_model()
    with _as_expected(), torch.no_grad():
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(embedding, BaseTunerLayer):  # adding to a tied weight would change the other one too
                layer = embedding.get_base_layer()
                layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        return made.merge_and_unload()
