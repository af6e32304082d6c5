"""Group relative policy optimisation, in real runs: presets, ratios, advantages, exact resumes, adapters, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from surefoot import loop
from surefoot.algorithms.grpo import PRESETS
from surefoot.config_file import algorithm_config, config_as_yaml, parse_config, read_yaml
from surefoot.engine.frozen import BaseView
from surefoot.errors import ConfigError, ModelError, ResumeRefused, RolloutError, StaleWeights
from surefoot.rollout.rewards import RewardError
from surefoot.run import Run
from tests.helpers import runs

LORA = "policy.lora={dim: 4, target_modules: [all-linear, embed_tokens]}"
FOUR_STEPS = ("policy.train_global_batch_size=2", "grpo.num_epochs_per_step=2")
UNSAVED = ("checkpointing.enabled=false", "val_period=0")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Steps of two prompts with two completions each, in one optimizer step."""
    return runs.write_project(tmp_path, case="grpo")


def lines(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in runs.metric_lines(run_dir) if line["kind"] == kind]


def completions(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: pq.read_table(path).to_pylist() for path in sorted((run_dir / "completions").iterdir())}


def before_training(run: Run) -> dict[str, float]:
    """What the first step's loss measures with the weights that sampled its rows."""
    batch = run.source.take(run.clock, lambda: None)
    assert batch is not None
    batch = run.algorithm.enrich(batch, run.kit)
    (objective,) = run.algorithm.objectives(run.clock)
    return {name: m.value for name, m in run.kit.engines["policy"].evaluate(batch, objective).items()}


# -------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_its_knobs_and_trains(file: Path, preset: str) -> None:
    run_dir = file.parent / "run"
    quoted = f"grpo.preset={preset}"
    shown = config_as_yaml(runs.config_of(file, quoted))
    values: Any = algorithm_config(parse_config(read_yaml(file), [quoted]))
    for name, value in PRESETS[preset].items():
        assert getattr(values, name) == value
        assert f"  {name}: " in shown
    runs.trained(file, quoted, *UNSAVED, "max_num_steps=2", "grpo.dynamic_sampling=false")
    assert len(lines(run_dir)) == 2
    assert algorithm_config(runs.config_of(run_dir / "config.yaml")) == algorithm_config(
        runs.config_of(file, quoted, "grpo.dynamic_sampling=false")
    )


def test_what_is_given_beats_the_preset(file: Path) -> None:
    values: Any = algorithm_config(runs.config_of(file, "grpo.preset=dapo", "grpo.ratio_clip_max=0.25"))
    assert (values.ratio_clip_min, values.ratio_clip_max, values.dynamic_sampling) == (0.2, 0.25, True)


# --------------------------------------------------------------------------------------------- log-probs and the ratio


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("more", [(), (LORA,)], ids=["whole", "adapter"])
def test_before_the_first_update_the_ratio_is_1(file: Path, temperature: float, more: tuple[str, ...]) -> None:
    """With log-probs computed before the step, and against those of the generator."""
    run = runs.started(file, f"generation.temperature={temperature}", *FOUR_STEPS, *more)
    loop._publish(run)
    found = before_training(run)
    run.source.close()
    run.checkpoints.shutdown()
    assert found["ratio/min"] == pytest.approx(1, abs=1e-5) == found["ratio/max"]
    assert found["generator_mismatch/max"] < 1e-5
    assert found["importance_weight/min"] == pytest.approx(1, abs=1e-5) == found["importance_weight/max"]


@pytest.mark.parametrize("more", [(), (LORA,)], ids=["whole", "adapter"])
def test_sampler_and_trainer_agree_after_every_sync(file: Path, more: tuple[str, ...]) -> None:
    run_dir = file.parent / "run"
    runs.trained(file, *UNSAVED, "policy.optimizer.lr=0.05", *more)
    found = [line["generator_mismatch/max"] for line in lines(run_dir)]
    assert len(found) == 6 and max(found) < 1e-4
    versions = {name: {row["version"] for row in rows} for name, rows in completions(run_dir).items()}
    assert versions == {f"step_{step}.parquet": {step - 1} for step in range(1, 7)}


