"""What is loaded, what is refused before anything is trained, and what a checkpoint's folder holds."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.config import EngineConfig
from surefoot.engine import models
from surefoot.errors import CheckpointError, ModelError
from tests.engine import tiny
from tests.helpers.memory_store import MemoryReader, saved
from tests.helpers.tokenizers import byte_level, gpt2_like, words


def load(configuration: EngineConfig, seed: int = 7, **options: Any) -> models.LoadedModel:
    return models.load(configuration, tokenizer=models.load_tokenizer(configuration), seed=seed, **options)


def from_folder(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model_name=str(folder), max_total_sequence_length=32, device="cpu", **settings)


def exported(configuration: EngineConfig, folder: Path) -> Path:
    """The weights folder of a checkpoint, as files."""
    engine, _ = tiny.engine(configuration)
    write_out(saved(engine), folder)
    return folder


def write_out(reader: MemoryReader, folder: Path) -> None:
    for name in reader.under("weights").files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(reader.under("weights").bytes(name))


# ------------------------------------------------------------------------------------------------------ random weights


def test_random_weights_follow_from_the_seed_alone(tmp_path: Path) -> None:
    configuration = tiny.config(tmp_path)
    torch.manual_seed(1)
    first, state = load(configuration).model.state_dict(), torch.random.get_rng_state()
    torch.manual_seed(2)
    second, other = load(configuration).model.state_dict(), load(configuration, seed=8).model.state_dict()
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_what_model_init_leaves_open_is_the_tokenizers(tmp_path: Path) -> None:
    config = load(tiny.config(tmp_path)).model.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (32, 1, 3)
    chosen = {**tiny.ARCHITECTURES["untied llama"], "vocab_size": 40, "eos_token_id": 5}
    config = load(tiny.config(tmp_path, model_init=chosen)).model.config
    assert (config.vocab_size, config.eos_token_id) == (40, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": ["llama"]}, "Transformers knows no"),
        ({"model_type": "lama"}, "no 'lama'; did you mean .*llama"),
        ({"hiden_size": 8}, "model_init.hiden_size: llama has no such setting; did you mean hidden_size"),
        ({"hidden_size": "wide"}, "model_init .*hidden_size"),
        ({"num_attention_heads": 3}, "model_init "),
        ({"vocab_size": 31}, "ids up to 31 but .* embeddings for 31 tokens"),
        ({"max_position_embeddings": 31}, "max_total_sequence_length is 32 .* at most 31"),
    ],
)
def test_a_wrong_model_init_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(tiny.config(tmp_path, model_init={**tiny.ARCHITECTURES["untied llama"], **change}))


# ------------------------------------------------------------------------------------------------------ from a folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_float32_and_their_own(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    file = folder / "model.safetensors"
    tensors = {name: t.to(dtype).clone() for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt", "shifts": "what follows"})
    loaded = load(from_folder(folder))
    size = file.stat().st_size
    with file.open("r+b") as raw:  # others may do so while the run goes on, also in place
        raw.write(bytes(size))
    state = loaded.model.state_dict()
    assert {t.data_ptr() % 64 for t in state.values()} == {0}  # where it would lie in a resumed run
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert all(torch.equal(state[name], t.float()) for name, t in tensors.items())
    assert json.loads(loaded.files["config.json"])["dtype"] == "float32"


@pytest.mark.parametrize("name", ["no/such-model", "no-such-model"])
def test_a_hub_name_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"policy.model_name: {name} is neither a folder .* hf download {name}"):
        load(EngineConfig(model_name=name))
    with pytest.raises(ModelError, match=f"policy.tokenizer.name: {name} is neither"):
        folder = tiny.base_folder(tmp_path / "base")
        load(from_folder(folder, tokenizer={"name": name}))


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for name, text in (("model.gguf", "is a file.*surefoot model import"), ("missing", "there is no folder")):
        with pytest.raises(ModelError, match=text):
            load(from_folder(tmp_path / name))
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer \(none of tokenizer.json.*policy.tokenizer.name"):
        load(from_folder(tmp_path))
    with pytest.raises(ModelError, match=r"cannot be loaded: expected .safetensors files, found no weights"):
        models.check_folder(from_folder(tmp_path))


def test_a_checkpoint_is_told_from_the_model_in_it(tmp_path: Path) -> None:
    tiny.base_folder(tmp_path / "policy" / "weights")
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ModelError, match=r"is a checkpoint; name the model in it: .*/policy/weights$"):
        models.check_folder(from_folder(tmp_path))


def broken(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "missing tensor":
        tensors = load_file(weights)
        del tensors["lm_head.weight"], tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "pickled weights":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    elif how == "malformed config":
        config.write_text("{")
    elif how == "other shapes":
        config.write_text(config.read_text().replace('"intermediate_size": 24', '"intermediate_size": 20'))
    elif how == "quantized":
        values = json.loads(config.read_text())
        config.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    elif how == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif how == "malformed generation":
        (folder / "generation_config.json").write_text('{"eos_token_id": [2,')
    elif how == "generation list":
        (folder / "generation_config.json").write_text("[1]")
    elif how == "code of its own":
        values = json.loads(config.read_text())
        own = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
        config.write_text(json.dumps({**values, "model_type": "mine", "auto_map": own}))
    elif how == "another kind":
        config.write_text('{"model_type": "t5"}')
    elif how in ("nan", "inf"):
        tensors = load_file(weights)
        tensors["model.embed_tokens.weight"][7, 0] = float(how)
        save_file(tensors, weights, {"format": "pt"})
    elif how == "impossible generation":
        (folder / "generation_config.json").write_text('{"max_new_tokens": -1}')


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing tensor", "lack 2 tensors that LlamaForCausalLM needs .* lm_head.weight, model.norm.weight"),
        ("truncated weights", "cannot be loaded"),
        ("pickled weights", "cannot be loaded: expected .safetensors files, found pytorch_model.bin"),
        ("code of its own", "cannot be loaded: it needs Python code of its own, and none is ever run"),
        ("another kind", "is of type t5; expected a causal language model"),
        ("nan", r"NaN or infinite values in 1 tensors \(model.embed_tokens.weight\)"),
        ("inf", r"NaN or infinite values in 1 tensors \(model.embed_tokens.weight\)"),
        ("malformed config", "cannot be loaded"),
        ("other shapes", "cannot be loaded"),
        ("quantized", "quantized"),
        ("adapter", "adapter.*merge"),
        ("malformed generation", "generation_config.json is malformed"),
        ("generation list", "generation_config.json is malformed: expected a JSON object, found list"),
        ("impossible generation", "generation_config.json is malformed"),
    ],
)
def test_a_broken_folder_is_refused_at_the_start(tmp_path: Path, how: str, words: str) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    broken(folder, how)
    with pytest.raises(ModelError, match=words) as refused:
        load(from_folder(folder))
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("how", ["pickled weights", "malformed config", "quantized", "adapter", "another kind", "long"])
def test_what_small_files_tell_shows_before_the_data_is_read(tmp_path: Path, how: str) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    models.check_folder(from_folder(folder))
    broken(folder, how)
    length = 65 if how == "long" else 32
    with pytest.raises(ModelError):
        models.check_folder(EngineConfig(model_name=str(folder), max_total_sequence_length=length))


def test_nobody_is_asked_whether_a_folders_code_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks on the terminal, and runs the code on a `y`."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 1)
    folder = tiny.base_folder(tmp_path / "base")
    broken(folder, "code of its own")
    with pytest.raises(ModelError, match="none is ever run"):
        models.check_folder(from_folder(folder))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, **own}))
    with pytest.raises(ModelError, match="none is ever run"):
        models.load_tokenizer(from_folder(folder))


def test_a_model_that_reads_both_ways_is_refused(tmp_path: Path) -> None:
    """Transformers gives it a causal head all the same, with a warning in its log."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    bert = {"model_type": "bert", **sizes, "max_position_embeddings": 64, "initializer_range": 0.3}
    with pytest.raises(ModelError, match=r"depends on later tokens, or on padding.*is_decoder: true"):
        load(tiny.config(tmp_path, model_init=bert))
    models._require_causal(load(tiny.config(tmp_path, model_init={**bert, "is_decoder": True})).model, "bert")


