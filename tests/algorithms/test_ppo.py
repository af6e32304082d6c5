"""Proximal policy optimisation, in real runs: values, advantages by hand, KL in the reward, warm-up, the value model's
own section, exact resumes, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from surefoot import loop
from surefoot.config_file import config_as_yaml, load_config
from surefoot.engine.frozen import BaseView
from surefoot.errors import ConfigError, ModelError, ResumeRefused
from surefoot.run import Run
from surefoot.types import BatchRef, Clock
from tests.helpers import runs

LORA = "policy.lora={dim: 4, target_modules: [all-linear, embed_tokens]}"
FOUR_STEPS = ("policy.train_global_batch_size=2", "ppo.num_epochs_per_step=2")
UNSAVED = ("checkpointing.enabled=false", "val_period=0")
CONSTANT = "policy.scheduler={name: constant}"
KL = ("ppo.reference_policy_kl_penalty=0.5", "policy.optimizer.lr=0.05")
RAW = "ppo.normalize_advantages=false"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Steps of four prompts with one completion each, in one optimizer step."""
    return runs.write_project(tmp_path, case="ppo")


def lines(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in runs.metric_lines(run_dir) if line["kind"] == kind]


@contextmanager
def started(file: Path, *overrides: str) -> Iterator[Run]:
    """A run whose sampler has the policy's weights; nothing is trained."""
    run = runs.started(file, *UNSAVED, *overrides)
    try:
        loop._publish(run)
        yield run
    finally:
        run.source.close()
        run.checkpoints.shutdown()


def taken(run: Run, **columns: Any) -> BatchRef:
    """The next step's rows, with these columns in place of their own."""
    batch = run.source.take(run.clock, lambda: None)
    assert batch is not None
    return run.kit.plane.put(batch, columns)


NEEDED = ["reward", "loss_mask", "scalars", "old_values", "returns", "advantages", "truncated"]


def enriched(run: Run, batch: BatchRef, *more: str) -> dict[str, Any]:
    return dict(run.kit.plane.get(run.algorithm.enrich(batch, run.kit), [*NEEDED, *more]))


def weights(run: Run, engine: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.kit.engines[engine].weights().items()}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(some[name], tensor) for name, tensor in others.items())


# ------------------------------------------------------------------------------------------- log-probs, ratios, values


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("more", [(), (LORA,)], ids=["whole", "adapter"])
def test_before_the_first_update_the_ratio_is_1(file: Path, temperature: float, more: tuple[str, ...]) -> None:
    with started(file, f"generation.temperature={temperature}", *FOUR_STEPS, *more) as run:
        batch = run.algorithm.enrich(taken(run), run.kit)
        value, policy = run.algorithm.objectives(run.clock)
        found = {name: m.value for name, m in run.kit.engines["policy"].evaluate(batch, policy).items()}
        valued = run.kit.engines["value"].evaluate(batch, value)
    assert found["ratio/min"] == pytest.approx(1, abs=1e-5) == found["ratio/max"]
    assert found["generator_mismatch/max"] < 1e-5
    assert valued["clip_ratio"].value == 0, "nor have the values moved"


def test_values_are_those_of_a_model_that_has_not_seen_the_token(file: Path) -> None:
    """Against Transformers on the value model's own folder, prefix by prefix."""
    runs.trained(file, "max_num_steps=2")
    folder = file.parent / "run/checkpoints/step_2/value/weights"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    run = runs.resumed(file.parent / "run", "max_num_steps=3")
    loop._publish(run)
    found = enriched(run, taken(run), "input_ids")
    run.source.close()
    run.checkpoints.shutdown()
    for ids, mask, values in zip(found["input_ids"], found["loss_mask"], found["old_values"], strict=True):
        for t in mask.nonzero().flatten().tolist():
            with torch.no_grad():
                expected = model.score(model.model(input_ids=ids[None, :t]).last_hidden_state)[0, -1, 0]
            assert float(values[t]) == pytest.approx(float(expected), abs=1e-5)


def test_the_clip_holds_values_back(file: Path) -> None:
    for cliprange, clipped in (("1e-6", True), ("null", False)):
        run_dir = file.parent / cliprange
        runs.trained(file, *UNSAVED, *FOUR_STEPS, f"ppo.cliprange_value={cliprange}", f"run_dir={run_dir}")
        assert any(line["value/clip_ratio"] > 0 for line in lines(run_dir)) == clipped


