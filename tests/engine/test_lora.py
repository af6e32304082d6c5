"""LoRA: adapter folders that peft reads alone, merges equal to the live model, exact resumes, the base beneath."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close as close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from surefoot.config import EngineConfig, LoraConfig
from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine import models
from surefoot.engine.local import LocalEngine
from surefoot.engine.lora import adapter_weights
from surefoot.errors import ModelError, ResumeRefused
from surefoot.losses.reward import RewardLoss
from surefoot.types import Head, Objective
from tests.engine import tiny
from tests.engine.tiny import NLL_OBJECTIVE
from tests.helpers.memory_store import CloningStager, MemoryReader, saved
from tests.helpers.tokenizers import byte_level, gpt2_like

LENGTHS = [3, 5, 4, 7]
IDS = torch.arange(18).reshape(2, 9)
EMBEDDINGS = {"target_modules": ["all-linear", "embed_tokens", "lm_head"]}
GPT2_EMBEDDINGS = {"target_modules": ["all-linear", "wte"]}
IN_FULL = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("untied llama", {}),
    ("untied llama", EMBEDDINGS),
    ("untied llama", IN_FULL),
    ("tied llama", {}),
    ("tied llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("tied llama", {"target_modules": ["q_proj", "lm_head"]}),
    ("tied llama", {"modules_to_save": ["embed_tokens"]}),
    ("tied qwen3", EMBEDDINGS),
    ("tied qwen3", {**IN_FULL, "exclude_modules": ["layers.0.*"], "dropout": 0.1}),
    ("gpt2", {}),
    ("gpt2", GPT2_EMBEDDINGS),
    ("gpt2", {"modules_to_save": ["wte", "ln_f"]}),
    ("renamed head", {}),
    ("experts one by one", {}),
]


def configured(folder: Path, name: str, lora: dict[str, Any] | None, **settings: Any) -> EngineConfig:
    base = folder / "base"
    if not base.exists():
        tiny.base_folder(base, name, initializer_range=0.3)
    lora = None if lora is None else {"dim": 4, "alpha": 8, **lora}
    return tiny.config(folder, name, model_init=None, model_name=str(base), lora=lora, tokenizer={}, **settings)


def engine_of(
    configuration: EngineConfig, plane: MemoryPlane, *, seed: int = 7, kind: models.Kind = "causal_lm"
) -> LocalEngine:
    tokenizer = models.load_tokenizer(configuration)
    loaded = models.load(configuration, tokenizer=tokenizer, seed=seed, kind=kind)
    return LocalEngine(loaded.model, loaded.files, configuration, plane, CloningStager(), seed=seed)


def trained(configuration: EngineConfig) -> tuple[LocalEngine, MemoryPlane]:
    plane = MemoryPlane()
    engine = engine_of(configuration, plane)
    for step in range(3):
        engine.train(tiny.rows(plane, LENGTHS, seed=step), NLL_OBJECTIVE)
    engine.model.eval()
    return engine, plane


def on_disk(reader: MemoryReader, folder: Path) -> Path:
    for name in reader.under("weights").files():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(reader.bytes(f"weights/{name}"))
    return folder


def merged(reader: MemoryReader, configuration: EngineConfig, folder: Path, kind: models.Kind = "causal_lm") -> Path:
    tokenizer = models.load_tokenizer_from_checkpoint(reader)
    whole = models.merged(models.load_from_checkpoint(reader, configuration, tokenizer, seed=7, kind=kind))
    folder.mkdir()
    for name, data in whole.files.items():
        (folder / name).write_bytes(data)
    save_file({n: t.contiguous() for n, t in models.weights_by_name(whole.model).items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits
    return found


# ------------------------------------------------------------------------------------------------------- the folders


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_peft_reads_the_folder_alone_and_a_merge_equals_it(tmp_path: Path, name: str, lora: dict[str, Any]) -> None:
    configuration = configured(tmp_path, name, lora)
    engine, _ = trained(configuration)
    reader = saved(engine)
    live, base = logits(engine.model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    assert (live - base).abs().max() > 1e-2
    folder = on_disk(reader, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        warnings.filterwarnings("error", message=".*unexpected keys")
        alone = AutoPeftModelForCausalLM.from_pretrained(folder)
        put_on = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)
    assert torch.equal(logits(alone), live)
    assert torch.equal(logits(put_on), live)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny.TOKENIZER.get_vocab()
    plain = merged(reader, configuration, tmp_path / "merged")
    fresh, report = AutoModelForCausalLM.from_pretrained(plain, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"]
    close(logits(fresh), live, rtol=0, atol=1e-5)
    assert (plain / "generation_config.json").read_bytes() == (tmp_path / "base/generation_config.json").read_bytes()


@pytest.mark.parametrize(("name", "lora"), CASES[:1] + CASES[3:4] + CASES[9:11])
def test_the_folder_is_the_one_that_peft_writes(tmp_path: Path, name: str, lora: dict[str, Any]) -> None:
    configuration = configured(tmp_path, name, lora)
    loaded = models.load(configuration, tokenizer=models.load_tokenizer(configuration), seed=7)
    loaded.adapter.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    engine = LocalEngine(loaded.model, loaded.files, configuration, MemoryPlane(), CloningStager(), seed=7)
    ours = on_disk(saved(engine), tmp_path / "ours")
    a, b = load_file(ours / "adapter_model.safetensors"), load_file(tmp_path / "theirs/adapter_model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    settings = [json.loads((folder / "adapter_config.json").read_text()) for folder in (ours, tmp_path / "theirs")]
    for found in settings:
        found["target_modules"].sort()
    assert settings[0] == settings[1]
    assert not (ours / "config.json").exists()


def test_equal_adapters_have_equal_bytes_whatever_python_hashes(tmp_path: Path) -> None:
    """Sets come in another order in each process; the file's order is its own."""
    configuration = configured(tmp_path, "untied llama", EMBEDDINGS)
    names = json.loads(saved(engine_of(configuration, MemoryPlane())).bytes("weights/adapter_config.json"))
    assert len(names["target_modules"]) > 10
    assert names["target_modules"] == sorted(names["target_modules"])