def test_settings_that_make_a_model_which_cannot_run(tmp_path: Path) -> None:
    init = {**tiny.ARCHITECTURES["capped logits"], "num_attention_heads": 4, "num_key_value_heads": 3}
    with pytest.raises(ModelError, match=r"cannot run \(.*size of tensor"):
        load(tiny.config(tmp_path, model_init=init))


def test_a_balancing_loss_that_is_not_trained_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    init = {**tiny.ARCHITECTURES["experts one by one"], "output_router_logits": True}
    load(tiny.config(tmp_path, model_init=init))
    assert "balancing loss is no part of training" in caplog.text


def test_tensors_nobody_reads_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors") | {"value_head.weight": torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    load(from_folder(folder))
    assert "value_head.weight" in caplog.text


def test_a_score_head_is_drawn_from_the_seed(tmp_path: Path) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    a, b = (load(from_folder(folder), kind="scalar").model for _ in range(2))
    assert a.score.weight.shape == (1, 16)
    assert torch.equal(a.score.weight, b.score.weight)
    assert not torch.equal(a.score.weight, load(from_folder(folder), seed=8, kind="scalar").model.score.weight)


# ---------------------------------------------------------------------------------------------------------- tokenizers


def test_a_sound_model_loads_without_a_word(tmp_path: Path) -> None:
    """Transformers' own messages go to the terminal, not to the run's log."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        load(from_folder(tiny.base_folder(tmp_path / "base")))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert said == []


def test_no_pad_token_is_settled_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = gpt2_like()
    folder = tiny.base_folder(tmp_path / "base", tokenizer=tokenizer)
    loaded = models.load_tokenizer(from_folder(folder))
    assert loaded.pad_token_id == loaded.eos_token_id == tokenizer.eos_token_id
    assert len(loaded) == len(tokenizer)
    assert "no pad token" in caplog.text


def test_chat_template_from_text_and_file(tmp_path: Path) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)
    for given in (text, str(tmp_path / "own.jinja")):
        configuration = from_folder(folder, tokenizer={"chat_template": given})
        assert load(configuration).files["chat_template.jinja"].decode() == text
    with pytest.raises(ModelError, match=r"cannot be read .* expected a Jinja file"):
        models.load_tokenizer(from_folder(folder, tokenizer={"chat_template": "missing.jinja"}))


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    larger = tiny.tokenizer_folder(tmp_path / "larger", words([f"w{i}" for i in range(29)]))
    with pytest.raises(ModelError, match=r"ids up to 32 but .* 32 tokens"):
        load(from_folder(folder, tokenizer={"name": str(larger)}))


def test_a_tokenizer_that_others_would_read_as_another(tmp_path: Path) -> None:
    """Beside a qwen2 model, Transformers takes any tokenizer for Qwen2's, and splits and numbers text differently."""
    init = {**tiny.ARCHITECTURES["tied llama"], "model_type": "qwen2"}
    with pytest.raises(ModelError, match="of type qwen2 Transformers reads this tokenizer as Qwen2Tokenizer"):
        load(tiny.config(tmp_path, model_init=init))
    folder = tiny.base_folder(tmp_path / "base", "tied llama", tokenizer=byte_level(), vocab_size=400)
    config = (folder / "config.json").read_text().replace('"llama"', '"qwen2"').replace("LlamaFor", "Qwen2For")
    (folder / "config.json").write_text(config)
    own = tiny.tokenizer_folder(tmp_path / "own", AutoTokenizer.from_pretrained(folder))
    configuration = tiny.config(tmp_path, model_init=init, tokenizer={"name": str(own)})
    assert load(configuration).model.config.vocab_size == 320
    assert exported(configuration, tmp_path / "out").is_dir()


