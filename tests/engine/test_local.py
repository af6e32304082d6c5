"""The engine: gradients that do not depend on the split, states that continue bit for bit, failures that name rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.engine.local import LocalEngine
from surefoot.errors import CheckpointError, NonFiniteError, ResumeRefused
from surefoot.losses.supervised import NLL
from surefoot.types import Head, Metrics, Objective
from tests.engine import tiny
from tests.engine.tiny import NLL_OBJECTIVE
from tests.helpers.memory_store import CloningStager, MemoryReader, MemorySink, saved

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


# ----------------------------------------------------------------------------------------------- the split, the padding


@pytest.mark.parametrize(
    ("name", "double", "tolerance"),
    [
        *((name, True, 1e-10) for name in ("untied llama", "tied qwen3", "gpt2")),
        *((name, False, 1e-5) for name in ("untied llama", "gpt2", "capped logits")),  # the cap's attention is float32
    ],
)
def test_micro_batches_give_one_gradient(tmp_path: Path, name: str, double: bool, tolerance: float) -> None:
    """F10: eight rows of lengths 1 to 8, cut into 8, 4, 2 and 1, against the loss over all tokens written out."""
    init = {**tiny.ARCHITECTURES[name], "initializer_range": 0.3}
    if name == "gpt2":
        init |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    expected = None
    for micro in (8, 4, 2, 1):
        configuration = tiny.config(tmp_path, name, model_init=init, train_micro_batch_size=micro)
        engine, plane = tiny.engine(configuration, double=double)
        ref = tiny.rows(plane, LENGTHS)
        if expected is None:
            expected = written_out(engine, plane, ref)
        assert relative_error(tiny.gradients(engine, plane, ref), expected) <= tolerance


def written_out(engine: LocalEngine, plane: Any, ref: Any) -> torch.Tensor:
    """Row after row without padding, through Transformers' own logits."""
    columns = plane.get(ref, ["input_ids", "loss_mask"])
    total, tokens = torch.zeros(()), 0.0
    for ids, mask in zip(columns["input_ids"], columns["loss_mask"], strict=True):
        logprobs = engine.model(ids[None]).logits[0].log_softmax(-1)
        picked = logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        total = total - (picked * mask[1:]).sum()
        tokens += float(mask.sum())
    (total / tokens).backward()
    joined = torch.cat([p.grad.flatten() for p in engine.model.parameters()])
    engine.model.zero_grad()
    return joined


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        engine, plane = tiny.engine(tiny.config(tmp_path, gradient_checkpointing=on))
        found.append(tiny.gradients(engine, plane, tiny.rows(plane, LENGTHS)))
        name = "activation" if hasattr(engine.model, "is_activation_checkpointing") else "gradient"
        assert getattr(engine.model, f"is_{name}_checkpointing") == on
    assert torch.equal(*found)


def test_bfloat16_is_autocast_over_float32_weights(tmp_path: Path) -> None:
    plain, plane = tiny.engine(tiny.config(tmp_path))
    rough, _ = tiny.engine(tiny.config(tmp_path, precision="bfloat16"))
    rough._plane = plane
    ref = tiny.rows(plane, LENGTHS)
    exact, near = tiny.gradients(plain, plane, ref), tiny.gradients(rough, plane, ref)
    assert near.dtype == torch.float32
    assert 1e-4 < relative_error(near, exact) < 0.1
    rough.train(ref, NLL_OBJECTIVE)
    assert {t.dtype for t in rough._state().values()} == {torch.float32}


def test_groups_larger_than_a_micro_batch_stay_together(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=2))
    ref = tiny.rows(plane, [4, 5, 3, 6, 2, 7], group_rows=3)
    assert [len(batch.rows) for batch in engine._batches(ref, NLL_OBJECTIVE)] == [3, 3]


# ------------------------------------------------------------------------------------------------------------- training