# ------------------------------------------------------------------------------------------------------ what is adapted


def adapted(configuration: EngineConfig) -> set[str]:
    loaded = models.load(configuration, tokenizer=models.load_tokenizer(configuration), seed=7)
    trainable = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    return {name.partition(".lora_")[0].partition(".modules_to_save")[0] for name in trainable}


def test_patterns_choose_modules(tmp_path: Path) -> None:
    layers = [f"model.layers.{i}" for i in range(2)]
    linear = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    every = {f"{layer}.{name}" for layer in layers for name in linear}

    def found(**lora: Any) -> set[str]:
        return adapted(configured(tmp_path, "untied llama", lora))

    assert found() == every
    assert found(target_modules=["q_proj"]) == {f"{layer}.self_attn.q_proj" for layer in layers}
    assert found(target_modules=["layers.1.mlp.*"]) == {f"model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")}
    assert found(exclude_modules=["layers.0.*"]) == {name for name in every if "layers.1" in name}
    assert found(target_modules=["all-linear", "embed_tokens"]) == every | {"model.embed_tokens"}
    assert found(target_modules=["?_proj"], modules_to_save=["norm", "lm_head"]) == {
        *(f"{layer}.self_attn.{n}_proj" for layer in layers for n in "qkvo"),
        "model.norm",
        "lm_head",
    }


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ["q_porj"]}, r"lora.target_modules: 'q_porj' matches no module.*q_proj"),
        ({"target_modules": ["q_proj", "layers.9.*"]}, r"lora.target_modules: 'layers.9.\*'"),
        ({"exclude_modules": ["embed_tokens"]}, "lora.exclude_modules: 'embed_tokens'"),
        ({"modules_to_save": ["score"]}, "lora.modules_to_save: 'score'"),
        ({"exclude_modules": ["*"]}, "every module that target_modules names is excluded"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path, lora: dict[str, Any], words: str) -> None:
    configuration = configured(tmp_path, "untied llama", lora)
    with pytest.raises(ModelError, match=words):
        engine_of(configuration, MemoryPlane())


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_what_can_be_attached_is_known_without_weights(tmp_path: Path, name: str, lora: dict[str, Any]) -> None:
    for configuration in (configured(tmp_path, name, lora), tiny.config(tmp_path, name, lora={"dim": 4, **lora})):
        models.check_adapter(configuration, models.load_tokenizer(configuration))
        wrong = configuration.model_copy(update={"lora": LoraConfig(target_modules=["q_porj"])})
        with pytest.raises(ModelError, match=r"lora\.target_modules: 'q_porj' matches no module"):
            models.check_adapter(wrong, models.load_tokenizer(wrong))