def test_the_value_model_learns_what_is_to_come(file: Path) -> None:
    """The reward is a constant, which a random model does not expect."""
    settings = ("rewards=[{name: regex, pattern: '', label: one}]", "ppo.cliprange_value=null", "max_num_steps=30")
    runs.trained(file, *UNSAVED, *settings, CONSTANT, "ppo.gae_lambda=1", "policy.optimizer={lr: 0.01}")
    first, *_, last = lines(file.parent / "run")
    assert first["value/returns"] == last["value/returns"] == pytest.approx(1)
    assert abs(first["value/values"] - 1) > 0.2 > 0.1 > abs(last["value/values"] - 1)
    assert last["value/loss"] < first["value/loss"] / 10
    assert "value/explained_variance" not in last, "the returns are equal"


# ----------------------------------------------------------------------------------------------------------- advantages


def by_hand(
    found: dict[str, Any], row: int, gamma: float, decay: float, final: float = 0.0
) -> list[tuple[float, float]]:
    """(advantage, return) of each own token, from the definition: A = Σ (γλ)^k δ, δ = r + γV' − V."""
    own = found["loss_mask"][row].nonzero().flatten().tolist()
    values = [float(found["scalars"][row][t - 1]) for t in own] + [final]
    rewards = [0.0] * (len(own) - 1) + [float(found["reward"][row])]
    deltas = [r + gamma * values[i + 1] - values[i] for i, r in enumerate(rewards)]
    advantages = [
        sum((gamma * decay) ** (k - i) * deltas[k] for k in range(i, len(deltas))) for i in range(len(deltas))
    ]
    return [(a, a + v) for a, v in zip(advantages, values, strict=False)]


@pytest.mark.parametrize("bootstrap", [True, False])
def test_advantages_and_returns_by_hand(file: Path, bootstrap: bool) -> None:
    """What was cut off goes on with the value of its end, or ends like any other; an answer that ended just ends."""
    settings = ("ppo.gae_gamma=0.9", "ppo.gae_lambda=0.6", RAW, f"ppo.bootstrap_truncated={bootstrap}")
    with started(file, *settings) as run:
        batch = taken(run, truncated=torch.tensor([1.0, 0.0, 1.0, 0.0]))
        found = enriched(run, batch)
    for row in range(4):
        own = found["loss_mask"][row] != 0
        cut = bootstrap and bool(found["truncated"][row])
        final = float(found["scalars"][row][own.nonzero().max()]) if cut else 0.0
        expected = by_hand(found, row, 0.9, 0.6, final)
        for place, name in enumerate(("advantages", "returns")):
            assert found[name][row][own].tolist() == pytest.approx([pair[place] for pair in expected], abs=1e-5)
            assert not found[name][row][~own].any()


def test_what_an_environment_said_is_no_step(file: Path) -> None:
    """A token amid the answer that is not the model's has no advantage, and the steps around it follow each other."""
    with started(file, "ppo.gae_gamma=0.9", "ppo.gae_lambda=0.6", RAW) as run:
        batch = taken(run)
        masks: Any = run.kit.plane.get(batch, ["loss_mask"])["loss_mask"]
        gaps = [mask.clone() for mask in masks]
        for mask in gaps:
            mask[int(mask.nonzero()[1])] = 0
        found = enriched(run, run.kit.plane.put(batch, {"loss_mask": gaps}))
        value, policy = run.algorithm.objectives(run.clock)
        counted = [
            run.kit.engines[objective.engine].evaluate(batch, objective)["num_tokens"].value
            for objective in (value, policy)
        ]
    for row in range(4):
        expected = [advantage for advantage, _ in by_hand(found, row, 0.9, 0.6)]
        assert found["advantages"][row][gaps[row] != 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert counted == [sum(float(mask.sum()) for mask in gaps)] * 2


def test_advantages_are_whitened_over_the_step(file: Path) -> None:
    with started(file, "ppo.advantage_clip_high=1", f"run_dir={file.parent / 'clipped'}") as run:
        clipped = enriched(run, taken(run))
    with started(file) as run:
        found = enriched(run, taken(run))
    chosen = torch.cat([a[m != 0] for a, m in zip(found["advantages"], found["loss_mask"], strict=True)])
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-6)
    assert float(chosen.std()) == pytest.approx(1, abs=1e-4)
    assert torch.equal(torch.cat(clipped["advantages"]), torch.cat(found["advantages"]).clamp(max=1))