def test_one_optimizer_step_takes_the_policys_own_log_probs(file: Path) -> None:
    """Nothing is inferred before the step where the ratio is 1 anyway."""
    run = runs.started(file, *UNSAVED, "max_num_steps=1")
    run.kit.engines["policy"].infer = None  # type: ignore[assignment, method-assign]
    loop.train(run)
    (line,) = lines(file.parent / "run")
    assert line["ratio/min"] == line["ratio/max"] == 1.0


def test_several_optimizer_steps_move_the_ratio(file: Path) -> None:
    runs.trained(file, *UNSAVED, *FOUR_STEPS, "generation.max_new_tokens=6")
    found = lines(file.parent / "run")
    assert [line["optimizer_steps"] for line in found] == [4.0 * step for step in range(1, 7)]
    assert any(line["ratio/max"] > 1.001 or line["ratio/min"] < 0.999 for line in found)


def test_a_sync_that_does_nothing_is_noticed(file: Path) -> None:
    run = runs.started(file, *UNSAVED, "policy.optimizer.lr=0.05")
    sampler: Any = run.sync._generators[0]  # type: ignore[attr-defined]
    assign = sampler.assign

    def assigned(weights: Any, version: int) -> None:
        if version < 2:
            assign(weights, version)
        sampler._batch.version = version

    sampler.assign = assigned
    with pytest.raises(StaleWeights, match="version 2"):
        loop.train(run)


# ---------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("more", [(), (LORA,)], ids=["second model", "adapter off"])
def test_the_reference_is_the_policy_as_it_was(file: Path, more: tuple[str, ...]) -> None:
    penalty = ("grpo.reference_policy_kl_penalty=0.1", "policy.optimizer.lr=0.05")
    run = runs.started(file, *UNSAVED, *penalty, *more)
    assert isinstance(run.kit.engines["reference"], BaseView) == bool(more)
    loop.train(run)
    first, *later = lines(file.parent / "run")
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert later[-1]["kl"] > 1e-4


def test_reinforce_plus_plus_has_the_penalty_in_the_reward(file: Path) -> None:
    penalty = ("grpo.preset=reinforce++", "grpo.reference_policy_kl_penalty=1.0", "policy.optimizer.lr=0.05")
    runs.trained(file, *UNSAVED, *penalty, "generation.max_new_tokens=8")
    found = lines(file.parent / "run")
    assert all("kl" not in line for line in found)
    assert sum(line["grad_norm"] > 0 for line in found) >= 3


# ---------------------------------------------------------------------------------------------------------- advantages


def test_advantages_are_within_groups_and_recorded(file: Path) -> None:
    runs.trained(file, *UNSAVED, "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=8")
    varied = 0
    for rows in completions(file.parent / "run").values():
        assert len(rows) == 8
        for group in {row["group"] for row in rows}:
            own = [row for row in rows if row["group"] == group]
            rewards = torch.tensor([row["reward"] for row in own])
            expected = rewards - rewards.mean()
            expected = expected / (rewards.std() + 1e-6) if expected.any() else expected
            assert [row["advantage"] for row in own] == pytest.approx(expected.tolist(), abs=1e-4)
            varied += bool(expected.any())
    assert varied


def test_a_reward_without_its_column_is_refused_at_the_start(file: Path) -> None:
    rows = [json.dumps({"prompt": f"{i}+1=", "solution": str(i + 1)}) + "\n" for i in range(8)]
    (file.parent / "train.jsonl").write_text("".join(rows))
    with pytest.raises(RewardError, match="reward exact_match needs 'answer', and no row has such a column"):
        runs.started(file)
    assert not (file.parent / "run").exists()