@pytest.mark.parametrize(
    ("name", "lora", "words"),
    [
        ("untied llama", {"dim": 9}, r"layers\.0\.self_attn\.k_proj is 8 x 16: .*exclude_modules: k_proj, v_proj$"),
        (
            "untied llama",
            {"dim": 17, "target_modules": ["o_proj"]},
            r"o_proj is 16 x 16: .*at most its smaller side, 16",
        ),
        ("untied llama", {"dim": 17, "target_modules": ["embed_tokens"]}, r"embed_tokens is \d+ x 16: "),
        ("gpt2", {"dim": 17, "target_modules": ["h.1.attn.c_attn"]}, r"h\.1\.attn\.c_attn is 16 x 48: "),
    ],
)
@pytest.mark.parametrize("kind", ["causal_lm", "scalar"])
def test_a_rank_above_a_layers_size_is_an_error(
    tmp_path: Path, name: str, lora: dict[str, Any], words: str, kind: models.Kind
) -> None:
    configuration = configured(tmp_path, name, lora)
    with pytest.raises(ModelError, match=rf"lora\.dim: found {lora['dim']}, but .*{words}"):
        models.check_adapter(configuration, models.load_tokenizer(configuration), kind)
    fits = configured(tmp_path, name, {**lora, "dim": 8})
    models.check_adapter(fits, models.load_tokenizer(fits), kind)


def test_only_the_adapter_is_trained_and_saved(tmp_path: Path) -> None:
    configuration = configured(tmp_path, "tied llama", {})
    engine, _ = trained(configuration)
    base = load_file(tmp_path / "base/model.safetensors")
    view = engine.base_view().weights()
    assert all(torch.equal(view[name], tensor) for name, tensor in base.items())
    reader = saved(engine)
    assert {f for f in reader.files() if f.endswith("safetensors")} == {
        "weights/adapter_model.safetensors",
        "optimizer/state.safetensors",
    }
    weights = reader.tensors("weights/adapter_model.safetensors")
    moments = reader.tensors("optimizer/state.safetensors")
    assert sum(t.numel() for n, t in moments.items() if n != "steps") == 2 * sum(t.numel() for t in weights.values())


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_the_weights_are_the_merged_models(tmp_path: Path, name: str, lora: dict[str, Any]) -> None:
    """Under the names that the merge has in its file; the engine goes on as it was."""
    configuration = configured(tmp_path, name, lora)
    engine, _ = trained(configuration)
    before = logits(engine.model)
    weights = engine.weights()
    expected = load_file(merged(saved(engine), configuration, tmp_path / "merged") / "model.safetensors")
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        close(weights[key], tensor, rtol=1e-6, atol=1e-7)
    assert torch.equal(logits(engine.model), before)