def test_a_step_is_adamw_on_the_mean_loss(tmp_path: Path) -> None:
    """Against torch's own AdamW, with decay on matrices alone and clipping to the norm."""
    configuration = tiny.config(tmp_path, max_grad_norm=0.05)
    engine, plane = tiny.engine(configuration)
    ref = tiny.rows(plane, LENGTHS)
    before = {n: p.detach().clone().requires_grad_() for n, p in engine.model.named_parameters()}
    gradient = written_out(engine, plane, ref)
    matrices = [p for p in before.values() if p.ndim == 2]
    others = [p for p in before.values() if p.ndim == 1]
    assert others
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    clipped = gradient * (0.05 / gradient.norm())
    for param, part in zip(before.values(), clipped.split([p.numel() for p in before.values()]), strict=True):
        param.grad = part.view_as(param)
    reference.step()
    metrics = values(engine.train(ref, NLL_OBJECTIVE))
    for name, param in engine.model.named_parameters():
        torch.testing.assert_close(param, before[name], rtol=1e-4, atol=2e-5)
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)
    assert (metrics["lr"], metrics["optimizer_steps"], metrics["skipped_optimizer_steps"]) == (1e-2, 1.0, 0.0)


def test_other_devices_are_not_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training on the CPU leaves a GPU's random state alone, and its own as it was."""
    for module in (torch.cuda, torch.mps, torch.xpu):
        for name in ("manual_seed", "manual_seed_all"):
            monkeypatch.setattr(module, name, lambda seed: pytest.fail("another device was seeded"), raising=False)
    before = torch.random.get_rng_state()
    engine, plane = tiny.engine(tiny.config(tmp_path, "gpt2"))
    engine.train(tiny.rows(plane, LENGTHS), NLL_OBJECTIVE)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_loss_falls_and_evaluation_agrees(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path))
    ref = tiny.rows(plane, LENGTHS)
    measured = values(engine.evaluate(ref, NLL_OBJECTIVE))
    trained = values(engine.train(ref, NLL_OBJECTIVE))
    assert measured["loss"] == pytest.approx(trained["loss"], abs=1e-6)
    assert measured["num_tokens"] == sum(n - -(-n // 2) for n in LENGTHS)
    for _ in range(30):
        engine.train(ref, NLL_OBJECTIVE)
    assert values(engine.evaluate(ref, NLL_OBJECTIVE))["loss"] < 0.3 * measured["loss"]


def test_several_optimizer_steps_per_step(tmp_path: Path) -> None:
    """Two passes over eight rows, four a time: four optimizer steps, each with its own learning rate and counts."""
    configuration = tiny.config(tmp_path, scheduler={"name": "linear", "warmup_steps": 1})
    engine, plane = tiny.engine(configuration, total_optimizer_steps=5)
    ref = tiny.rows(plane, LENGTHS)
    objective = Objective("policy", Head(), NLL(), epochs=2, minibatch_rows=4)
    metrics = values(engine.train(ref, objective))
    assert metrics["optimizer_steps"] == 4
    assert metrics["lr"] == pytest.approx(1e-2 * 0.5)  # at step 3: two of four steps of decay are done
    assert metrics["num_tokens"] == 2 * sum(n - -(-n // 2) for n in LENGTHS)


@pytest.mark.parametrize("micro", [1, 8])
def test_rows_with_nothing_to_train_on(tmp_path: Path, micro: int) -> None:
    """E3: one such row beside others adds nothing; a step of such rows is skipped and counted."""
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=micro))
    some, without = tiny.rows(plane, [3, 6, 4, 5], masked_rows=[1]), tiny.rows(plane, [3, 4, 5], seed=1)
    columns = plane.get(some, ["input_ids", "loss_mask"])
    kept = {name: [column[row] for row in (0, 2, 3)] for name, column in columns.items()}
    plane.put(without, kept)
    a, b = tiny.gradients(engine, plane, some), tiny.gradients(engine, plane, without)
    assert relative_error(a, b) < 1e-5
    assert values(engine.evaluate(some, NLL_OBJECTIVE))["skipped_rows"] == 1

    before = {n: t.clone() for n, t in engine._state().items()}
    metrics = values(engine.train(tiny.rows(plane, [3, 1, 4], seed=2, masked_rows=[0, 1, 2]), NLL_OBJECTIVE))
    assert metrics["loss"] == 0
    assert metrics["skipped_optimizer_steps"] == 1
    assert metrics["skipped_rows"] == 3
    assert metrics["optimizer_steps"] == 0
    assert all(torch.equal(t, before[n]) for n, t in engine._state().items())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_update(tmp_path: Path, where: str) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=1))
    ref = tiny.rows(plane, [4, 5, 6])
    engine.train(ref, NLL_OBJECTIVE)
    if where == "loss":
        with torch.no_grad():
            engine.model.lm_head.weight[3, 0] = float("nan")
    else:
        engine.model.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    before = {n: t.clone() for n, t in engine._state().items()}
    with pytest.raises(NonFiniteError) as raised:
        engine.train(ref, NLL_OBJECTIVE)
    message = str(raised.value)
    assert "optimizer step 2" in message
    assert "nan" in message or "inf" in message
    if where == "loss":  # the longest row goes first, alone
        assert message.startswith("the loss is nan")
        assert f"rows {ref.ids[2]}." in message
    else:
        assert "model.norm.weight" in message
        assert all(row in message for row in ref.ids)
    assert all(torch.equal(t, before[n]) or t.isnan().any() for n, t in engine._state().items())
    assert all(p.grad is None for p in engine.model.parameters())