# ----------------------------------------------------------------------------------------------- the folder, read alone


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_the_folder_loads_alone_with_equal_logits(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """J1: tied and untied, renamed and rearranged weights; nothing newly initialised, no other tensor left over."""
    configuration = tiny.config(tmp_path, name)
    live = load(configuration).model
    folder = exported(configuration, tmp_path / "out")
    fresh, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"]
    ids = torch.randint(0, 32, (2, 9))
    torch.testing.assert_close(fresh(ids).logits, live(ids).logits, rtol=0, atol=1e-6)
    written = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tied = bool(fresh.config.tie_word_embeddings)
    assert tied == (fresh.get_output_embeddings().weight is fresh.get_input_embeddings().weight)
    assert sum(t.numel() for t in written.values()) == sum(p.numel() for p in live.parameters())
    assert config["architectures"] == [type(live).__name__]
    assert config["dtype"] == "float32"
    # The names are those that Transformers itself writes.
    live.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[n], theirs[n]) for n in theirs)


def test_two_embeddings_under_a_flag_that_says_one(tmp_path: Path) -> None:
    """Transformers leaves them apart; the flag in our folder must say so, or other readers would drop the head."""
    folder = tiny.base_folder(tmp_path / "base", "tied llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    out = exported(from_folder(folder), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_undeclared_sharing_is_refused(tmp_path: Path) -> None:
    configuration = tiny.config(tmp_path)
    loaded = load(configuration)
    layers = loaded.model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(ModelError, match="shares tensors"):
        models.weights_by_name(loaded.model)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level(adds_bos=True), gpt2_like(), tiny.TOKENIZER])