def test_the_start_is_the_base_drawn_from_the_seed_alone(tmp_path: Path) -> None:
    configuration = configured(tmp_path, "gpt2", GPT2_EMBEDDINGS)
    found = []
    for state, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(state)
        before = torch.random.get_rng_state()
        engine = engine_of(configuration, MemoryPlane(), seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        found.append({n: t.clone() for n, t in adapter_weights(engine.model).items()})
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        close(logits(engine.model), logits(base), rtol=0, atol=0)
    assert all(torch.equal(t, found[1][n]) for n, t in found[0].items())
    assert not all(torch.equal(t, found[2][n]) for n, t in found[0].items())


def test_dropout_repeats(tmp_path: Path) -> None:
    found = []
    for rate, state in ((0.5, 1), (0.5, 2), (0.0, 1)):
        engine, plane = trained(configured(tmp_path, "untied llama", {"dropout": rate}))
        torch.manual_seed(state)
        found.append(tiny.gradients(engine, plane, tiny.rows(plane, LENGTHS)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["causal_lm", "scalar"])
def test_a_new_engine_has_no_dropout_until_it_trains(tmp_path: Path, kind: models.Kind) -> None:
    engine = engine_of(configured(tmp_path, "untied llama", {"dropout": 0.5}), MemoryPlane(), kind=kind)
    assert not any(module.training for module in engine.model.modules())


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        engine, plane = trained(configured(tmp_path, "untied llama", {"dropout": 0.5}, gradient_checkpointing=on))
        found.append(tiny.gradients(engine, plane, tiny.rows(plane, LENGTHS)))
    assert torch.equal(*found)


# ---------------------------------------------------------------------------------------------------------- the resume


def resumed(
    reader: MemoryReader, configuration: EngineConfig, plane: MemoryPlane, kind: models.Kind = "causal_lm"
) -> LocalEngine:
    tokenizer = models.load_tokenizer_from_checkpoint(reader)
    loaded = models.load_from_checkpoint(reader, configuration, tokenizer, seed=7, kind=kind)
    engine = LocalEngine(loaded.model, loaded.files, configuration, plane, CloningStager(), seed=7)
    engine.restore(reader)
    return engine


@pytest.mark.parametrize(("name", "lora"), [*CASES[:3], CASES[8], CASES[10]])
@pytest.mark.parametrize("random_base", [False, True])
def test_a_resumed_adapter_continues_bit_for_bit(
    tmp_path: Path, name: str, lora: dict[str, Any], random_base: bool
) -> None:
    configuration = configured(tmp_path, name, lora)
    if random_base:
        configuration = tiny.config(tmp_path, name, lora={"dim": 4, **lora})
    straight, plane = trained(configuration)
    torch.manual_seed(99)
    again = resumed(saved(straight), configuration, plane)
    for step in range(3, 6):
        rows = tiny.rows(plane, LENGTHS, seed=step)
        assert straight.train(rows, NLL_OBJECTIVE) == again.train(rows, NLL_OBJECTIVE)
    assert saved(again)._contents == saved(straight)._contents


def test_a_base_that_moved_is_named_where_it_is(tmp_path: Path) -> None:
    engine, plane = trained(configured(tmp_path, "untied llama", {}))
    (tmp_path / "moved").mkdir()
    (tmp_path / "base").rename(tmp_path / "moved/base")
    again = resumed(saved(engine), configured(tmp_path / "moved", "untied llama", {}), plane)
    folder = on_disk(saved(again), tmp_path / "adapter")
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), logits(engine.model))


@pytest.mark.parametrize("tokenizer", [byte_level(adds_bos=True), gpt2_like()])
def test_the_tokenizer_comes_back_as_it_was(tmp_path: Path, tokenizer: Any) -> None:
    tiny.base_folder(tmp_path / "base", "tied llama", tokenizer=tokenizer, vocab_size=400)
    reader = saved(engine_of(configured(tmp_path, "tied llama", {}), MemoryPlane()))
    base = AutoTokenizer.from_pretrained(tmp_path / "base")
    for again in (
        models.load_tokenizer_from_checkpoint(reader),
        AutoTokenizer.from_pretrained(on_disk(reader, tmp_path / "adapter")),
    ):
        assert again.get_vocab() == base.get_vocab()
        assert again.chat_template == base.chat_template
        for text in ("what is 2 + 3?<|im_end|>", "日本語 \n\n x"):
            assert again(text).input_ids == base(text).input_ids