@pytest.mark.parametrize("setting", ["no reward", "filtered"])
def test_rows_that_teach_nothing(file: Path, setting: str) -> None:
    """A row on which all functions abstained, or a filtered one: in no mean, no advantage, and the value stays."""
    columns: dict[str, Any] = {"truncated": torch.tensor([0.0, 0.0, 1.0, 0.0])}
    more = ("ppo.overlong_filtering=true",)
    if setting == "no reward":
        columns, more = {"reward": torch.tensor([1.0, 0.5, math.nan, 0.0])}, ()
    with started(file, *more) as run:
        found = enriched(run, taken(run, **columns))
        abstained = run.algorithm.metrics["abstained_rows"].value
    own = [mask != 0 for mask in found["loss_mask"]]
    assert not found["advantages"][2].any()
    assert torch.equal(found["returns"][2][own[2]], found["old_values"][2][own[2]])
    others = torch.cat([found["advantages"][row][own[row]] for row in (0, 1, 3)])
    assert float(others.mean()) == pytest.approx(0, abs=1e-6)
    assert abstained == (setting == "no reward")


# ------------------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize(("kind", "value"), [("k1", lambda x: x), ("k2", lambda x: x * x / 2), ("null", lambda x: x)])
def test_the_penalty_is_part_of_each_tokens_reward(file: Path, kind: str, value: Any) -> None:
    """With γ = λ = 1 a token's return is the reward less β · KL of it and all later own tokens."""
    settings = ("ppo.gae_lambda=1", RAW, f"ppo.reference_policy_kl_type={kind}")
    with started(file, *KL, *settings) as run:
        for number, tensor in enumerate(run.kit.engines["reference"].weights().values()):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
            tensor.add_(0.1 * noise)
        found = enriched(run, taken(run), "old_logprobs", "reference_logprobs")
        metrics, objective = run.algorithm.metrics, run.algorithm.objectives(run.clock)[1]
    total = []
    for row in range(4):
        own = found["loss_mask"][row].nonzero().flatten().tolist()
        kl = [value(float(found["old_logprobs"][row][t] - found["reference_logprobs"][row][t])) for t in own]
        expected = [float(found["reward"][row]) - 0.5 * sum(kl[i:]) for i in range(len(own))]
        assert found["returns"][row][own].tolist() == pytest.approx(expected, abs=1e-5)
        assert len({round(number, 4) for number in expected}) > 1
        total += kl
    assert metrics["kl"].value == pytest.approx(sum(total) / len(total), rel=1e-4)
    assert metrics["kl_coefficient"].value == 0.5
    assert "reference_logprobs" not in objective.loss.fields, "it is no part of the loss"


@pytest.mark.parametrize("more", [(), (LORA,)], ids=["second model", "adapter off"])
def test_the_reference_is_the_policy_as_it_was(file: Path, more: tuple[str, ...]) -> None:
    run = runs.started(file, *UNSAVED, *KL, *more)
    assert isinstance(run.kit.engines["reference"], BaseView) == bool(more)
    loop.train(run)
    first, *later = lines(file.parent / "run")
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert any(abs(line["kl"]) > 1e-3 for line in later)
    assert {line["kl_coefficient"] for line in (first, *later)} == {0.5}


def test_without_a_penalty_there_is_no_reference(file: Path) -> None:
    with started(file) as run:
        assert set(run.kit.engines) == {"policy", "value"}
        run.algorithm.enrich(taken(run), run.kit)
        assert "kl" not in run.algorithm.metrics


ADAPTIVE = (*KL, "ppo.adaptive_kl={target: 0.02, horizon: 8}")


def test_the_coefficient_follows_the_kl(file: Path) -> None:
    """β ← β · (1 + 4/8 · e) with e = kl / 0.02 − 1, within ±0.2; four rows a step."""
    run_dir, coefficient, seen = file.parent / "run", 0.5, set()
    runs.trained(file, *ADAPTIVE, "checkpointing.save_period=1")
    for line in lines(run_dir):
        assert line["kl_coefficient"] == pytest.approx(coefficient, rel=1e-12)
        error = line["kl"] / 0.02 - 1
        seen.add("low" if error < -0.2 else "high" if error > 0.2 else "between")
        coefficient *= 1 + 0.5 * max(-0.2, min(0.2, error))
        saved = json.loads((run_dir / f"checkpoints/step_{line['step']}/algorithm/ppo.json").read_text())
        assert saved["kl_coefficient"] == pytest.approx(coefficient, rel=1e-12)
    assert {"low", "high"} <= seen


