"""DPO's references, in real runs: precomputed log-probs and their cache, another model's, one that follows the policy,
and none."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefoot import loop
from surefoot.engine import models, precomputed
from surefoot.engine.local import LocalEngine
from surefoot.engine.precomputed import Precomputed
from surefoot.errors import ConfigError, DataError, ModelError, NonFiniteError, ResumeRefused, StorageFailed
from surefoot.run import Run
from surefoot.types import BatchRef, Head
from tests.helpers import runs

LORA = "policy.lora={dim: 4, dropout: 0.1}"
EVERY_STEP = ("checkpointing.save_period=1", "policy.scheduler.decay_steps=8")
SIGMOID = ("dpo.preset=null", "dpo.beta=0.5")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return runs.write_project(tmp_path, case="dpo-mpo")


def kept(folder: Path) -> tuple[str, ...]:
    return ("dpo.reference=precomputed", f"dpo.reference_cache={folder / 'cache'}")


def cached_files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.safetensors"))


def named(base: Path) -> tuple[str, ...]:
    return (f"policy.model_name={base}", "policy.model_init=null", "policy.tokenizer.name=null")


@pytest.fixture(scope="module")
def trained_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: what one step makes of random weights."""
    folder = tmp_path_factory.mktemp("base")
    runs.trained(runs.write_project(folder, case="dpo-mpo"), "max_num_steps=1", "val_period=0")
    return folder / "run/checkpoints/step_1/policy/weights"


@pytest.fixture
def base(trained_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_base, tmp_path / "base"))


def outcome(run_dir: Path, step: int = 6) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    return runs.state_bytes(run_dir / "checkpoints" / f"step_{step}"), runs.metric_lines(run_dir)