def test_another_base_is_refused(tmp_path: Path) -> None:
    configuration = configured(tmp_path, "untied llama", {})
    engine, plane = trained(configuration)
    reader = saved(engine)
    recorded = reader.json("base.json")
    assert recorded["name"] == str(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ResumeRefused, match="fingerprint") as refused:
        resumed(reader, configuration, plane)
    other = engine_of(configuration, plane)
    assert recorded["weights"] in str(refused.value)
    assert other.frozen_fingerprint in str(refused.value)
    with pytest.raises(ResumeRefused, match="fingerprint"):
        other.restore(reader)


# ------------------------------------------------------------------------------------------------------------ the view


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_with_its_adapter_off_the_model_is_the_base_bit_for_bit(
    tmp_path: Path, name: str, lora: dict[str, Any]
) -> None:
    engine, plane = trained(configured(tmp_path, name, lora))
    rows = tiny.rows(plane, LENGTHS)
    head = Head(("logprobs", "logits"))
    before = engine.infer(rows, Head(), {"logprobs": "before"})
    view = engine.base_view()
    seen = view.infer(before, head, {"logprobs": "view", "logits": "view_logits"})
    bare = engine_of(configured(tmp_path, name, None), plane)
    seen = bare.infer(seen, head, {"logprobs": "bare", "logits": "bare_logits"})
    seen = engine.infer(seen, Head(), {"logprobs": "after"})
    names = ["view", "bare", "view_logits", "bare_logits", "before", "after"]
    got = plane.get(seen, names)
    for row in range(len(rows)):
        assert torch.equal(got["view"][row], got["bare"][row])
        assert torch.equal(got["view_logits"][row], got["bare_logits"][row])
        assert torch.equal(got["before"][row], got["after"][row])
        assert not torch.equal(got["view"][row][1:], got["before"][row][1:])
    assert view.evaluate(rows, NLL_OBJECTIVE) == bare.evaluate(rows, NLL_OBJECTIVE)
    assert engine.train(rows, NLL_OBJECTIVE)["grad_norm"].value > 0


def test_a_view_is_frozen_and_leaves_a_fingerprint(tmp_path: Path) -> None:
    configuration = configured(tmp_path, "untied llama", {})
    engine, plane = trained(configuration)
    view = engine.base_view()
    reader = saved(view)
    assert reader.files() == ("frozen.json",)
    assert reader.json("frozen.json")["weights"] == saved(engine).json("base.json")["weights"]
    view.restore(reader)
    with pytest.raises(ValueError, match="frozen"):
        view.train(tiny.rows(plane, LENGTHS), NLL_OBJECTIVE)
    with pytest.raises(ValueError, match="no adapter"):
        engine_of(configured(tmp_path, "untied llama", None), plane).base_view()
    loaded = models.load(configuration, tokenizer=models.load_tokenizer(configuration), seed=7)
    with pytest.raises(ValueError, match="takes no adapter"):
        LocalEngine(loaded.model, loaded.files, configuration, plane, CloningStager(), seed=7, trained=False)
    other = engine_of(configured(tmp_path / "other", "tied llama", {}), plane).base_view()
    with pytest.raises(ResumeRefused, match="fingerprint"):
        other.restore(reader)


# ------------------------------------------------------------------------------------------------------------- scalars


def scores(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(row[None]).logits[0, 0] for row in IDS])