def test_a_coefficient_that_is_not_adaptive_is_the_configurations(file: Path) -> None:
    runs.trained(file, *KL, "max_num_steps=2")
    change = "ppo.reference_policy_kl_penalty=0.25"
    allowed = frozenset({"ppo.reference_policy_kl_penalty", "algorithm"})
    with pytest.raises(ResumeRefused, match="reference_policy_kl_penalty"):
        runs.resumed(file.parent / "run", change, "max_num_steps=3")
    loop.train(runs.resumed(file.parent / "run", change, "max_num_steps=3", allow=allowed))
    assert [line["kl_coefficient"] for line in lines(file.parent / "run")] == [0.5, 0.5, 0.25]


# -------------------------------------------------------------------------------------------------------------- warm-up


def test_the_warm_up_trains_the_value_model_alone(file: Path) -> None:
    run = runs.started(file, *UNSAVED, *ADAPTIVE, "ppo.critic_warmup_steps=2", "max_num_steps=4")
    policy, value = [weights(run, "policy")], [weights(run, "value")]
    step = run.report.step

    def report(clock: Clock, metrics: Any) -> None:
        policy.append(weights(run, "policy"))
        value.append(weights(run, "value"))
        step(clock, metrics)

    run.report.step = report  # type: ignore[method-assign]
    loop.train(run)
    assert [same(policy[0], now) for now in policy] == [True, True, True, False, False], "to the bit"
    assert not any(same(before, now) for before, now in pairwise(value))
    found = lines(file.parent / "run")
    assert ["loss" in line for line in found] == [False, False, True, True]
    assert all("value/loss" in line and "reward" in line for line in found)
    assert [line["kl_coefficient"] for line in found][:3] == [0.5] * 3, "there is no KL to follow yet"
    assert [line.get("optimizer_steps") for line in found] == [None, None, 1, 2]


def test_each_schedule_counts_its_own_optimizer_steps(file: Path) -> None:
    """The policy's decay ends with the run, though it begins after the warm-up."""
    runs.trained(file, *FOUR_STEPS, "ppo.critic_warmup_steps=2", "max_num_steps=4", "checkpointing.save_period=4")
    states = {
        name: json.loads((file.parent / f"run/checkpoints/step_4/{name}/optimizer/state.json").read_text())
        for name in ("policy", "value")
    }
    assert {n: (s["optimizer_steps"], s["decay_end"]) for n, s in states.items()} == {
        "policy": (8, 8),
        "value": (16, 16),
    }


# ------------------------------------------------------------------------------------------------------ the value model


def test_the_value_model_is_the_policys_with_a_new_head(file: Path) -> None:
    named = ("policy.model_init=null", f"policy.model_name={file.parent / 'model'}", f"run_dir={file.parent / 'named'}")
    for more in ((), named):
        with started(file, *more) as run:
            policy, value = weights(run, "policy"), weights(run, "value")
            assert {"score.weight"} == value.keys() - policy.keys()
            assert same(value, {name: tensor for name, tensor in policy.items() if name in value})
            run.kit.engines["policy"].model.save_pretrained(file.parent / "model")  # type: ignore[attr-defined]
            run.kit.tokenizer.save_pretrained(file.parent / "model")


def test_its_section_takes_the_policys_place_key_by_key(file: Path) -> None:
    given = ("value.optimizer.lr=0.003", "value.model_init={model_type: llama, hidden_size: 8, num_attention_heads: 2}")
    config: Any = runs.config_of(file, *given)
    assert (config.value.optimizer.lr, config.value.optimizer.weight_decay) == (0.003, 0.0), "a section as a whole"
    assert config.value.scheduler == config.policy.scheduler
    assert (config.value.model_name, config.value.model_init["hidden_size"]) == (None, 8)
    assert config.policy.optimizer.lr == 0.01
    whole = config.engine("value")
    assert (whole.num_threads, whole.tokenizer, whole.train_global_batch_size) == (1, config.policy.tokenizer, 4)
    again = file.parent / "again.yaml"
    again.write_text(config_as_yaml(config))
    assert load_config(again).model_dump() == config.model_dump()
    small = "value.model_init={model_type: llama, hidden_size: 8, num_attention_heads: 2, num_hidden_layers: 1, "
    small += "num_key_value_heads: 2, intermediate_size: 16, max_position_embeddings: 64}"
    runs.trained(file, small, "value.optimizer.lr=0.003", "max_num_steps=2")
    folder = file.parent / "run/checkpoints/step_2"
    sizes = [
        json.loads((folder / f"{name}/weights/config.json").read_text())["hidden_size"] for name in ("policy", "value")
    ]
    assert sizes == [16, 8]
    assert lines(file.parent / "run")[-1]["value/lr"] != lines(file.parent / "run")[-1]["lr"]
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=3"))


