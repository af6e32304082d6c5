"""The stages: what they read, their order, what is measured; and each of them once, for two steps."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from surefoot.config_file import load_config
from surefoot.demo import closing, measure, story, task
from surefoot.demo.folder import DemoFolder, claimed
from surefoot.demo.stages import FURTHER, GRPO, SFT, STAGES, WRONG_SHARE, Limit, Stage
from surefoot.demo.watch import WatchedRun
from tests.helpers.runs import trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoFolder]:
    with claimed(tmp_path_factory.mktemp("demo") / 'a "quoted" {place}') as folder:
        folder.fill(seed=3)
        yield folder


def test_a_stage_begins_with_what_an_earlier_one_ended_with() -> None:
    done: set[str] = set()
    for side_by_side in ((SFT,), (GRPO,), *FURTHER):
        assert 1 <= len(side_by_side) <= 2  # one thread each, on two cores
        for stage in side_by_side:
            assert stage.recipe.begins_with is None or stage.recipe.begins_with.name in done
        done |= {stage.recipe.name for stage in side_by_side}
    assert len(done) == len(STAGES)
    assert not done & {"straight", "killed", "again", "data", "tokenizer"}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.recipe.name)
def test_a_configuration_is_valid_and_names_what_is_there(folder: DemoFolder, stage: Stage) -> None:
    config = load_config(stage.recipe.config(folder.root))
    assert (config.algorithm, config.seed, config.policy.num_threads) == (stage.recipe.algorithm, 3, 1)
    assert Path(config.run_dir) == folder.root / stage.recipe.name
    for data in (config.data.train, config.data.validation["heldout"]):
        assert Path(data.path).is_file()
    assert config.max_num_steps is not None and config.max_num_steps % config.val_period == 0
    assert config.val_period == config.checkpointing.save_period
    before = stage.recipe.begins_with
    assert config.policy.model_name == (str(before.weights(folder.root)) if before else None)


def test_demonstrations_are_wrong_as_often_as_is_said(folder: DemoFolder) -> None:
    true, shown = folder.rows("train"), folder.rows("demonstrations")
    assert [task.question(row) for row in shown] == [task.question(row) for row in true]
    pairs = [(task.expected_answer(a), task.expected_answer(b)) for a, b in zip(true, shown, strict=True)]
    wrong = [(right, said) for right, said in pairs if right != said]
    assert len(wrong) / len(pairs) == pytest.approx(WRONG_SHARE, abs=0.02)
    assert all(len(right) == len(said) and abs(int(right) - int(said)) <= 11 for right, said in wrong)


@pytest.mark.parametrize("name", ["guesses", "slips"])
def test_preferences_are_right_against_wrong_and_heldout_sums_stay_held_out(folder: DemoFolder, name: str) -> None:
    train, heldout = (folder.rows(f"{name}{end}") for end in ("", "_heldout"))
    asked = [[pair["prompt"][0]["content"] for pair in pairs] for pairs in (train, heldout)]
    distances = []
    for pair in (*train, *heldout):
        a, b = pair["prompt"][0]["content"].removesuffix("=").split("+")
        chosen, rejected = (pair[side][0]["content"] for side in ("chosen", "rejected"))
        assert int(chosen) == int(a) + int(b) and len(chosen) == len(rejected)
        distances.append(abs(int(chosen) - int(rejected)))
    assert set(distances) == {1, 2, 9, 10, 11} if name == "slips" else set(range(1, 99)) >= set(distances)
    assert min(distances) == 1 and (max(distances) > 80 or name == "slips")
    assert asked[1] == [task.question(row) for row in folder.rows("heldout")]
    sums = [{frozenset(text.removesuffix("=").split("+")) for text in texts} for texts in asked]
    assert not sums[0] & sums[1]


def test_the_files_follow_from_the_seed(folder: DemoFolder, tmp_path: Path) -> None:
    names = ("demonstrations", "guesses", "guesses_heldout", "slips", "slips_heldout")
    for seed in (3, 4):
        with claimed(tmp_path / str(seed)) as other:
            other.fill(seed)
        same = [(other.data / f"{n}.jsonl").read_bytes() == (folder.data / f"{n}.jsonl").read_bytes() for n in names]
        assert same == [seed == 3] * 5


@pytest.mark.parametrize(
    ("limit", "before", "after", "held"),
    [
        (Limit(0.9), 0.95, 0.9, True),
        (Limit(0.9), 0.0, 0.899, False),
        (Limit(0.1, 0.4), 0.0, 0.41, False),
        (Limit(0.5, gain=0.25), 0.5, 0.75, True),
        (Limit(0.5, gain=0.25), 0.51, 0.75, False),
        (Limit(), 0.5, float("nan"), False),
    ],
)
def test_a_limit_holds_or_not(limit: Limit, before: float, after: float, held: bool) -> None:
    assert limit.holds(before, after) is held


def test_every_number_is_told_with_what_was_expected_and_whether_it_held(tmp_path: Path) -> None:
    stage = Stage(
        dataclasses.replace(SFT.recipe, name="x"),
        "about",
        measure.answers,
        {"sampled": Limit(0.9, gain=0.5), "greedy": Limit(0.9)},
        validated={"rewards/accuracies": 0.9, "rewards/margins": 0.0},
    )
    run = WatchedRun("x", tmp_path, 8)
    last = {"loss": 0.1, "rewards/accuracies": 0.95, "rewards/margins": -0.5}
    run.lines = [{"step": 4, "kind": "val", **dict.fromkeys(last, 9.0)}, {"step": 8, "kind": "val", **last}]
    found = stage.outcomes({"sampled": 0.25, "greedy": 0.5}, {"sampled": 0.95, "greedy": 0.85}, run)
    assert [tuple(outcome) for outcome in found] == [
        ("x", "sampled", "25.0%", "95.0%", "at least 90%, and 50 points up", True),
        ("x", "greedy", "50.0%", "85.0%", "at least 90%", False),
        ("x", "rewards/accuracies", "", "0.9500", "above 0.9", True),
        ("x", "rewards/margins", "", "-0.5000", "above 0", False),
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(closing.outcomes(found))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[-1] for line in lines if line.startswith("  x")] == ["held", "FAILED", "held", "FAILED"]


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_the_demo_holds_when_each_of_its_parts_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool, everything: bool
) -> None:
    outcome = closing.Outcome("x", "sampled", "25.0%", "70.0%", "at least 60%", True)
    done: list[str] = []

    def side_by_side(stages: Sequence[Stage], *_: object) -> list[closing.Outcome]:
        done.extend(stage.recipe.name for stage in stages)
        return [outcome._replace(held=held or stages[0] is SFT)]

    fact = closing.Fact("SIGKILL", "hit", True)
    monkeypatch.setattr(story, "side_by_side", side_by_side)
    monkeypatch.setattr(story, "twice", lambda *_: ([closing.Fact("loss", "3 -> 0"), fact], [outcome]))
    console = Console(file=io.StringIO(), width=120)
    assert story.tell(tmp_path / "demo", 0, console, further_stages=everything) is (held or not everything)
    assert done == ["sft", "rm", "dpo", "ppo", "distillation", "cross_tokenizer"][: None if everything else 1]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "What each method did" in shown and ("surefoot score" in shown) is everything
    monkeypatch.setattr(story, "twice", lambda *_: ([fact._replace(held=False)], [outcome]))
    assert not story.tell(tmp_path / "demo", 0, console)


class Result(NamedTuple):
    stage: Stage
    before: Mapping[str, float]
    after: Mapping[str, float]
    run: WatchedRun


@pytest.fixture(scope="module")
def few(folder: DemoFolder) -> measure.Heldout:
    guesses, slips = (folder.rows(f"{name}_heldout")[:20] for name in ("guesses", "slips"))
    return measure.Heldout(folder.rows("heldout")[:20], guesses, slips, 3)


@pytest.fixture(scope="module")
def results(folder: DemoFolder, few: measure.Heldout) -> dict[str, Result]:
    """Of real runs of two steps each, every stage on the weights that the one before it wrote."""
    found: dict[str, Result] = {}
    for full in STAGES:
        begins_with = found["sft"].stage.recipe if full.recipe.begins_with else None
        section = full.recipe.section.replace("critic_warmup_steps: 10", "critic_warmup_steps: 1")
        section = section.replace("killed/checkpoints/step_400", "grpo/checkpoints/step_2")
        recipe = dataclasses.replace(
            full.recipe, num_steps=2, period=2, val_rows=8, section=section, begins_with=begins_with
        )
        stage = dataclasses.replace(full, recipe=recipe)
        recipe.write(folder.root, 3)
        before = stage.measure(*measure.first_model(recipe.config(folder.root), stage.kind), few)
        trained(recipe.config(folder.root), "data.train.max_rows=64", "logger.progress=off", "logger.tensorboard=false")
        after = stage.measure(*measure.last_model(recipe.weights(folder.root), stage.kind), few)
        run = WatchedRun(recipe.name, folder.root / recipe.name, 2)
        run.look()
        found[recipe.name] = Result(stage, before, after, run)
    return found


@pytest.mark.parametrize("name", [stage.recipe.name for stage in STAGES])
def test_each_stage_trains_and_is_measured_before_and_after(results: dict[str, Result], name: str) -> None:
    stage, before, after, run = results[name]
    assert set(before) == set(after) == set(stage.limits)
    assert len(stage.outcomes(before, after, run)) == len(stage.limits) + len(stage.validated)
    assert run.values("val", stage.recipe.metric), "the metric that the checkpoints are kept by"
    if stage.recipe.begins_with and stage.measure is measure.answers:
        assert before == results["sft"].after


@pytest.mark.parametrize("same", [True, False])
def test_what_is_told_of_two_runs_of_grpo(
    folder: DemoFolder,
    few: measure.Heldout,
    results: dict[str, Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    same: bool,
) -> None:
    """The run of two steps stands for both."""
    stage, before, after, run = results["grpo"]

    def train_both(config: Path, straight: WatchedRun, killed: WatchedRun, *_: object) -> None:
        assert config == stage.recipe.config(folder.root)
        for copy in (straight, killed):
            shutil.copytree(run.run_dir, copy.run_dir, dirs_exist_ok=True)
            copy.look()
        killed.kills[2] = True
        if not same:
            clock = killed.checkpoints / "step_2" / "clock" / "clock.json"
            clock.write_text(clock.read_text().replace('"step": 2', '"step": 3'))

    monkeypatch.setattr(story, "GRPO", stage)
    monkeypatch.setattr(story, "train_both", train_both)
    facts, outcomes = story.twice(folder, few, Console(file=io.StringIO()))
    assert outcomes == stage.outcomes(before, after, run)
    told = {fact.label: fact for fact in facts}
    assert told["teachers"].text == "40% of the demonstrations were right"
    for row in few.rows[:3]:
        assert len(told[task.question(row)].text.split(" -> ")) == 2
    assert "in 2 steps" in told["reward"].text and "log-probs" in told["time goes to"].text
    assert told["both runs"].held is same
    assert [fact.text for fact in facts if fact.label == "differs"] == ([] if same else ["clock/clock.json"])