def test_completions_that_were_cut_off_cost_their_penalty(file: Path) -> None:
    """Added to the reward, also to a negative one, before the group is compared; what is reported stays raw."""
    run = runs.started(file, "grpo.missing_eos_penalty=0.25", "grpo.advantage=raw", *UNSAVED)
    loop._publish(run)
    batch = run.source.take(run.clock, lambda: None)
    assert batch is not None
    plane: Any = run.kit.plane
    plane.put(batch, {"truncated": torch.tensor([0.0, 1.0, 1.0, 0.0]), "reward": torch.tensor([1.0, 1.0, -2.0, 0.5])})
    advantages = plane.get(run.algorithm.enrich(batch, run.kit), ["advantages", "reward", "loss_mask"])
    rows = zip(advantages["advantages"], advantages["loss_mask"], strict=True)
    assert [float(row[mask > 0][0]) for row, mask in rows] == [1.0, 0.75, -2.25, 0.5]
    assert advantages["reward"].tolist() == [1.0, 1.0, -2.0, 0.5]
    run.source.close()
    run.checkpoints.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        ("grpo.advantage=gdpo", "generation.max_new_tokens=8"),
        ("grpo.advantage=raw", "grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=2"),
        ("grpo.reward_scaling={source_min: 0, source_max: 1, target_max: 10}", "grpo.advantage_scale=none"),
        ("grpo.overlong_buffer_ratio=0.5", "grpo.advantage_clip_high=0.5"),
        ("grpo.entropy_coef=0.01", "grpo.ratio_clip_c=3"),
    ],
)
def test_other_settings_train(file: Path, settings: tuple[str, ...]) -> None:
    runs.trained(file, *UNSAVED, *settings)
    assert any(line["grad_norm"] > 0 for line in lines(file.parent / "run"))