class Watched:
    """What a run loads and computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inferred = 0
        self.loaded: list[weakref.ref[Any]] = []
        infer, load = LocalEngine.infer, models.load

        def inferring(engine: LocalEngine, ref: BatchRef, *args: Any) -> BatchRef:
            self.inferred += len(ref)
            return infer(engine, ref, *args)

        def loading(*args: Any, **options: Any) -> models.LoadedModel:
            loaded = load(*args, **options)
            self.loaded.append(weakref.ref(loaded.model))
            return loaded

        monkeypatch.setattr(LocalEngine, "infer", inferring)
        monkeypatch.setattr(models, "load", loading)

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(model() is not None for model in self.loaded)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


# --------------------------------------------------------------------------------------------------------- precomputed


@pytest.mark.parametrize("lora", [(), (LORA,)], ids=["second model", "adapter off"])
@pytest.mark.parametrize("options", [(), (*SIGMOID, "dpo.wpo=true", "dpo.ld_alpha=0.5")], ids=["mpo", "wpo"])
def test_precomputed_log_probs_are_those_of_the_frozen_model(
    file: Path, lora: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """Bit for bit, where a micro-batch is one pair, as here."""
    weights: list[dict[str, Tensor]] = []
    for name, kind in (("frozen", ()), ("stored", kept(file.parent)), ("found", kept(file.parent))):
        run = runs.started(file, *lora, *options, f"run_dir={file.parent / name}", *kind)
        loop.train(run)
        weights.append({key: tensor.clone() for key, tensor in run.kit.engines["policy"].weights().items()})
    frozen, stored, found = (runs.metric_lines(file.parent / name) for name in ("frozen", "stored", "found"))
    assert frozen == stored == found
    for key, tensor in weights[0].items():
        assert torch.equal(weights[1][key], tensor)
        assert torch.equal(weights[2][key], tensor)


def test_in_larger_micro_batches_they_are_those_of_the_frozen_model_but_for_rounding(file: Path) -> None:
    for name, kind in (("frozen", ()), ("stored", kept(file.parent))):
        runs.trained(file, f"run_dir={file.parent / name}", "policy.train_micro_batch_size=4", *kind)
    frozen, stored = (runs.metric_lines(file.parent / name) for name in ("frozen", "stored"))
    for line, other in zip(frozen, stored, strict=True):
        assert {**other, "kind": 0} == pytest.approx({**line, "kind": 0}, abs=1e-6, rel=1e-6)


def test_the_reference_is_in_memory_only_while_it_is_needed(file: Path, watched: Watched) -> None:
    """At the start it is the policy itself; on a resume it is loaded only when the cache is gone, and let go again."""
    stored = (*kept(file.parent), *EVERY_STEP)
    run = runs.started(file, *stored, "max_num_steps=2")
    assert isinstance(run.kit.engines["reference"], Precomputed)
    assert (len(watched.loaded), watched.inferred) == (1, 26)
    loop.train(run)
    assert not (file.parent / "run/checkpoints/step_2/reference/weights").exists()
    run = runs.started(file, *stored, f"run_dir={file.parent / 'again'}")
    assert (len(watched.loaded), watched.inferred) == (2, 26), "all was in the cache"
    run = runs.resumed(file.parent / "run", "max_num_steps=3")
    assert (len(watched.loaded), watched.inferred) == (2, 26), "neither the policy nor the reference was drawn anew"
    loop.train(run)
    shutil.rmtree(file.parent / "cache")
    del run
    run = runs.resumed(file.parent / "run", "max_num_steps=4")
    assert (len(watched.loaded), watched.inferred) == (3, 52)
    assert watched.loaded[-1]() is None, "the reference is still there"
    loop.train(run)


def test_a_frozen_model_of_its_own_is_let_go(file: Path, base: Path, watched: Watched) -> None:
    other = f"dpo.reference_model={base}"
    run = runs.started(file, *kept(file.parent), other)
    gc.collect()
    assert [model() is run.kit.engines["policy"].model for model in watched.loaded] == [True, False]  # type: ignore[attr-defined]
    assert watched.alive == 1
    run = runs.started(file, other, f"run_dir={file.parent / 'frozen'}")
    assert watched.alive == 2, "a frozen one stays; the run before is gone"


@pytest.mark.parametrize(
    ("lora", "stop_at", "lost"), [((), 2, False), ((), 5, True), ((LORA,), 5, False), ((LORA,), 2, True)]
)
def test_a_precomputed_reference_resumes_exactly(file: Path, lora: tuple[str, ...], stop_at: int, lost: bool) -> None:
    common = (*lora, *EVERY_STEP, *kept(file.parent))
    runs.trained(file, *common)
    again = file.parent / "again"
    runs.trained(file, *common, f"run_dir={again}", f"max_num_steps={stop_at}")
    if lost:
        shutil.rmtree(file.parent / "cache")
    loop.train(runs.resumed(again, "max_num_steps=6"))
    assert outcome(again) == outcome(file.parent / "run")


@pytest.mark.parametrize(
    "damage",
    {
        "flip": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
        "short": lambda file: os.truncate(file, file.stat().st_size - 4),
        "foreign": lambda file: file.write_bytes(max(file.parents[1].rglob("*.safetensors"), key=_size).read_bytes()),
        "gone": lambda file: file.unlink(),
    }.values(),
)
def test_what_is_damaged_is_computed_anew(
    file: Path, watched: Watched, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    runs.trained(file, *kept(file.parent))
    smaller = min(cached_files(file.parent), key=_size)  # of the validation set: 6 rows
    whole = smaller.read_bytes()
    damage(smaller)
    damaged = smaller.exists()
    runs.trained(file, *kept(file.parent), f"run_dir={file.parent / 'again'}")
    assert watched.inferred == 26 + 6
    assert (f"{smaller} cannot be used and is computed anew" in caplog.text) == damaged
    assert smaller.read_bytes() == whole
    assert runs.metric_lines(file.parent / "run") == runs.metric_lines(file.parent / "again")


def _size(file: Path) -> int:
    return file.stat().st_size


def test_what_was_finished_before_an_interruption_is_kept(
    file: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C while the third file is being computed: nothing is left of the start but two files."""
    caplog.set_level("INFO")
    monkeypatch.setattr(precomputed, "CHUNK_ROWS", 4)
    compute, calls = Precomputed._computed, []

    def interrupted(*args: Any) -> dict[str, Tensor]:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(Precomputed, "_computed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.started(file, *kept(file.parent))
    assert len(cached_files(file.parent)) == 2
    assert not (file.parent / "run").exists()
    runs.trained(file, *kept(file.parent))
    assert watched.inferred == 26
    assert "18 sequences computed, 8 from the cache" in caplog.text


@pytest.mark.parametrize("change", ["rows", "length", "template", "tokenizer", "model", "precision", "seed"])
def test_log_probs_of_something_else_are_never_used(file: Path, base: Path, watched: Watched, change: str) -> None:
    stored = (*kept(file.parent), *named(base), "max_num_steps=1", "val_period=0", "checkpointing.enabled=false")
    runs.started(file, *stored)
    shutil.rmtree(file.parent / "run")
    assert watched.inferred == 26
    expected, more = 26, ()
    if change == "rows":
        text = (file.parent / "train.jsonl").read_text().splitlines(keepends=True)
        (file.parent / "train.jsonl").write_text("".join(text[1:]))
        expected = 18  # the validation set is as it was
    elif change == "length":
        more, expected = ("policy.max_total_sequence_length=13",), 26
    elif change == "template":
        template = (base / "chat_template.jinja").read_text()
        (base / "chat_template.jinja").write_text("{# another #}" + template)
    elif change == "tokenizer":
        settings = json.loads((base / "tokenizer_config.json").read_text())
        (base / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    elif change == "model":
        weights = load_file(base / "model.safetensors")
        weights["model.norm.weight"][0] += 1
        save_file(weights, base / "model.safetensors", {"format": "pt"})
    elif change == "precision":
        more = ("policy.precision=bfloat16",)
    else:
        more, expected = ("seed=8",), 0  # what is drawn from it does not touch these log-probs
    watched.inferred = 0
    runs.started(file, *stored, *more)
    assert watched.inferred == expected


def test_a_row_of_no_set_is_an_error(file: Path) -> None:
    run = runs.started(file, *kept(file.parent))
    reference, plane = run.kit.engines["reference"], run.kit.plane
    row = torch.tensor([3, 1, 2])
    ref = plane.put(BatchRef(("x_g0",), ("x",), (3,), (0,), frozenset()), {"input_ids": [row]})
    with pytest.raises(DataError, match=r"row x_g0 \(3 tokens\) is in no data set"):
        reference.infer(ref, Head(), {"logprobs": "reference_logprobs"})
    with pytest.raises(ValueError, match="is asked for"):
        reference.infer(ref, Head(temperature=2.0), {"logprobs": "reference_logprobs"})
    for use in (lambda: reference.weights(), lambda: reference.assign({}), lambda: reference.train(ref, None)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"precomputed|frozen"):
            use()


@pytest.mark.parametrize("lora", [(), (LORA,)], ids=["second model", "adapter off"])
def test_a_resume_against_another_reference_is_refused(
    file: Path, base: Path, watched: Watched, lora: tuple[str, ...]
) -> None:
    runs.trained(file, *kept(file.parent), *named(base), *lora, "max_num_steps=2")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    watched.inferred = 0
    with pytest.raises(ResumeRefused, match="fingerprint"):
        runs.resumed(file.parent / "run", "max_num_steps=3")
    assert watched.inferred == 0, "it was computed before it was refused"


def test_a_reference_that_draws_otherwise_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, as another version of a library could draw them: seen where they are needed, the cache gone."""
    runs.trained(file, *kept(file.parent), "max_num_steps=2")
    load = models.load

    def drawing(*args: Any, **options: Any) -> models.LoadedModel:
        loaded = load(*args, **options)
        with torch.no_grad():
            loaded.model.model.norm.weight[0] += 1
        return loaded

    monkeypatch.setattr(models, "load", drawing)
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=3"))
    shutil.rmtree(file.parent / "cache")
    with pytest.raises(ResumeRefused, match="frozen model's weights have the fingerprint"):
        runs.resumed(file.parent / "run", "max_num_steps=4")


def test_log_probs_that_are_rounded_otherwise_are_said(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs.trained(file, *kept(file.parent), "max_num_steps=2")
    runs.resumed(file.parent / "run", "max_num_steps=3").checkpoints.shutdown()
    assert "not bit for bit" not in caplog.text
    shutil.rmtree(file.parent / "cache")
    compute = Precomputed._computed
    monkeypatch.setattr(Precomputed, "_computed", lambda *args: {k: v * (1 + 1e-7) for k, v in compute(*args).items()})
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=3"))
    assert "the run goes on, not bit for bit" in caplog.text


def test_a_cache_that_cannot_be_used_leaves_no_run_behind(file: Path) -> None:
    (file.parent / "cache").touch()
    with pytest.raises(StorageFailed, match=r"cache/\w+ cannot be written to: Not a directory"):
        runs.started(file, *kept(file.parent))
    assert not (file.parent / "run").exists()


def test_a_bad_configuration_costs_no_computation(file: Path, watched: Watched) -> None:
    for wrong in ("policy.lora={target_modules: [no_such]}", "logger.wandb=true"):
        with pytest.raises((ModelError, ConfigError)):
            runs.started(file, *kept(file.parent), wrong)
    assert watched.inferred == 0


def test_log_probs_that_are_not_finite_stop_the_start(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Precomputed._computed
    monkeypatch.setattr(Precomputed, "_computed", lambda *args: {k: v / 0 for k, v in compute(*args).items()})
    with pytest.raises(NonFiniteError, match="logprobs are not all finite in sequence 0 of the data set"):
        runs.started(file, *kept(file.parent))
    assert cached_files(file.parent) == []


def test_the_cache_has_a_default_place_and_may_move(
    file: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent / "home"))
    runs.trained(file, "dpo.reference=precomputed", "max_num_steps=1")
    place = file.parent / "home/surefoot/reference_logprobs"
    assert len(list(place.rglob("*.safetensors"))) == 2
    place.rename(file.parent / "moved")
    monkeypatch.chdir(file.parent)
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=2", "dpo.reference_cache=moved"))
    assert watched.inferred == 26
    monkeypatch.chdir("/")
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=3"))
    assert watched.inferred == 26, "the folder is kept as an absolute path"


# ------------------------------------------------------------------------------------------------------- another model


def test_another_model_is_the_reference(file: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    for name, more in (("frozen", ()), ("stored", kept(file.parent)), ("lora", (LORA,))):
        settings = (f"run_dir={file.parent / name}", "dpo.reference_model=base", *more)
        run = runs.started(file, *settings, "max_num_steps=2")
        loop.train(run)
        assert runs.metric_lines(file.parent / name)[0]["rewards/chosen"] != 0, "it is not the policy"
        monkeypatch.chdir("/")
        loop.train(runs.resumed(file.parent / name, "max_num_steps=3"))
        monkeypatch.chdir(file.parent)
    frozen, stored = (runs.metric_lines(file.parent / name) for name in ("frozen", "stored"))
    for line, other in zip(frozen, stored, strict=True):
        assert {**other, "kind": 0} == pytest.approx({**line, "kind": 0}, abs=1e-6, rel=1e-6)
    kept_base = load_file(base / "model.safetensors")
    shutil.copytree(base, file.parent / "moved")
    moved = f"dpo.reference_model={file.parent / 'moved'}"
    loop.train(runs.resumed(file.parent / "frozen", "max_num_steps=4", moved))
    kept_base["model.norm.weight"][0] += 1
    save_file(kept_base, file.parent / "moved/model.safetensors", {"format": "pt"})
    with pytest.raises(ResumeRefused, match="fingerprint"):
        runs.resumed(file.parent / "frozen", "max_num_steps=5")


def _other_ids(base: Path) -> None:
    text = json.loads((base / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (base / "tokenizer.json").write_text(json.dumps(text))


def _one_more(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<thought>"])
    tokenizer.save_pretrained(base)


def _other_end(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.eos_token = "1"
    tokenizer.save_pretrained(base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_ids, r"'1' is \d+ here and \d+ there; '2' is \d+ here and \d+ there"),
        (_one_more, r"'<thought>' is absent here and \d+ there"),
        (_other_end, r"'eos_token_id' is \d+ here and \d+ there"),
        (lambda base: [path.unlink() for path in base.glob("tokenizer*")], "has no tokenizer"),
        (lambda base: shutil.rmtree(base), "the model of reference: there is no folder"),
        (lambda base: (base / "model.safetensors").unlink(), "expected .safetensors files, found no weights"),
    ],
)
def test_another_tokenizer_is_refused_before_the_data(
    file: Path, base: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(base)
    with pytest.raises(ModelError, match=message):
        runs.started(file, f"dpo.reference_model={base}", "data.train.path=nowhere.jsonl")


# -------------------------------------------------------------------------------------------- one that follows (TR-DPO)


def steps(run: Run) -> list[dict[str, dict[str, Tensor]]]:
    """Each engine's weights after each step, filled while the run turns."""
    found: list[dict[str, dict[str, Tensor]]] = []
    observe = run.algorithm.observe

    def observing(*args: Any) -> None:
        observe(*args)
        engines = run.kit.engines.items()
        found.append({n: {k: t.clone() for k, t in engine.weights().items()} for n, engine in engines})

    run.algorithm.observe = observing  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("mixup", [0.6, 0.25, 1.0])
def test_the_reference_follows_the_policy(file: Path, mixup: float) -> None:
    run = runs.started(file, f"dpo.sync_reference={{period: 2, mixup: {mixup}}}", "max_num_steps=5")
    reference = {name: tensor.clone() for name, tensor in run.kit.engines["reference"].weights().items()}
    found = steps(run)
    loop.train(run)
    assert len(found) == 5
    for step, after in enumerate(found, start=1):
        if step % 2 == 0:
            reference = {k: mixup * after["policy"][k] + (1 - mixup) * tensor for k, tensor in reference.items()}
        for name, tensor in reference.items():
            torch.testing.assert_close(after["reference"][name], tensor, rtol=1e-6, atol=1e-7)
    folder = file.parent / "run/checkpoints/step_4/reference/weights"
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in found[3]["reference"].items())
    rewards = {line["step"]: line["rewards/chosen"] for line in runs.metric_lines(file.parent / "run") if "lr" in line}
    assert (rewards[3] == 0) == (mixup == 1.0), "the reference of step 3 is that of step 2"


@pytest.mark.parametrize("stop_at", [1, 2, 5])
def test_a_synced_reference_resumes_exactly(file: Path, base: Path, stop_at: int) -> None:
    """Also where the folder that the run began with is gone."""
    common = (*EVERY_STEP, *named(base), "dpo.sync_reference={period: 2}")
    runs.trained(file, *common)
    again = file.parent / "again"
    runs.trained(file, *common, f"run_dir={again}", f"max_num_steps={stop_at}")
    shutil.rmtree(base)
    loop.train(runs.resumed(again, "max_num_steps=6"))
    assert "reference/weights/model.safetensors" in outcome(again)[0]
    assert outcome(again) == outcome(file.parent / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 40}, r"down_proj\.weight: \(\d+, 40\), not \(\d+, \d+\)"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight: \(\d+, \d+\), not absent"),
    ],
)
def test_a_model_of_other_shapes_cannot_follow(file: Path, base: Path, change: dict[str, Any], message: str) -> None:
    config = AutoConfig.from_pretrained(base)
    config.update({"tie_word_embeddings": True, **change})
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    settings = (f"dpo.reference_model={base}", "policy.model_init.tie_word_embeddings=true")
    with pytest.raises(ModelError, match=f"the model of reference is to follow policy.*{message}"):
        runs.started(file, *settings, "dpo.sync_reference={period: 2}")
    assert not (file.parent / "run").exists()
    loop.train(runs.started(file, *settings, "max_num_steps=1"))  # one that stays as it is may have any


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("dpo.reference=none", "dpo.reference=frozen", "reference stays as it is; the checkpoint holds nothing of it"),
        ("dpo.reference=none", "dpo.reference=precomputed", "the checkpoint holds nothing of it"),
        ("dpo.reference=frozen", "dpo.sync_reference={period: 2}", "follows .*; the checkpoint holds its fingerprint"),
        ("dpo.sync_reference={period: 2}", "dpo.sync_reference=null", "the checkpoint holds its weights"),
    ],
)
def test_another_kind_of_reference_is_refused_whatever_is_allowed(
    file: Path, before: str, after: str, message: str
) -> None:
    runs.trained(file, before, "max_num_steps=2")
    changes = {"dpo.reference", "dpo.sync_reference.period", "dpo.sync_reference.mixup", "algorithm"}
    with pytest.raises(ResumeRefused, match=message):
        runs.resumed(file.parent / "run", after, allow=frozenset(changes))


