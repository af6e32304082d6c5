"""`surefoot eval`: validation's own numbers, on files, environments and reasoning-gym; what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.errors import ConfigError, CorruptCheckpoint, DataError, ModelError, SurefootError
from surefoot.rollout.rewards import RewardError
from tests.helpers import runs, tokenizers

STEP = "run/checkpoints/step_2"
WEIGHTS = f"{STEP}/policy/weights"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a GRPO run of two steps, validated at its end with two completions of each prompt."""
    folder = tmp_path_factory.mktemp("grpo")
    settings = ("evaluation={num_generations_per_prompt: 2, pass_reward: exact_match}", "data.system_prompt='1+1'")
    runs.trained(runs.write_project(folder, case="grpo"), "max_num_steps=2", *settings)
    return folder


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    long = "policy.model_init.max_position_embeddings=4096"  # for reasoning-gym's questions
    runs.trained(runs.write_project(folder, case="sft-lora"), "max_num_steps=2", long)
    return folder


def measured(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def refused(kind: type[SurefootError], *arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        measured(*arguments)
    return str(caught.value)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# ---------------------------------------------------------------------------------------------------------- numbers


def test_it_measures_what_validation_has_measured(trained: Path) -> None:
    found = measured(trained / STEP, trained / "heldout.jsonl")
    line = next(line for line in runs.metric_lines(trained / "run") if "heldout/reward" in line and line["step"] == 2)
    names = ["reward", "reward/length", "reward/exact_match", "pass@1", "pass@2", "majority@2", "truncated"]
    assert {name: found[name] for name in names} == {name: line[f"heldout/{name}"] for name in names}
    assert (found["prompts"], found["completions"], found["abstained"], found["failed"]) == (6, 12, 0, 0)


def test_what_is_written_gives_the_numbers(trained: Path, tmp_path: Path) -> None:
    asked = (trained / STEP, trained / "heldout.jsonl", "--samples", 4, "--pass-reward", "length")
    found = measured(*asked, "--pass-threshold", 0.1, "--k", 1, "--k", 3, "--out", tmp_path / "out.jsonl")
    rows = lines(tmp_path / "out.jsonl")
    assert [(row["row"], row["sample"]) for row in rows] == [(i, g) for i in range(6) for g in range(4)]
    assert found["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 24)
    passed = Counter(row["row"] for row in rows if row["reward/length"] >= 0.1)
    assert passed == Counter(row["row"] for row in rows if row["passed"])
    for k in (1, 3):
        failing = sum(math.comb(4 - passed[i], k) for i in range(6)) / math.comb(4, k)
        assert found[f"pass@{k}"] == pytest.approx((6 - failing) / 6)
    assert "pass@2" not in found
    measured(*asked, "--pass-threshold", 0.1, "--out", tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows


def test_draws_follow_from_the_seed_and_not_from_the_batches(trained: Path, tmp_path: Path) -> None:
    def said(*options: Any) -> list[str]:
        out = tmp_path / "out.jsonl"
        measured(trained / STEP, trained / "heldout.jsonl", "--samples", 3, "--out", out, "--overwrite", *options)
        return [row["completion"] for row in lines(out)]

    first = said()
    assert first == said("--batch-size", 1) == said("--seed", 7)  # the run's own
    assert first != said("--seed", 8)
    assert said("--top-p", 1e-6) == said("--temperature", 1e-6) == said("--top-p", 1e-6, "--seed", 8) != first
    greedy = said("--samples", 1, "--greedy")
    assert greedy == said("--top-p", 1e-6)[::3]


def test_other_models_and_rewards(supervised: Path, tmp_path: Path) -> None:
    """An adapter's checkpoint, and the whole model that it makes; SFT knows of no rewards."""
    file = supervised / "heldout.jsonl"
    asked = ("--reward", "exact_match", "--reward", "{name: length, target: 3, weight: 0.5}", "--max-new-tokens", 4)
    found = measured(supervised / STEP, file, *asked, "--samples", 2)
    assert found["reward"] == pytest.approx(found["reward/exact_match"] + 0.5 * found["reward/length"])
    merged = tmp_path / "merged"
    exported = ["ckpt", "export", str(supervised / STEP), str(merged), "--merge"]
    assert CliRunner().invoke(app, exported).exit_code == 0
    plain = measured(merged, file, *asked, "--samples", 2, "--seed", 7)
    assert plain["reward"] == pytest.approx(found["reward"], abs=1e-6)
    own = measured(merged, file, "--reward", "tests.rollout.reward_samples.lengths", "--max-new-tokens", 4)
    assert set(own) >= {"reward/lengths", "pass@1"} and "majority@1" not in own


def test_tasks_that_make_their_rows(trained: Path) -> None:
    """Each judges by itself: the run's own rewards have no part in it."""
    found = measured(trained / STEP, "arithmetic", "--max-rows", 5)
    assert (found["prompts"], found["completions"]) == (5, 10)
    assert found["reward"] == found["reward/environment"] and "reward/length" not in found


def test_an_environment_of_ones_own(trained: Path) -> None:
    found = measured(trained / STEP, "tests.rollout.environment_samples.OwnRows", "--max-rows", 3)
    assert (found["prompts"], found["completions"]) == (3, 6)
    assert found["reward"] == found["reward/environment"] == 0.5


def test_a_task_of_reasoning_gym(supervised: Path) -> None:
    pytest.importorskip("reasoning_gym")
    asked = ("number_format", "--max-rows", 2, "--max-length", 2000, "--max-new-tokens", 2, "--samples", 2)
    found = measured(supervised / STEP, *asked)
    assert (found["prompts"], found["completions"]) == (2, 4)
    assert found["reward"] == found["reward/environment"]


def test_it_prints_a_line_for_each_number(trained: Path) -> None:
    result = CliRunner().invoke(app, ["eval", str(trained / STEP), str(trained / "heldout.jsonl")])
    assert [line.split()[0] for line in result.stdout.splitlines()][2:5] == ["prompts", "completions", "reward"]


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            ["chain_sums"],
            DataError,
            "there is no task 'chain_sums': expected a file of prompts, arithmetic, calculator",
        ),
        (["nowhere.jsonl"], DataError, "no such file"),
        (["nowhere.Mine"], ConfigError, "nowhere.Mine: there is no module 'nowhere' in this folder or on PYTHONPATH"),
        (["FILE", "--samples", 2, "--k", 3], ConfigError, "pass@3 is estimated from at least 3 completions"),
        (["FILE", "--greedy", "--samples", 2], ConfigError, "temperature 0 gives the same completion 2 times"),
        (["FILE", "--greedy", "--temperature", 0.5], ConfigError, "--temperature 0.5 draws: expected one of them"),
        (["FILE", "--top-p", 1.5], ConfigError, "generation.top_p"),
        (["FILE", "--reward", "exact_mach"], ConfigError, "found 'exact_mach'; did you mean exact_match?"),
        (["FILE", "--reward", "{name: regex}"], ConfigError, "pattern: regex needs it"),
        (["FILE", "--reward", "nowhere.reward"], ConfigError, "there is no module 'nowhere'"),
        (["FILE", "--pass-reward", "best"], ConfigError, "evaluation.pass_reward: expected one of length, exact_match"),
        (["FILE", "--max-new-tokens", 32], ConfigError, "must be below policy.max_total_sequence_length"),
        (["FILE", "--max-new-tokens", 25], DataError, "prompt of more than 7 tokens, the room"),
        (["FILE", "--max-length", 100], ModelError, "reads at most 64"),
        (["FILE", "--out", "rows.csv"], DataError, "expected a name that ends in .jsonl or .parquet, found rows.csv"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_model_is_loaded(
    options: list[Any], kind: type[SurefootError], message: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.cli.found_model.FoundModel.load", _loaded)
    file = trained / "heldout.jsonl"
    with pytest.raises(kind, match=message):
        measured(trained / STEP, *(file if option == "FILE" else option for option in options))


def _loaded(*_: Any) -> Any:
    raise AssertionError("the model was loaded")


def test_rewards_and_columns_that_are_missing(supervised: Path, tmp_path: Path) -> None:
    assert "name a reward, such as --reward exact_match" in refused(
        ConfigError, supervised / STEP, supervised / "heldout.jsonl"
    )
    file = write(tmp_path / "rows.jsonl", {"prompt": "1+1=", "solution": "2"})
    said = refused(RewardError, supervised / STEP, file, "--reward", "exact_match", "--max-new-tokens", 4)
    assert "reward exact_match needs 'answer', and no row has such a column; they have solution" in said
    asked = (supervised / STEP, file, "--reward", "exact_match", "--max-new-tokens", 4)
    assert measured(*asked, "--columns", "answer=solution")["prompts"] == 1


def test_an_evaluation_in_which_nothing_was_judged_says_so(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    never = "{function: tests.rollout.reward_samples.scripted, columns: {value: nothing}}"
    file = write(trained / "unjudged.jsonl", *({"prompt": "1+1=", "nothing": None} for _ in range(3)))
    assert measured(trained / STEP, file, "--samples", 1, "--reward", never)["abstained"] == 3
    assert "all rewards abstained on all 3 completions: nothing was judged, and none passes" in caplog.text


def test_long_prompts_can_be_left_out(trained: Path, tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 15 + "1=", "answer": "16"}
    )
    assert "1 × prompt of more than 28 tokens" in refused(DataError, trained / STEP, file)
    found = measured(trained / STEP, file, "--skip-bad-rows")
    assert (found["prompts"], list(found["dropped"].values())) == (1, [1])


def test_models_that_are_none(trained: Path, tmp_path: Path) -> None:
    file = trained / "heldout.jsonl"
    assert "there is no folder" in refused(ModelError, tmp_path / "none", file)
    assert "it holds checkpoints, such as" in refused(ModelError, trained / "run", file)
    broken = Path(shutil.copytree(trained / STEP, tmp_path / "step_2"))
    (broken / "policy" / "weights" / "config.json").write_text("{")
    assert "is not a sound checkpoint" in refused(CorruptCheckpoint, broken, file)
    runs.trained(runs.write_project(tmp_path / "rm", case="rm"), "max_num_steps=2")
    for part in (STEP, WEIGHTS):
        assert "is no language model: expected" in refused(ModelError, tmp_path / "rm" / part, file)


def test_a_template_that_a_prompt_cannot_be_taken_from(trained: Path, tmp_path: Path) -> None:
    """It adds no generation prompt, and writes the user's turn otherwise once an answer follows."""
    template = tokenizers.CHATML_NO_PROMPT.replace("m['content']", "'' if loop.last else m['content']")
    said = refused(DataError, trained / STEP, trained / "heldout.jsonl", "--chat-template", template)
    assert "the chat template adds none" in said


def test_out_is_never_overwritten_unasked(trained: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out.jsonl")
    asked: Callable[..., tuple[Any, ...]] = lambda *more: (trained / STEP, trained / "heldout.jsonl", "--out", *more)  # noqa: E731
    assert "replace it with --overwrite" in refused(DataError, *asked(out))
    assert out.read_text() == ""
    measured(*asked(out, "--overwrite"))
    assert len(lines(out)) == 12 and [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