def test_dropout_repeats_and_leaves_the_global_state_alone(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path, "gpt2"))
    ref = tiny.rows(plane, LENGTHS)
    torch.manual_seed(1)
    first = tiny.gradients(engine, plane, ref)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert torch.equal(first, tiny.gradients(engine, plane, ref))
    assert torch.equal(state, torch.random.get_rng_state())
    engine.train(ref, NLL_OBJECTIVE)
    engine._optimizer.steps = 5  # type: ignore[union-attr]
    assert engine.model.training
    losses = {values(engine.evaluate(ref, NLL_OBJECTIVE))["loss"] for _ in range(2)}
    assert len(losses) == 1
    assert not engine.model.training


def test_padding_equal_to_the_end_token_is_still_trained_on(tmp_path: Path) -> None:
    """C6: pad is eos. The last token of each row is a real end and carries loss; what pads does not."""
    engine, plane = tiny.engine(tiny.config(tmp_path))
    eos = tiny.TOKENIZER.eos_token_id
    assert eos == tiny.TOKENIZER.pad_token_id
    ref = tiny.rows(plane, [5, 3, 4, 2])
    ids = [torch.cat([torch.randint(4, 32, (n - 1,)), torch.tensor([eos])]) for n in ref.lengths]
    masks = [torch.tensor([0.0] * (n - 1) + [1.0]) for n in ref.lengths]
    plane.put(ref, {"input_ids": ids, "loss_mask": masks})
    assert values(engine.evaluate(ref, NLL_OBJECTIVE))["num_tokens"] == 4
    for _ in range(20):
        engine.train(ref, NLL_OBJECTIVE)
    for row in ids:
        assert int(engine.model(row[None, :-1]).logits[0, -1].argmax()) == eos


# ------------------------------------------------------------------------------------------------------------ inference