def test_a_checkpoint_without_optimizer_holds_the_synced_reference(file: Path) -> None:
    run = runs.started(file, "dpo.sync_reference={period: 2}", "checkpointing.save_optimizer=false")
    loop.train(run)
    saved = runs.state_bytes(file.parent / "run/checkpoints/step_6")
    assert "reference/weights/model.safetensors" in saved
    assert not any("optimizer" in name for name in saved)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("dpo.reference=none", "dpo.sync_reference={period: 2}"),
            "sync_reference needs reference: frozen; found none",
        ),
        (("dpo.reference=precomputed", "dpo.sync_reference={period: 2}"), "needs reference: frozen; found precomputed"),
        (
            ("dpo.reference=none", "dpo.reference_model=x"),
            "reference_model needs reference: frozen, precomputed; found",
        ),
        (("dpo.reference_cache=x",), "dpo: reference_cache needs reference: precomputed; found frozen"),
        (("dpo.sync_reference={period: 2}", LORA), "mixes whole models; under policy.lora only an adapter is trained"),
        (("dpo.sync_reference={period: 0}",), "dpo.sync_reference.period"),
        (("dpo.sync_reference={period: 2, mixup: 0}",), "dpo.sync_reference.mixup: input should be greater than 0"),
        (("dpo.sync_reference={period: 2, mixup: 1.5}",), "dpo.sync_reference.mixup"),
        (
            ("dpo.preset=null", "dpo.losses=[{name: sppo_hard}]", "dpo.reference=none"),
            "makes rejected answers likelier",
        ),
        (("dpo.reference=cached",), "dpo.reference: input should be 'frozen', 'precomputed' or 'none'"),
    ],
)
def test_what_does_not_go_together_is_refused_at_load(file: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.config_of(file, *overrides, "dpo.beta=null")
