"""Models and tokenizers: loaded from a folder, a hub name, a bare configuration or a checkpoint, and checked."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import xxhash
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from surefoot.config import EngineConfig
from surefoot.engine import lora
from surefoot.engine.folder import (
    GENERATION_FILE,
    WEIGHTS_FILE,
    adapter_files,
    read_generation_config,
    small_files,
    unpacked,
    weights_by_name,
)
from surefoot.engine.frozen import require_same_base
from surefoot.engine.optimizer import copy_exactly
from surefoot.errors import ModelError, ResumeRefused
from surefoot.seeds import derive_seed
from surefoot.types import Reader
from surefoot.weights import fingerprint

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["causal_lm", "scalar"]
# Weights as safetensors only: nothing here unpickles a file.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A model with float32 weights of its own, its tokenizer, and the small files of the folder it is saved as.

    Attributes:
        files: by name in the folder; everything but the weights.
        source: where it came from, in words.
        base_files: as `files`, of the whole model where `files` are an adapter's; else the same.
        adapter: the `peft.PeftModel` around the model, if it has an adapter.
    """

    model: Any
    tokenizer: Any
    files: Mapping[str, bytes]
    source: str
    base_files: Mapping[str, bytes]
    adapter: Any = None


def load(
    config: EngineConfig, *, tokenizer: Any, seed: int | None, kind: Kind = "causal_lm", restored: bool = False
) -> LoadedModel:
    """Load what the configuration names, or draw random weights from the seed; without one nothing may be random.

    Args:
        tokenizer: from `load_tokenizer`.
        restored: what was trained will be put in from a checkpoint, a score head among it.

    Raises:
        ModelError: something cannot be found or loaded, or model, tokenizer and lengths do not fit.
    """
    if config.model_init is not None:
        assert seed is not None
        model, source = _random(config.model_init, tokenizer, seed, kind), f"model_init ({config.model_init})"
        generation, base = None, None
    else:
        assert config.model_name is not None
        folder = _resolve(config.model_name, "policy.model_name")
        generation = read_generation_config(folder)
        model, source = _pretrained(folder, tokenizer, seed, kind, restored), config.model_name
        named = Path(config.model_name).expanduser()
        base = str(named.absolute()) if named.is_dir() else config.model_name
    _require_finite(model, source)
    _own_storage(model)
    _agree_on_tying(model)
    if getattr(model.config, "output_router_logits", False):
        logger.warning("%s: output_router_logits is on, yet the experts' balancing loss is no part of training", source)
    if kind == "scalar":
        _check_score(model, source)
    check_fits(model, tokenizer, config.max_total_sequence_length, source)
    if kind == "causal_lm":
        _require_causal(model, source)
    files = small_files(model, tokenizer, generation)
    if config.lora is None:
        return LoadedModel(model, tokenizer, files, source, files)
    adapter = lora.attach(model, config.lora, seed=seed or 0, score=kind == "scalar", base=base)
    with _loading("the tokenizer of the adapter's folder"):
        own = adapter_files(files, lora.adapter_config(adapter), tokenizer)
    return LoadedModel(model, tokenizer, own, source, files, adapter)


def merged(loaded: LoadedModel) -> LoadedModel:
    """A plain model whose weights include the adapter. `loaded` is used up. Raises `ModelError` without an adapter."""
    if loaded.adapter is None:
        raise ModelError("there is no adapter to merge: these are a whole model's weights")
    model = lora.merge(loaded.adapter)
    files = small_files(model, loaded.tokenizer, loaded.base_files.get(GENERATION_FILE))
    return LoadedModel(model, loaded.tokenizer, files, loaded.source, files)