def test_infer_stores_unpadded_rows_in_their_order(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path, train_micro_batch_size=2))
    ref = tiny.rows(plane, [3, 7, 1, 5])
    head = Head(("logprobs", "entropy", "topk"), temperature=0.5, k=2)
    into = {"logprobs": "old", "entropy": "entropy", "topk_ids": "ids", "topk_logprobs": "topk"}
    out = engine.infer(ref, head, into)
    assert out.fields == ref.fields | set(into.values())
    columns = plane.get(out, ["input_ids", "old", "ids", "topk"])
    for ids, old, best in zip(columns["input_ids"], columns["old"], columns["topk"], strict=True):
        logprobs = (engine.model(ids[None]).logits[0] / 0.5).log_softmax(-1)
        assert old.shape == ids.shape
        assert best.shape == (len(ids), 2)
        torch.testing.assert_close(old[1:], logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1), rtol=0, atol=1e-5)
        assert old[0] == 0
        assert not old.requires_grad


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_old_and_new_logprobs_agree_before_the_first_update(tmp_path: Path, temperature: float) -> None:
    """F11: one temperature on both sides, so the ratio is 1."""

    @dataclass(frozen=True)
    class Ratio(NLL):
        fields: tuple[str, ...] = ("loss_mask", "old")

        def __call__(self, out: Any, columns: Any, *, norm: Any) -> Any:
            ratio = ((out["logprobs"] - columns["old"]) * columns["loss_mask"]).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
            return NLL.__call__(self, out, columns, norm=norm)

    engine, plane = tiny.engine(tiny.config(tmp_path))
    head = Head(temperature=temperature)
    ref = engine.infer(tiny.rows(plane, LENGTHS), head, {"logprobs": "old"})
    engine.train(ref, Objective("policy", head, Ratio()))


# ------------------------------------------------------------------------------------------------------------ the state