def test_the_tokenizer_comes_back_as_it_was(tmp_path: Path, tokenizer: Any) -> None:
    """J4: ids, special tokens, added tokens and the rendered chat."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    folder = tiny.base_folder(tmp_path / "base", tokenizer=tokenizer)
    base = AutoTokenizer.from_pretrained(folder)
    out = exported(from_folder(folder), tmp_path / "out")
    again = AutoTokenizer.from_pretrained(out)
    for text in ("what is 2 + 3? <tool> it is 5<|im_end|>", "w1 w2 w3", "日本語 \n\n x"):
        assert again(text).input_ids == base(text).input_ids
    assert again.get_vocab() == base.get_vocab()
    assert again.chat_template == base.chat_template
    if base.chat_template:
        chat = [{"role": "user", "content": "what is 2?"}, {"role": "assistant", "content": "2"}]
        assert again.apply_chat_template(chat, tokenize=False) == base.apply_chat_template(chat, tokenize=False)


def test_generation_settings_are_copied_unchanged(tmp_path: Path) -> None:
    """J3: from the base, and from a run that was itself started from a checkpoint's folder; without one, none."""
    folder = tiny.base_folder(tmp_path / "base")
    data = b'{"eos_token_id": [2,5],\n "pad_token_id": 3}'
    (folder / "generation_config.json").write_bytes(data)
    first = exported(from_folder(folder), tmp_path / "first")
    second = exported(from_folder(first), tmp_path / "second")
    assert (first / "generation_config.json").read_bytes() == data
    assert (second / "generation_config.json").read_bytes() == data
    assert AutoModelForCausalLM.from_pretrained(second).generation_config.eos_token_id == [2, 5]
    (folder / "generation_config.json").unlink()
    third = exported(from_folder(folder), tmp_path / "third")
    assert not (third / "generation_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(third).generation_config.eos_token_id == 3


def test_odd_generation_settings_are_said_early_and_lose_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """J6."""
    folder = tiny.base_folder(tmp_path / "base")
    data = b'{"do_sample": false, "temperature": 0.9}'
    (folder / "generation_config.json").write_bytes(data)
    load(from_folder(folder))
    assert "temperature" in caplog.text
    out = exported(from_folder(folder), tmp_path / "out")
    assert (out / "generation_config.json").read_bytes() == data
    AutoModelForCausalLM.from_pretrained(out)


def test_sampling_settings_inside_config_json(tmp_path: Path) -> None:
    """Old models keep them there. Transformers moves them out, so they get a file of their own."""
    folder = tiny.base_folder(tmp_path / "base")
    (folder / "generation_config.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "temperature": 0.9, "do_sample": False}))
    fresh = AutoModelForCausalLM.from_pretrained(exported(from_folder(folder), tmp_path / "out"))
    assert fresh.generation_config.temperature == 0.9
    assert fresh.generation_config.eos_token_id == 3


# ---------------------------------------------------------------------------------------------------- from a checkpoint


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_a_checkpoint_is_enough(tmp_path: Path, name: str) -> None:
    configuration = tiny.config(tmp_path, name)
    engine, _ = tiny.engine(configuration)
    reader = saved(engine)
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    tokenizer = models.load_tokenizer_from_checkpoint(reader)
    loaded = models.load_from_checkpoint(reader, configuration, tokenizer)
    assert loaded.files == dict(engine._files)
    assert tokenizer.get_vocab() == tiny.TOKENIZER.get_vocab()
    ids = torch.randint(0, 32, (2, 9))
    assert torch.equal(loaded.model(ids).logits, engine.model(ids).logits)
    live = engine.weights()
    again = models.weights_by_name(loaded.model)
    assert again.keys() == live.keys()
    assert all(torch.equal(again[n], live[n]) for n in live)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    reader = saved(tiny.engine(tiny.config(tmp_path))[0])
    wider = {**tiny.ARCHITECTURES["untied llama"], "intermediate_size": 40}
    other = saved(tiny.engine(tiny.config(tmp_path, model_init=wider))[0])
    mixed = dict(reader._contents) | {"weights/model.safetensors": other._contents["weights/model.safetensors"]}
    with pytest.raises(CheckpointError, match=r"\[40, 16\], not torch.float32 \[24, 16\]"):
        models.load_from_checkpoint(MemoryReader(mixed), tiny.config(tmp_path), tiny.TOKENIZER)


def test_devices() -> None:
    assert models.resolve_device("auto").type in {"cpu", "cuda", "mps"}
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="cuda was asked for"):
            models.resolve_device("cuda")


def test_a_chat_template_that_is_no_text(tmp_path: Path) -> None:
    folder = tiny.base_folder(tmp_path / "base")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, why in ((tmp_path / "binary", "not UTF-8"), (tmp_path, "directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(ModelError, match=why):
            models.load_tokenizer(from_folder(folder, tokenizer={"chat_template": str(path)}))