def test_a_reward_model_can_be_where_it_begins(file: Path, tmp_path: Path) -> None:
    """Its score head stays."""
    home = tmp_path / "rm"
    runs.trained(runs.write_project(home, case="rm"), "max_num_steps=2")
    folder = home / "run/checkpoints/step_2/policy/weights"
    other = runs.write_project(tmp_path / "other", case="ppo")
    tokenizer = f"policy.tokenizer.name={home / 'tokenizer'}"
    with started(other, f"value.model_name={folder}", tokenizer) as run:
        head = AutoModelForSequenceClassification.from_pretrained(folder).score.weight
        assert torch.equal(run.kit.engines["value"].weights()["score.weight"], head)


def test_a_value_model_with_another_tokenizer_is_refused(file: Path, tmp_path: Path) -> None:
    runs.trained(runs.write_project(tmp_path / "rm", case="rm"), "max_num_steps=2")
    folder = tmp_path / "rm/run/checkpoints/step_2/policy/weights"
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ModelError, match="its tokenizer is not the policy's: '1' is"):
        runs.started(file, f"value.model_name={folder}")
    assert not (file.parent / "run").exists()
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere"):
        runs.started(file, f"value.model_name={tmp_path / 'nowhere'}")


def test_every_checkpoint_holds_both_models(file: Path) -> None:
    runs.trained(file, "max_num_steps=2", LORA)
    folder = file.parent / "run/checkpoints/step_2"
    for name in ("policy", "value"):
        assert (folder / name / "weights/adapter_config.json").is_file(), "by default both are adapted"
    runs.trained(file, "max_num_steps=2", LORA, "value.lora=null", f"run_dir={file.parent / 'other'}")
    folder = file.parent / "other/checkpoints/step_2"
    assert (folder / "policy/weights/adapter_config.json").is_file()
    AutoModelForSequenceClassification.from_pretrained(folder / "value/weights")
    runs.trained(file, "max_num_steps=2", f"run_dir={file.parent / 'plain'}")
    AutoModelForCausalLM.from_pretrained(file.parent / "plain/checkpoints/step_2/policy/weights")


# ------------------------------------------------------------------------------------------------------- exact resumes


@pytest.mark.parametrize("stop_at", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        (*FOUR_STEPS, *ADAPTIVE, "ppo.critic_warmup_steps=2"),
        (LORA, *ADAPTIVE),
        ("value.optimizer={lr: 0.02}", "value.train_micro_batch_size=1", "ppo.bootstrap_truncated=true"),
    ],
    ids=["in and after a warm-up", "adapters", "settings of its own"],
)
def test_a_resumed_run_is_the_straight_one(file: Path, stop_at: int, more: tuple[str, ...]) -> None:
    ends = ("policy.scheduler.decay_steps=30", "checkpointing.save_period=1")
    straight, again = file.parent / "run", file.parent / "again"
    runs.trained(file, *ends, *more)
    run = runs.started(file, *ends, *more, f"run_dir={again}")
    report = run.report.step

    def dying(clock: Clock, metrics: Any) -> None:
        if clock.step == stop_at + 1:
            run.checkpoints.wait_for_finalization()
            raise KeyboardInterrupt
        report(clock, metrics)

    run.report.step = dying  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.train(run)
    loop.train(runs.resumed(again))
    states = [runs.state_bytes(folder / "checkpoints" / "step_6") for folder in (straight, again)]
    assert states[0].keys() == states[1].keys() and states[0] == states[1]
    assert any(name.startswith("value/optimizer/") for name in states[0])
    assert runs.metric_lines(straight) == runs.metric_lines(again)


# -------------------------------------------------------------------------------------------------------------- faults