@pytest.mark.parametrize("name", ["untied llama", "tied llama", "gpt2", "experts one by one"])
def test_a_resumed_engine_continues_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Six steps in one go, and three, a checkpoint, a model built from it alone, and three more."""
    from surefoot.engine import models

    configuration = tiny.config(tmp_path, name, scheduler={"name": "cosine", "warmup_steps": 2})
    straight, plane = tiny.engine(configuration, total_optimizer_steps=6)
    batches = [tiny.rows(plane, LENGTHS, seed=step) for step in range(6)]
    for batch in batches[:3]:
        straight.train(batch, NLL_OBJECTIVE)
    reader = saved(straight)
    tokenizer = models.load_tokenizer_from_checkpoint(reader)
    loaded = models.load_from_checkpoint(reader, configuration, tokenizer)
    resumed = LocalEngine(
        loaded.model, loaded.files, configuration, plane, CloningStager(), seed=7, total_optimizer_steps=6
    )
    resumed.restore(reader)
    for batch in batches[3:]:
        assert straight.train(batch, NLL_OBJECTIVE) == resumed.train(batch, NLL_OBJECTIVE)
    expected, found = straight._state(), resumed._state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(t, found[n]) for n, t in expected.items())
    assert saved(resumed)._contents == saved(straight)._contents


def test_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path))
    ref = tiny.rows(plane, LENGTHS)
    engine.train(ref, NLL_OBJECTIVE)
    now = saved(engine)._contents
    write = engine.snapshot()
    engine.train(ref, NLL_OBJECTIVE)
    from tests.helpers.memory_store import MemorySink

    sink = MemorySink()
    write(sink)  # type: ignore[arg-type]
    assert sink.contents == now
    assert saved(engine)._contents != now


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    stager = CloningStager()
    engine, _ = tiny.engine(tiny.config(tmp_path))
    engine._stager = stager
    engine.warm()
    reader = saved(engine)
    assert set(reader.files()) == {
        "optimizer/state.json",
        "optimizer/state.safetensors",
        *(
            f"weights/{n}"
            for n in (
                "chat_template.jinja",
                "config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
            )
        ),
    }
    weights, moments = reader.tensors("weights/model.safetensors"), reader.tensors("optimizer/state.safetensors")
    assert weights.keys() == engine.weights().keys()
    assert stager.warmed == {f"weights/{n}" for n in weights} | {f"optimizer/{n}" for n in moments}
    sizes = sum(t.numel() * t.element_size() for t in (*weights.values(), *moments.values()))
    assert engine.state_bytes == sizes
    state = reader.json("optimizer/state.json")
    assert state["optimizer_steps"] == 0
    assert state["hyperparameters"]["lr"] == 1e-2
    decayed, plain = state["groups"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert sorted(decayed["parameters"] + plain["parameters"]) == sorted(state["parameters"])
    assert "model.norm.weight" in plain["parameters"]


def test_without_the_optimizer_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    engine, _ = tiny.engine(tiny.config(tmp_path), save_optimizer=False)
    reader = saved(engine)
    assert not [name for name in reader.files() if name.startswith("optimizer")]
    assert engine.state_bytes == sum(t.numel() * 4 for t in engine.weights().values())
    with pytest.raises(ResumeRefused, match="save_optimizer: false"):
        engine.restore(reader)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "order"])
def test_a_state_of_another_model_is_refused(tmp_path: Path, damage: str) -> None:
    from safetensors.torch import save

    engine, _ = tiny.engine(tiny.config(tmp_path))
    contents = dict(saved(engine)._contents)
    moments = MemoryReader(contents).tensors("optimizer/state.safetensors")
    name = "exp_avg.model.norm.weight"
    if damage == "missing":
        del moments[name]
    elif damage == "extra":
        moments["exp_avg.other"] = torch.zeros(2)
    elif damage == "shape":
        moments[name] = torch.zeros(3)
    else:
        state = json.loads(contents["optimizer/state.json"])
        contents["optimizer/state.json"] = json.dumps({**state, "parameters": state["parameters"][::-1]}).encode()
    contents["optimizer/state.safetensors"] = save(moments)
    with pytest.raises(CheckpointError, match="another order" if damage == "order" else "exp_avg"):
        engine.restore(MemoryReader(contents))


def test_assigned_weights_are_the_models(tmp_path: Path) -> None:
    engine, _ = tiny.engine(tiny.config(tmp_path, "tied llama"))
    new = {name: torch.randn_like(tensor) for name, tensor in engine.weights().items()}
    assert "lm_head.weight" not in new
    engine.assign(new)
    assert torch.equal(engine.model.lm_head.weight, new["model.embed_tokens.weight"])
    del new["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model.norm.weight is missing"):
        engine.assign({name: tensor + 1 for name, tensor in new.items()})
    assert torch.equal(engine.model.lm_head.weight, new["model.embed_tokens.weight"])


def test_a_frozen_engine_keeps_a_fingerprint(tmp_path: Path) -> None:
    engine, plane = tiny.engine(tiny.config(tmp_path), trained=False)
    reader = saved(engine)
    assert reader.files() == ("frozen.json",)
    engine.restore(reader)
    with pytest.raises(ValueError, match="frozen"):
        engine.train(tiny.rows(plane, [3]), NLL_OBJECTIVE)
    with torch.no_grad():
        engine.model.model.norm.weight[0] += 1e-3
    with pytest.raises(ResumeRefused, match="fingerprint"):
        engine.restore(reader)


def test_a_synced_engine_is_saved_without_an_optimizer(tmp_path: Path) -> None:
    """What is changed in place after the snapshot is not in it; and what is restored is the snapshot, bit for bit."""
    engine, plane = tiny.engine(tiny.config(tmp_path), trained=False, synced=True)
    engine.warm()
    moment = {name: tensor.clone() for name, tensor in engine.weights().items()}
    assert engine.state_bytes == sum(tensor.numel() * tensor.element_size() for tensor in moment.values())
    reader = saved(engine)
    assert "weights/model.safetensors" in reader.files()
    assert not any("optimizer" in name or "frozen" in name for name in reader.files())
    writer = engine.snapshot()
    for tensor in engine.weights().values():
        tensor.lerp_(torch.ones_like(tensor), 0.5)
    sink = MemorySink()
    writer(sink)  # type: ignore[arg-type]
    assert sink.contents == {name: reader.bytes(name) for name in reader.files()}
    engine.restore(reader)
    assert all(torch.equal(tensor, moment[name]) for name, tensor in engine.weights().items())
    with pytest.raises(ValueError, match="frozen"):
        engine.train(tiny.rows(plane, [3]), NLL_OBJECTIVE)