@pytest.mark.parametrize("lora", [None, {}, {"modules_to_save": ["norm"]}])
@pytest.mark.parametrize("name", ["untied llama", "tied qwen3"])
def test_a_scalar_model_trains_and_loads_with_transformers_alone(
    tmp_path: Path, name: str, lora: dict[str, Any] | None
) -> None:
    configuration = configured(tmp_path, name, lora)
    plane = MemoryPlane()
    engine = engine_of(configuration, plane, kind="scalar")
    objective = Objective("policy", Head(("scalar",)), RewardLoss())
    batches = [tiny.rows(plane, LENGTHS, seed=step, group_rows=2) for step in range(4)]
    first = engine.model.score.weight.detach().clone()
    for batch in batches[:2]:
        engine.train(batch, objective)
    assert not torch.equal(first, engine.model.score.weight)
    reader = saved(engine)
    again = resumed(reader, configuration, plane, "scalar")
    for batch in batches[2:]:
        assert engine.train(batch, objective) == again.train(batch, objective)
    assert saved(again)._contents == saved(engine)._contents
    engine.model.eval()
    live, reader = scores(engine.model), saved(engine)
    folder = on_disk(reader, tmp_path / "checkpoint")
    if lora is None:
        fresh, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] | report["unexpected_keys"]
        assert fresh.config.num_labels == 1
        own = {name: tensor for name, tensor in engine.model.state_dict().items() if tensor.is_floating_point()}
        assert all(torch.equal(tensor, own[name]) for name, tensor in fresh.state_dict().items() if name in own)
        close(scores(fresh), live, rtol=0, atol=1e-6)  # not the same bits: a product's follow from where a tensor lies
        return
    close(scores(AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)), live, rtol=0, atol=1e-6)
    plain = merged(reader, configuration, tmp_path / "merged", "scalar")
    fresh = AutoModelForSequenceClassification.from_pretrained(plain)
    close(scores(fresh), live, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name != "scaled logits"])
def test_every_causal_model_gives_scalars(tmp_path: Path, name: str) -> None:
    """The score at each row's last token is the one that Transformers reads."""
    plane = MemoryPlane()
    engine = engine_of(configured(tmp_path, name, None), plane, kind="scalar")
    rows = tiny.rows(plane, LENGTHS)
    found = plane.get(engine.infer(rows, Head(("scalar",)), {"scalar": "scores"}), ["input_ids", "scores"])
    folder = on_disk(saved(engine), tmp_path / "checkpoint")
    fresh = AutoModelForSequenceClassification.from_pretrained(folder)
    for ids, values in zip(found["input_ids"], found["scores"], strict=True):
        with torch.no_grad():
            close(fresh(ids[None]).logits[0, 0], values[-1], rtol=0, atol=1e-5)


def test_a_type_that_has_no_score_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model of type granite with a score head"):
        engine_of(configured(tmp_path, "scaled logits", None), MemoryPlane(), kind="scalar")


def test_a_score_is_read_at_an_end_token_that_also_pads(tmp_path: Path) -> None:
    """Transformers skips a row's last tokens that are the pad token. Here they are its end: read, and not skipped."""
    eos = tiny.TOKENIZER.eos_token_id
    assert tiny.TOKENIZER.pad_token_id == eos
    for configuration in (configured(tmp_path, "untied llama", None), tiny.config(tmp_path)):
        plane = MemoryPlane()
        engine = engine_of(configuration, plane, kind="scalar")
        rows = tiny.rows(plane, [4])
        plane.put(rows, {"input_ids": [torch.tensor([5, 6, 7, eos])]})
        found = plane.get(engine.infer(rows, Head(("scalar",)), {"scalar": "scores"}), ["scores"])
        fresh = AutoModelForSequenceClassification.from_pretrained(
            on_disk(saved(engine), tmp_path / f"saved_{configuration.model_name is None}")
        )
        with torch.no_grad():
            alone = fresh(torch.tensor([[5, 6, 7, eos]])).logits[0, 0]
            close(alone, found["scores"][0][-1], rtol=0, atol=1e-6)
            with pytest.raises(ValueError, match="no padding token"):
                fresh(torch.tensor([[5, 6, 7, eos]] * 2))
