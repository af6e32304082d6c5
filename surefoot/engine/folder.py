"""A model as a Hugging Face folder: which live tensor goes into the file under which name, and the small files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from surefoot.engine.lora import ADAPTER_CONFIG
from surefoot.errors import ModelError

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
GENERATION_FILE = "generation_config.json"


def small_files(model: Any, tokenizer: Any, generation_config: bytes | None) -> dict[str, bytes]:
    """Every file of the folder but the weights: config.json, tokenizer, chat template, and the base's own
    generation_config.json, unchanged. Made once, at the start, so that no save can fail over them at the end.

    A base without generation_config.json gets none, and Transformers reads config.json as it did for the base; unless
    that held sampling settings, as old ones do, which Transformers moves out of it and which then get their own file.

    Raises:
        ModelError: Transformers refuses to write one of them.
    """
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    with TemporaryDirectory() as folder:
        try:
            model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            again = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise ModelError(
                f"the model's configuration or tokenizer cannot be saved and read again, so no checkpoint could be "
                f"loaded: {error}"
            ) from error
        _require_same(tokenizer, again, f"a model of type {model.config.model_type}")
        root = Path(folder)
        files = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    files.pop(GENERATION_FILE, None)
    if generation_config is None and _moved_settings(model):
        generation_config = model.generation_config.to_json_string().encode()
    if generation_config is not None:
        files[GENERATION_FILE] = generation_config
    return files


def adapter_files(files: Mapping[str, bytes], adapter_config: bytes, tokenizer: Any) -> dict[str, bytes]:
    """The small files of an adapter's folder: the model's, without its own configuration. Beside a config.json,
    Transformers would take the folder for a whole model and look for its weights.

    Raises:
        ModelError: alone, the tokenizer would be read as another.
    """
    kept = {name: data for name, data in files.items() if name not in ("config.json", GENERATION_FILE)}
    with unpacked(kept) as folder:
        _require_same(tokenizer, AutoTokenizer.from_pretrained(folder, trust_remote_code=False), "an adapter")
    return {**kept, ADAPTER_CONFIG: adapter_config}


@contextmanager
def unpacked(files: Mapping[str, bytes]) -> Iterator[Path]:
    """Transformers reads folders, so the files stand in one for a moment. A reader's names stay inside its folder."""
    with TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        yield Path(folder)


def _moved_settings(model: Any) -> bool:
    if not model.can_generate():
        return False
    derived = GenerationConfig.from_model_config(model.config).to_diff_dict()
    return any(derived.get(name) != value for name, value in model.generation_config.to_diff_dict().items())


def _require_same(tokenizer: Any, again: Any, beside: str) -> None:
    """For some model types Transformers reads any tokenizer as that type's own class, and the ids become others."""
    if _behaviour(tokenizer) != _behaviour(again):
        raise ModelError(
            f"beside {beside} Transformers reads this tokenizer as {type(again).__name__}, and it "
            f"gives other ids than the {type(tokenizer).__name__} that the rows are made with: whoever loads a "
            "checkpoint would get another tokenizer. Use the tokenizer of such a model, or another model_type"
        )


def _behaviour(tokenizer: Any) -> tuple[Any, ...]:
    texts = ["Hello, world! 12 + 345 = 357\n\n\t日本語 é", f"{tokenizer.bos_token}a {tokenizer.eos_token} b"]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return tokenizer.get_vocab(), special, tokenizer.chat_template, [tokenizer(text)["input_ids"] for text in texts]


def read_generation_config(folder: Path) -> bytes | None:
    """The bytes of a folder's generation_config.json, `None` if it has none. Settings that Transformers would refuse
    to save (a temperature with sampling off) are warned about and kept.

    Raises:
        ModelError: the file is not a JSON object that makes a generation configuration.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        settings = json.loads(data)
        if not isinstance(settings, dict):
            raise TypeError(f"expected a JSON object, found {type(settings).__name__}")
        config = GenerationConfig(**settings)
    except Exception as error:
        raise ModelError(f"{path} is malformed: {error}. Repair it or remove it") from error
    try:
        config.validate(strict=True)
    except ValueError as error:
        logger.warning("%s holds odd settings; it is copied unchanged into every checkpoint. %s", path, error)
    return data


def weights_by_name(model: Any) -> dict[str, Tensor]:
    """The live weights by their names in the folder's safetensors file; writing into one writes into the model.

    Tied weights come once, under the name that Transformers reads. Where the file's layout differs from the modules'
    (renamed weights, experts stored one by one) the tensors are views of the parameters.

    Raises:
        ModelError: the file's tensors are not views of the parameters, so that they could not be captured exactly.
    """
    return by_name(model, model.state_dict())


def by_name(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `weights_by_name`, of tensors that stand for the model's own, by the modules' names."""
    try:
        state = remove_tied_weights_from_state_dict(dict(tensors), model)
    except RuntimeError as error:
        raise ModelError(f"{type(model).__name__} shares tensors in a way it does not declare: {error}") from error
    saved = revert_weight_conversion(model, dict(state))
    live = {_place(tensor) for tensor in state.values()}
    if len(saved) == len(state) and {_place(tensor) for tensor in saved.values()} == live:
        return dict(saved)
    return _views(model, state)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _views(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers rearranges copies. To find the same pieces in the live tensors, its function is run on tensors that
    hold the number of each element: what comes out says where each element came from."""
    numbered, first, sources = {}, 0, []
    for name, tensor in state.items():
        numbered[name] = torch.arange(first, first + tensor.numel()).reshape(tensor.shape)
        sources.append((first, tensor))
        first += tensor.numel()
    found = revert_weight_conversion(model, numbered)
    views = {name: _view(name, numbers, sources, type(model).__name__) for name, numbers in found.items()}
    if sum(int(numbers.sum()) for numbers in found.values()) != first * (first - 1) // 2:
        raise ModelError(f"{type(model).__name__} is stored with elements left out or repeated: not supported")
    return views


def _view(name: str, numbers: Tensor, sources: list[tuple[int, Tensor]], model: str) -> Tensor:
    start = int(numbers.flatten()[0])
    offset, source = max((pair for pair in sources if pair[0] <= start), key=lambda pair: pair[0])
    strides = [int(numbers.select(d, 1).flatten()[0]) - start if n > 1 else 1 for d, n in enumerate(numbers.shape)]
    expected = torch.full_like(numbers, start)
    for dim, (size, stride) in enumerate(zip(numbers.shape, strides, strict=True)):
        expected += (torch.arange(size) * stride).reshape([-1 if d == dim else 1 for d in range(numbers.ndim)])
    inside = int(numbers.max()) < offset + source.numel() and source.is_contiguous()
    if not inside or not torch.equal(numbers, expected):
        raise ModelError(
            f"{model} stores {name} in a form that is no view of its weights, so it could not be captured "
            "exactly while training goes on: this architecture is not supported"
        )
    return source.as_strided(numbers.shape, strides, source.storage_offset() + start - offset)