def load_from_checkpoint(
    reader: Reader, config: EngineConfig, tokenizer: Any, *, seed: int = 0, kind: Kind = "causal_lm"
) -> LoadedModel:
    """A model built from a checkpoint's own files; neither a hub nor the base model is needed. An adapter is put on
    the base that the configuration names, or that it draws from the seed.

    Args:
        reader: of the engine's own folder.
        tokenizer: from `load_tokenizer_from_checkpoint`.
        seed: the run's.

    Raises:
        ModelError: the folder cannot be read as a model, or does not fit the configuration.
        CheckpointError: the weights do not fit the model that the folder describes.
        ResumeRefused: the adapter was trained on another base, or only one of checkpoint and configuration has one.
    """
    _require_adapter_in_both(reader, config)
    if config.lora is not None:
        check_base(config)
        loaded = load(config, tokenizer=tokenizer, seed=seed, kind=kind, restored=True)
        require_same_base(reader, fingerprint(lora.base_weights(loaded.model)))
        file = f"weights/{lora.ADAPTER_WEIGHTS}"
        copy_exactly(reader.tensors(file), lora.adapter_weights(loaded.model), file)
        named = {lora.ADAPTER_CONFIG: loaded.files[lora.ADAPTER_CONFIG]}  # where the base is now
        return dataclasses.replace(loaded, files={**_small_files_of(reader), **named})
    files = _small_files_of(reader)
    with unpacked(files) as folder, _loading("the checkpoint's weights folder"):
        with no_init_weights():
            model = _auto(kind).from_config(_config_in(folder), dtype=torch.float32)
        if GENERATION_FILE in files:
            model.generation_config = GenerationConfig.from_pretrained(folder)
    model.tie_weights()
    model.eval()
    copy_exactly(reader.tensors(f"weights/{WEIGHTS_FILE}"), weights_by_name(model), f"weights/{WEIGHTS_FILE}")
    check_fits(model, tokenizer, config.max_total_sequence_length, "the checkpoint")
    return LoadedModel(model, tokenizer, files, "the checkpoint", files)


def _require_adapter_in_both(reader: Reader, config: EngineConfig) -> None:
    saved = f"weights/{lora.ADAPTER_CONFIG}" in reader.files()
    if saved and config.lora is None:
        raise ResumeRefused(
            "the checkpoint holds an adapter, and the configuration has no lora section. To train all weights, merge "
            "it (surefoot ckpt export step_N FOLDER --merge) and start a new run with FOLDER as model_name"
        )
    if config.lora is not None and not saved:
        raise ResumeRefused(
            "the checkpoint holds a whole model, and the configuration has a lora section. To train an adapter on "
            "these weights, start a new run with the checkpoint's policy/weights as model_name"
        )


def load_tokenizer_from_checkpoint(reader: Reader) -> Any:
    """The tokenizer, with its chat template, that the checkpoint was made with. `reader`: of the engine's folder."""
    with unpacked(_small_files_of(reader)) as folder, _loading("the checkpoint's tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _small_files_of(reader: Reader) -> dict[str, bytes]:
    weights = reader.under("weights")
    return {name: weights.bytes(name) for name in weights.files() if not name.endswith(".safetensors")}


def load_tokenizer(config: EngineConfig) -> Any:
    """The configured tokenizer with the configured chat template. No token is ever added to it.

    Raises:
        ModelError: tokenizer or template cannot be found or loaded.
    """
    name = config.tokenizer.name or config.model_name
    assert name is not None
    folder = _resolve(name, "policy.tokenizer.name" if config.tokenizer.name else "policy.model_name")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(
            f"{name} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}): expected a folder or hub name that has "
            "one, as policy.tokenizer.name"
        )
    with _loading(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if config.tokenizer.chat_template is not None:
        tokenizer.chat_template = _template(config.tokenizer.chat_template)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        logger.info(
            "the tokenizer of %s has no pad token: %r (end of sequence) stands in. Padding is masked by "
            "length, so a real end of sequence is still trained on",
            name,
            tokenizer.eos_token,
        )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_fits(model: Any, tokenizer: Any, max_total_sequence_length: int, source: str) -> None:
    """Raises `ModelError` when the tokenizer has ids that the model lacks, or rows may be longer than it can read."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= rows:
        raise ModelError(
            f"the tokenizer has ids up to {highest} but {source} has embeddings for {rows} tokens: use the "
            "model's own tokenizer, or a model with at least as many embeddings"
        )
    _check_length(model.config, max_total_sequence_length, source)


def check_folder(config: EngineConfig, kind: Kind = "causal_lm", key: str = "policy.model_name") -> None:
    """What the small files of the model's folder tell, so that it shows before all the data is read. `key`: where the
    configuration names it.

    Raises:
        ModelError: the folder holds no model that can be trained, or rows may be longer than the model can read.
    """
    if config.model_name is not None:
        hf_config = _trainable_config(_resolve(config.model_name, key), kind)
        _check_length(hf_config, config.max_total_sequence_length, config.model_name)


def check_adapter(config: EngineConfig, tokenizer: Any, kind: Kind = "causal_lm") -> None:
    """Whether the adapter fits the model, which its shape alone tells: no weight is read or drawn.

    Raises:
        ModelError: as `lora.check` does, or the model cannot be made.
    """
    if config.lora is None:
        return
    if config.model_init is not None:
        hf_config = _initial_config(config.model_init, tokenizer, kind)
    else:
        assert config.model_name is not None
        hf_config = _trainable_config(_resolve(config.model_name, "policy.model_name"), kind)
        if kind == "scalar":
            _as_scalar(hf_config, tokenizer)
    with _loading(f"a model of type {hf_config.model_type}"), torch.device("meta"):
        shape = _auto(kind).from_config(hf_config, dtype=torch.float32)
    lora.check(shape, config.lora, score=kind == "scalar")


def check_base(config: EngineConfig) -> None:
    """Raises `ModelError`, saying how to name its new place, when the base beneath a saved adapter is not there."""
    if config.model_name is None:
        return
    try:
        _resolve(config.model_name, "policy.model_name")
    except ModelError as error:
        raise ModelError(
            f"{error}. It is the base that the adapter was trained on: put it back; or if it has moved, say where it "
            "is now, to surefoot resume by policy.model_name=FOLDER --allow policy.model_name, else by --base FOLDER"
        ) from error


def weights_fingerprint(config: EngineConfig) -> str | None:
    """Of the files that `load` would take the weights from, bit by bit, without loading them; `None` where they are
    drawn. Raises `ModelError` when there is no such folder."""
    if config.model_name is None:
        return None
    folder = _resolve(config.model_name, "policy.model_name")
    digest = xxhash.xxh3_128()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}\n".encode())
    return digest.hexdigest()


def require_same_tokenizer(policy: Any, other: Any, name: str) -> None:
    """Raises `ModelError`, naming the first differences, when another model's tokenizer gives a token another id than
    the policy's, or has other special tokens: one id would mean two things."""
    ours, theirs = _ids_by_name(policy), _ids_by_name(other)
    differing = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n, "absent") != theirs.get(n, "absent"))
    if differing:
        shown = [f"{n!r} is {ours.get(n, 'absent')} here and {theirs.get(n, 'absent')} there" for n in differing[:5]]
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ModelError(
            f"{name}: its tokenizer is not the policy's: {'; '.join(shown)}{more}. Two models can be compared over the "
            "same token ids alone: use one with this very tokenizer"
        )