def test_it_learns(file: Path) -> None:
    """From random weights, to end its turn after one token more."""
    settings = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8", "generation.num_slots=32")
    batch = ("policy.train_global_batch_size=32", "policy.train_micro_batch_size=32", "max_num_steps=25")
    rate = ("policy.scheduler.name=constant", "policy.optimizer.lr=0.02")
    runs.trained(file, *UNSAVED, *settings, *batch, *rate, "rewards=[{name: length, target: 2}]")
    rewards = [line["reward"] for line in lines(file.parent / "run")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


# ------------------------------------------------------------------------------------------------------ exact resumes


@pytest.mark.parametrize("stop_at", [1, 3, 4])
@pytest.mark.parametrize(
    "more",
    [FOUR_STEPS, (LORA, "grpo.reference_policy_kl_penalty=0.1"), ("grpo.dynamic_sampling=true",)],
    ids=["four optimizer steps", "adapter", "dynamic sampling"],
)
def test_a_resumed_run_is_the_straight_one(file: Path, stop_at: int, more: tuple[str, ...]) -> None:
    common = ("checkpointing.save_period=1", "policy.scheduler.decay_steps=30", "grpo.num_generations_per_prompt=4")
    common = (*common, "policy.train_global_batch_size=8", "policy.train_micro_batch_size=8", *more)
    if more is FOUR_STEPS:
        common = (*common, "policy.train_global_batch_size=4", "policy.train_micro_batch_size=4")
    straight, again = file.parent / "run", file.parent / "again"
    runs.trained(file, *common)
    run = runs.started(file, *common, f"run_dir={again}", f"max_num_steps={stop_at + 1}")
    run.report.step = stopping(run, stop_at)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.train(run)
    assert len(completions(again)) == stop_at + 1, "the step that was not finished has left its completions"
    loop.train(runs.resumed(again, "max_num_steps=6"))
    states = [runs.state_bytes(folder / "checkpoints" / "step_6") for folder in (straight, again)]
    assert states[0] == states[1]
    assert runs.metric_lines(straight) == runs.metric_lines(again)
    assert completions(straight) == completions(again)
    (aside,) = again.glob("completions.after_step_*")
    assert [path.name for path in aside.iterdir()] == [f"step_{stop_at + 1}.parquet"]


def stopping(run: Run, stop_at: int) -> Any:
    """The process dies after the rows of the next step were trained and recorded."""
    report = run.report.step

    def step(clock: Any, metrics: Any) -> None:
        if clock.step == stop_at + 1:
            run.checkpoints.wait_for_finalization()
            raise KeyboardInterrupt
        report(clock, metrics)

    return step


# ------------------------------------------------------------------------------------------------------------- faults


def test_equal_rewards_for_ever_train_nothing_and_say_so(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = runs.started(
        file, *UNSAVED, "rewards=[{name: regex, pattern: no such text}]", "policy.optimizer.weight_decay=0"
    )
    before = {name: tensor.clone() for name, tensor in run.kit.engines["policy"].weights().items()}
    loop.train(run)
    assert all(line["loss"] == line["grad_norm"] == 0.0 for line in lines(file.parent / "run"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.kit.engines["policy"].weights().items())
    assert "nothing is learned from them" in caplog.text


def test_a_constant_reward_with_dynamic_sampling_is_an_error_with_counts(file: Path) -> None:
    settings = ("grpo.dynamic_sampling=true", "rewards=[{name: regex, pattern: no such text}]")
    with pytest.raises(RolloutError, match=r"of 20 prompts in 10 batches, 0 had .*\(20 with 0 throughout\)"):
        runs.trained(file, *UNSAVED, *settings)


@pytest.mark.parametrize("settings", [FOUR_STEPS, (), ("grpo.reduction=constant",), ("grpo.reduction=sequence",)])
def test_all_cut_off_and_filtered_trains_nothing(file: Path, settings: tuple[str, ...]) -> None:
    filtered = ("generation.max_new_tokens=1", "grpo.overlong_filtering=true", "max_num_steps=2")
    run = runs.started(file, *UNSAVED, *filtered, *settings)
    rollouts: Any = run.kit.rollouts
    object.__setattr__(rollouts.sampling, "stop_ids", ())
    loop.train(run)
    for line in lines(file.parent / "run"):
        assert (line["truncated"], line["loss"], line["grad_norm"]) == (1.0, 0.0, 0.0)
        assert line["skipped_optimizer_steps"] == (4.0 if settings is FOUR_STEPS else 1.0)


def test_a_generator_that_fails_ends_the_run(file: Path) -> None:
    run = runs.started(file, "val_period=0", "checkpointing.save_period=1")
    sampler: Any = run.kit.rollouts._generators["policy"]
    generate, calls = sampler.generate, []

    async def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise ConnectionError("the generator is gone")
        return await generate(*args, **options)

    sampler.generate = failing
    with pytest.raises(ConnectionError, match="the generator is gone"):
        loop.train(run)
    assert [line["step"] for line in lines(file.parent / "run")] == [1]


def test_rollouts_in_an_environment(file: Path) -> None:
    """Rows of its own making, and its reward; each set's rows are its own."""
    made = [
        f"data.{name}={{path: {name}, format: environment, max_rows: 8}}" for name in ("train", "validation.heldout")
    ]
    given = ("environment={name: arithmetic, options: {operators: +}}", "rewards=[]", "evaluation.temperature=0")
    run = runs.started(file, *made, *given, "checkpointing.save_period=3", "max_num_steps=3")
    prompts = {name: {row.given for row in data.prompts} for name, data in run.kit.validation_data.items()}
    assert len(prompts["heldout"] & {row.given for row in run.kit.train_data.prompts}) < 8
    loop.train(run)
    (val, *_) = lines(file.parent / "run", "val")
    assert val["reward"] == val["reward/environment"] == val["pass@1"]
    assert all("reward/environment" in rows[0] for rows in completions(file.parent / "run").values())
    loop.train(runs.resumed(file.parent / "run", "max_num_steps=5"))


def test_one_prompt_alone(file: Path) -> None:
    runs.trained(file, *UNSAVED, "data.train.max_rows=1", "max_num_steps=3")
    assert [(line["step"], line["epoch"], line["rows"]) for line in lines(file.parent / "run")] == [
        (step, step - 1, 2 * step) for step in (1, 2, 3)
    ]


def test_sampling_from_a_part_of_the_vocabulary_is_corrected(file: Path) -> None:
    top = ("generation.top_k=5", "generation.top_p=0.9", "grpo.importance_sampling_correction=token")
    runs.trained(file, *UNSAVED, *top)
    found = lines(file.parent / "run")
    assert all(line["generator_mismatch/mean"] > 0.1 and line["importance_weight/max"] < 1 for line in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    {
        "alone": (
            ("grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=2"),
            r"grpo\.num_generations_per_prompt: 1 leaves advantage group nothing to compare",
        ),
        "rows": (
            ("policy.train_global_batch_size=8",),
            r"train_global_batch_size \(8\) must divide the 4 rows of a step",
        ),
        "groups": (
            ("grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=2"),
            "hold whole groups of 4",
        ),
        "greedy": (("generation.temperature=0",), "generation.temperature: 0 always takes the same completion"),
        "top p": (("generation.top_p=0.9",), "set importance_sampling_correction: token"),
        "room": (
            ("generation.max_new_tokens=32",),
            r"max_new_tokens \(32\) must be below policy.max_total_sequence_le",
        ),
        "no rewards": (("rewards=[]",), "rewards: expected at least one function, or an environment"),
        "label": (
            ("environment={name: arithmetic}", "rewards=[{name: exact_match, label: environment}]"),
            '"environment" is what the environment',
        ),
        "preset": (("grpo.preset=ppo",), "grpo.preset"),
        "ignored": (("grpo.loss_type=reinforce", "grpo.ratio_clip_max=0.3"), "loss_type reinforce ignores it"),
        "key": (("generation.max_tokens=3",), "did you mean generation.max_new_tokens"),
        "reward": (("rewards=[{name: exact_mach}]",), "exact_match"),
        "pass": (("evaluation.pass_reward=other",), "expected one of length, exact_match, found 'other'"),
        "gdpo": (("grpo.advantage=gdpo", "grpo.preset=dapo"), "advantage gdpo takes each reward as it is"),
        "dynamic": (
            (
                "grpo.num_generations_per_prompt=1",
                "policy.train_global_batch_size=2",
                "grpo.advantage=raw",
                "grpo.dynamic_sampling=true",
            ),
            "dynamic_sampling: a group of one completion has no variance",
        ),
    }.values(),
)
def test_what_cannot_be_run_is_refused(file: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.config_of(file, *overrides)


def test_a_resume_with_another_reward_says_so(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = file.parent / "rewards"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    module, score = (
        folder / "reward_of_mine.py",
        "def score(completions, **columns):\n    return [{}.0 for _ in completions]\n",
    )
    module.write_text(score.format(1))
    runs.trained(file, "max_num_steps=2", "val_period=0", "rewards=[{function: reward_of_mine.score}]")
    assert loop.train(runs.resumed(file.parent / "run", "max_num_steps=4")).steps == 2
    assert "not what they were" not in caplog.text
    module.write_text(score.format(2))
    assert loop.train(runs.resumed(file.parent / "run", "max_num_steps=6")).steps == 2
    assert (
        f"when the checkpoint was written ({module}; now {module}): the run goes on with what is there" in caplog.text
    )


def test_a_reward_model_must_have_a_score_head(file: Path) -> None:
    runs.write_model(file.parent / "plain", file, seed=1)
    message = r"rewards\.0\.model: .*plain lack 1 tensors .* would be random: score\.weight\. Expected a reward model"
    with pytest.raises(ModelError, match=message):
        runs.started(file, f"rewards=[{{model: {file.parent / 'plain'}}}]")
    with pytest.raises(ModelError, match=r"rewards\.1\.model: there is no folder .*nowhere"):
        runs.started(file, f"rewards=[{{name: exact_match}}, {{model: {file.parent / 'nowhere'}}}]")


@pytest.mark.parametrize("allowed", ["grpo.ratio_clip_max", "grpo", "algorithm"])
def test_a_resume_with_another_setting_of_the_algorithm(file: Path, allowed: str) -> None:
    runs.trained(file, "max_num_steps=2", "val_period=0")
    changed = (file.parent / "run", "max_num_steps=4", "val_period=0", "grpo.ratio_clip_max=0.3")
    with pytest.raises(ResumeRefused, match=r"grpo\.ratio_clip_max: the checkpoint was made with None, now 0\.3"):
        runs.resumed(*changed)
    assert loop.train(runs.resumed(*changed, allow=frozenset({allowed}))).steps == 2


def test_sections_of_rollouts_are_for_algorithms_that_have_them(tmp_path: Path) -> None:
    file = runs.write_project(tmp_path, case="sft")
    with pytest.raises(ConfigError, match="generation: unknown key"):
        runs.config_of(file, "generation.temperature=1")