def test_it_learns(file: Path) -> None:
    """From random weights, to end its turn after one token more."""
    settings = ("ppo.num_prompts_per_step=32", "generation.num_slots=32", "max_num_steps=25")
    batch = ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16", "policy.optimizer={lr: 0.01}")
    runs.trained(file, *UNSAVED, *settings, *batch, CONSTANT, "rewards=[{name: length, target: 2}]")
    rewards = [line["reward"] for line in lines(file.parent / "run")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_equal_rewards_are_no_reason_to_warn(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The value model learns from them what is to be expected."""
    settings = (
        "ppo.num_prompts_per_step=2",
        "ppo.num_generations_per_prompt=2",
        "rewards=[{name: regex, pattern: no such text}]",
    )
    runs.trained(file, *UNSAVED, *settings)
    assert all(line["zero_variance_groups"] == 1 for line in lines(file.parent / "run"))
    assert "nothing is learned" not in caplog.text


def test_all_cut_off_and_filtered_trains_no_policy(file: Path) -> None:
    run = runs.started(file, *UNSAVED, "generation.max_new_tokens=1", "ppo.overlong_filtering=true", "max_num_steps=2")
    rollouts: Any = run.kit.rollouts
    object.__setattr__(rollouts.sampling, "stop_ids", ())
    loop.train(run)
    for line in lines(file.parent / "run"):
        assert (line["truncated"], line["loss"], line["grad_norm"], line["value/loss"]) == (1.0, 0.0, 0.0, 0.0)
        assert line["skipped_optimizer_steps"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    {
        "gamma": (("ppo.gae_gamma=1.1",), r"ppo.gae_gamma: input should be less than or equal to 1, found 1.1"),
        "lambda": (("ppo.gae_lambda=-0.1",), r"ppo.gae_lambda: input should be greater than or equal to 0, found -0.1"),
        "lambdas": (("ppo.gae_lambda_value=2",), "ppo.gae_lambda_value: input should be less than or equal to 1"),
        "two lambdas": (
            ("ppo.length_adaptive_alpha=0.05", "ppo.gae_lambda_policy=0.9"),
            "length_adaptive_alpha and gae_lambda_policy both set the advantages' λ",
        ),
        "clip": (("ppo.cliprange_value=0",), "ppo.cliprange_value: input should be greater than 0"),
        "cut off": (
            ("ppo.bootstrap_truncated=true", "ppo.overlong_filtering=true"),
            "bootstrap_truncated: overlong_filtering leaves out what was cut off",
        ),
        "adaptive": (("ppo.adaptive_kl={target: 0.1}",), "adaptive_kl: reference_policy_kl_penalty is 0"),
        "target": (
            ("ppo.adaptive_kl={horizon: 9}", "ppo.reference_policy_kl_penalty=1"),
            "ppo.adaptive_kl.target: missing",
        ),
        "kl type": (("ppo.reference_policy_kl_type=k1",), "with reference_policy_kl_penalty 0 nothing reads it"),
        "plain": ((*KL, "ppo.reference_policy_kl_type=k3_plain"), "ppo.reference_policy_kl_type: .*'k3'"),
        "warm-up": (
            ("ppo.critic_warmup_steps=6",),
            r"ppo.critic_warmup_steps \(6\) leaves none of max_num_steps \(6\)",
        ),
        "rows": (("policy.train_global_batch_size=8",), r"train_global_batch_size \(8\) must divide the 4 rows of a"),
        "micro": (
            ("value.train_micro_batch_size=3",),
            r"policy.train_global_batch_size \(4\) must be a multiple of value.train_micro_batch_size \(3\)",
        ),
        "group": (("ppo.leave_one_out=true",), "ppo.leave_one_out: unknown key"),
        "advantage": (("ppo.advantage=group",), "ppo.advantage: unknown key; did you mean ppo.advantage_clip"),
        "dynamic": (("ppo.dynamic_sampling=true",), "dynamic_sampling: a group of one completion has no variance"),
        "ignored": (("ppo.loss_type=reinforce", "ppo.ratio_clip_max=0.3"), "loss_type reinforce ignores it"),
        "greedy": (("generation.temperature=0",), "generation.temperature: 0 always takes the same completion"),
        "value key": (("value.learning_rate=1",), "value.learning_rate: unknown key"),
        "value's threads": (
            ("value.num_threads=1",),
            "value.num_threads: unknown key; it belongs at policy.num_threads",
        ),
        "two models": (
            ("value.model_init={model_type: llama}", "value.model_name=x"),
            "value: expected exactly one of model_name and model_init, found both",
        ),
        "value": (("value=3",), "value: .*found 3"),
    }.values(),
)
def test_what_cannot_be_run_is_refused(file: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.config_of(file, *overrides)


def test_other_algorithms_have_no_value_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="value: unknown key"):
        runs.config_of(runs.write_project(tmp_path, case="grpo"), "value.optimizer.lr=1")