def has_same_tokenizer(policy: Any, other: Any) -> bool:
    """Whether each token has one id in both, and the special ones are the same."""
    return _ids_by_name(policy) == _ids_by_name(other)


def require_same_shapes(weights: Mapping[str, Tensor], others: Mapping[str, Tensor], name: str, other: str) -> None:
    """Raises `ModelError`, naming the first differences, when one model's weights cannot be mixed into another's."""
    ours, theirs = ({n: tuple(t.shape) for n, t in each.items()} for each in (weights, others))
    differing = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if differing:
        shown = "; ".join(f"{n}: {ours.get(n, 'absent')}, not {theirs.get(n, 'absent')}" for n in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ModelError(
            f"{name} is to follow {other}, so its weights must have the same names and shapes; {shown}{more}. Take a "
            "model of the same architecture and size, or let it stay as it is"
        )


def _ids_by_name(tokenizer: Any) -> dict[str, Any]:
    """Tokens, added ones included, and the special ones by their roles."""
    roles = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad", "unk")}
    return {**tokenizer.get_vocab(), **roles}


def longest_row(config: EngineConfig) -> int | None:
    """Tokens that the model reads at most, by its `config.json`; `None` where there is none, or it does not say."""
    folder = _resolve(str(config.model_name), "policy.model_name")
    if not (folder / "config.json").is_file():
        return None
    with _loading(f"{folder / 'config.json'}"):
        return _limit(_config_in(folder))


def _limit(hf_config: Any) -> int | None:
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def _check_length(hf_config: Any, max_total_sequence_length: int, source: str) -> None:
    limit = _limit(hf_config)
    if limit is not None and limit < max_total_sequence_length:
        raise ModelError(
            f"max_total_sequence_length is {max_total_sequence_length} but {source} reads at most {limit} "
            "tokens (its max_position_embeddings): lower max_total_sequence_length"
        )


def resolve_device(name: str) -> torch.device:
    """`auto` takes cuda, else mps, else cpu. Raises `ModelError` when what was asked for is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, available in there.items() if available))
    if not there[name]:
        raise ModelError(f"device {name} was asked for and is not available here: expected auto or cpu")
    return torch.device(name)


def _resolve(name: str, key: str) -> Path:
    """The local folder for a path or a hub name, downloading it if need be."""
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 (Path's raises for an unknown user)
    if os.path.isdir(folder):  # noqa: PTH112 (and here, for a name that is no path at all)
        return folder
    if os.path.isfile(folder):  # noqa: PTH113
        hint = "; turn a GGUF file into a folder with: surefoot model import" if folder.suffix == ".gguf" else ""
        raise ModelError(f"{key}: {name} is a file; expected a folder or a hub name{hint}")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{key}: there is no folder {folder.absolute()}")
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:
        raise ModelError(
            f"{key}: {name} is neither a folder under {Path.cwd()} nor in the local hub cache, and it "
            f"could not be downloaded ({str(error).splitlines()[0]}). Give a local folder, or download it "
            f"first on a machine with network: hf download {name}"
        ) from error


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Whatever a broken file makes a library raise becomes an error that says which file. No progress bars, and no
    table of missing and unexpected tensors: callers say or refuse what is in it."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    # Where the first is told to be quiet, the second lists all layers that several processes would not share.
    silent = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "distributed.tensor_parallel")]
    levels = [each.level for each in silent]
    for each in silent:
        each.setLevel(logging.ERROR)
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = "it needs Python code of its own, and none is ever run" if "trust_remote_code" in str(error) else error
        raise ModelError(f"{what} cannot be loaded: {reason}") from error
    finally:
        for each, level in zip(silent, levels, strict=True):
            each.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _auto(kind: Kind) -> Any:
    return AutoModelForCausalLM if kind == "causal_lm" else AutoModelForSequenceClassification


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Random weights that neither depend on the global random state nor change it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "init"))
        yield


def _config_in(folder: Path) -> Any:
    """Asks nobody whether code in the folder may run: it may not."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _trainable_config(folder: Path, kind: Kind) -> Any:
    """The configuration in a folder, once that is known to be a model's whose weights can be read and trained."""
    if (folder / lora.ADAPTER_CONFIG).exists():
        raise ModelError(f"{folder} holds an adapter; expected a whole model: merge the adapter into its base first")
    if (folder / "manifest.json").exists() and (folder / "policy" / "weights").is_dir():
        raise ModelError(f"{folder} is a checkpoint; name the model in it: {folder / 'policy' / 'weights'}")
    if not any(folder.glob("*.safetensors")):
        others = ", ".join(sorted(file.name for file in folder.glob("*.bin"))) or "no weights"
        raise ModelError(
            f"the model in {folder} cannot be loaded: expected .safetensors files, found {others}. Pickled weights are "
            "never read: save the model anew with save_pretrained"
        )
    with _loading(f"the model in {folder}"):
        hf_config = _config_in(folder)
    if kind == "scalar":
        _require_score_head_of(hf_config)
    elif type(hf_config) not in _auto(kind)._model_mapping:
        raise ModelError(f"the model in {folder} is of type {hf_config.model_type}; expected a causal language model")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ModelError(f"the model in {folder} is quantized; expected float weights, which can be trained")
    return hf_config


def _pretrained(folder: Path, tokenizer: Any, seed: int | None, kind: Kind, restored: bool) -> Any:
    hf_config = _trainable_config(folder, kind)
    with _loading(f"the model in {folder}"), _drawn_from(seed or 0):
        if kind == "scalar":
            _as_scalar(hf_config, tokenizer)
        model, report = _auto(kind).from_pretrained(
            folder,
            config=hf_config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if kind == "scalar" and missing == ["score.weight"] and seed is not None:
        if not restored:
            logger.info("%s has no score head: a new one is drawn from the run's seed", folder)
    elif missing:
        raise ModelError(
            f"the weights in {folder} lack {len(missing)} tensors that {type(model).__name__} needs and "
            f"that would be random: {', '.join(missing[:5])}"
        )
    unexpected = sorted(key for key in report["unexpected_keys"] if kind == "causal_lm" or "lm_head" not in key)
    if unexpected:
        logger.warning(
            "the weights in %s hold %d tensors that %s does not use: %s",
            folder,
            len(unexpected),
            type(model).__name__,
            ", ".join(unexpected[:5]),
        )
    # Names in the file follow from the architecture alone, not from the file that was loaded.
    model._weight_conversions = None
    return model


def _require_score_head_of(hf_config: Any) -> None:
    if type(hf_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"Transformers has no model of type {hf_config.model_type} with a score head: use another model"
        )


def _as_scalar(hf_config: Any, tokenizer: Any) -> None:
    """One label, and a pad token that ends no row: Transformers takes a row's last token that is not the pad token for
    its end, and would read the score one token early. Without a pad token it reads single rows, and refuses several."""
    _require_score_head_of(hf_config)
    hf_config.num_labels = 1
    text = hf_config.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = tokenizer.pad_token_id
    if text.pad_token_id == tokenizer.eos_token_id:
        text.pad_token_id = None


def _check_score(model: Any, source: str) -> None:
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ModelError(f"{source}: a {type(model).__name__} has no score head with one output, so it gives no scalar")


def _random(model_init: Mapping[str, Any], tokenizer: Any, seed: int, kind: Kind) -> Any:
    hf_config = _initial_config(model_init, tokenizer, kind)
    with _loading(f"model_init ({model_init})"), _drawn_from(seed):
        model = _auto(kind).from_config(hf_config, dtype=torch.float32)
    model.eval()
    return model


def _initial_config(model_init: Mapping[str, Any], tokenizer: Any, kind: Kind) -> Any:
    """Where `model_init` is silent, the vocabulary's size and the special tokens' ids are the tokenizer's."""
    settings = dict(model_init)
    model_type = settings.pop("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        raise ModelError(f"model_init.model_type: Transformers knows no {model_type!r}" + _did_you_mean(near))
    defaults = CONFIG_MAPPING[model_type]
    known = {*defaults().to_dict(), *defaults.attribute_map, "num_labels", "rope_theta", "rope_scaling"}
    for key in settings.keys() - known:
        near = difflib.get_close_matches(key, known, n=1)
        raise ModelError(f"model_init.{key}: {model_type} has no such setting" + _did_you_mean(near))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        settings.setdefault(name, getattr(tokenizer, name))
    settings.setdefault("vocab_size", max(tokenizer.get_vocab().values()) + 1)
    with _loading(f"model_init ({model_init})"):
        hf_config = AutoConfig.for_model(model_type, **settings)
        if kind == "scalar":
            _as_scalar(hf_config, tokenizer)
    return hf_config


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _template(given: str) -> str:
    """Jinja text as it stands, or the text of the file it names."""
    if "{" in given or "\n" in given:
        return given
    path = Path(os.path.expanduser(given))  # noqa: PTH111 (Path's raises for an unknown user)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(
            f"tokenizer.chat_template: {path.absolute()} cannot be read ({why}); expected a Jinja file or its text"
        ) from error


def _require_finite(model: Any, source: str) -> None:
    bad = [name for name, tensor in model.state_dict().items() if not bool(tensor.isfinite().all())]
    if bad:
        raise ModelError(
            f"{source} holds NaN or infinite values in {len(bad)} tensors ({', '.join(bad[:5])}): a model like that "
            "cannot be trained, nor saved. Get its files anew, or train from an earlier state of it"
        )


@torch.no_grad()
def _require_causal(model: Any, source: str) -> None:
    """Transformers gives a causal head to models that read in both directions, too: their loss would learn to copy."""
    last = model.get_input_embeddings().weight.shape[0] - 1
    ids, mask = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]]).clamp(max=last), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    try:
        whole, beginning = (
            model(input_ids=i[None], attention_mask=m[None], use_cache=False).logits[0, :2]
            for i, m in zip(ids, mask, strict=True)
        )
    except Exception as error:
        raise ModelError(f"{source}: its settings make a model that cannot run ({error})") from error
    if float((whole - beginning).abs().max()) > 1e-4 * float(whole.abs().max()):
        raise ModelError(
            f"{source}: what {type(model).__name__} predicts depends on later tokens, or on padding; expected a causal "
            "language model (BERT and its kin are one only with is_decoder: true)"
        )


def _own_storage(model: Any) -> None:
    """Loaded tensors may be windows on the file: training must not depend on a file that others can change."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _agree_on_tying(model: Any) -> None:
    """Make the configuration's flag true: a file with two different embeddings is not tied, whatever it claims."""
    head = model.get_output_embeddings()
    if head is None:
        return
    tied = head.weight is model.get_input_embeddings().weight
    if bool(getattr(model.config, "tie_word_embeddings", False)) != tied:
        logger.warning("tie_word_embeddings is set to %s: that is what the loaded weights are", tied)
        model.config.tie_word_embeddings = tied
