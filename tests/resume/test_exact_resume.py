"""A resumed run equals the straight one bit for bit: weights, optimizer state, position and every metric."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from surefoot import loop
from surefoot.errors import CheckpointError, ConfigError, CorruptCheckpoint, NothingTrained, ResumeRefused
from tests.faults.project import ONE_CASE
from tests.helpers import runs

STEPS = 8  # of 5 in an epoch: the resumed part crosses into the second epoch


@pytest.fixture(scope="module", params=runs.CASES)
def every_straight(request: pytest.FixtureRequest, memory_path_of_session: Path) -> Path:
    """A straight run of each case in turn; its configuration file."""
    return made(memory_path_of_session, request.param)


@pytest.fixture(scope="module")
def straight(memory_path_of_session: Path) -> Path:
    """One of them, for what does not depend on the case."""
    return made(memory_path_of_session, ONE_CASE)


def made(folder: Path, case: str) -> Path:
    """Made once; found again when asked for a second time."""
    home = folder / case
    if not home.exists():
        runs.trained(runs.write_project(home, case=case), f"max_num_steps={STEPS}", "checkpointing.save_period=1")
    return home / "config.yaml"


def final_state(run_dir: Path, step: int = STEPS) -> dict[str, bytes]:
    return runs.state_bytes(run_dir / "checkpoints" / f"step_{step}")


STOPS = [*((case, step) for case in runs.CASES for step in (3, 5)), (ONE_CASE, 1), (ONE_CASE, 7)]


@pytest.mark.parametrize(("every_straight", "stop_at"), STOPS, indirect=["every_straight"])
def test_stopped_at_any_step_and_resumed(every_straight: Path, memory_path: Path, stop_at: int) -> None:
    run_dir = memory_path / "run"
    whole = every_straight.parent / "run"
    optimizer = json.loads(final_state(whole)["policy/optimizer/state.json"])
    decay = f"policy.scheduler.decay_steps={optimizer['decay_end']}"  # that of the whole run, not of the first part
    runs.trained(every_straight, f"max_num_steps={stop_at}", f"run_dir={run_dir}", "checkpointing.save_period=1", decay)
    loop.train(runs.resumed(run_dir, f"max_num_steps={STEPS}"))
    assert final_state(run_dir) == final_state(whole)
    assert runs.metric_lines(run_dir) == runs.metric_lines(whole)


def test_resumed_many_times_from_named_checkpoints(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", f"max_num_steps={STEPS}", "checkpointing.save_period=1")
    for step in (6, 2, 4):
        loop.train(runs.resumed(run_dir, checkpoint=run_dir / "checkpoints" / f"step_{step}"))
        assert final_state(run_dir) == final_state(straight.parent / "run")
        assert runs.metric_lines(run_dir) == runs.metric_lines(straight.parent / "run")
    aside = sorted(path.name for path in run_dir.glob("metrics.after_step_*"))
    assert len(aside) == 3, "each resume sets the left-behind lines aside and keeps them"


def test_a_run_without_a_checkpoint_starts_again_from_step_0(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=3", "checkpointing.enabled=false")
    run = runs.resumed(run_dir, f"max_num_steps={STEPS}", "checkpointing.enabled=true", "checkpointing.save_period=1")
    assert run.clock.step == 0
    loop.train(run)
    assert len([line for line in runs.metric_lines(run_dir) if line["kind"] == "train"]) == STEPS


@pytest.mark.parametrize("limit", [STEPS, 3])
def test_a_finished_run_has_nothing_to_do(straight: Path, memory_path: Path, limit: int) -> None:
    run_dir = memory_path / "run"
    shutil.copytree(straight.parent / "run", run_dir)
    ended = loop.train(runs.resumed(run_dir, f"max_num_steps={limit}"))
    assert ended.reason == (
        f"nothing to do, the run is finished: max_num_steps ({limit}) reached; to go on, raise max_num_steps"
    )
    assert (ended.steps, ended.exit_code) == (0, 0)
    assert runs.metric_lines(run_dir) == runs.metric_lines(straight.parent / "run")
    assert final_state(run_dir) == final_state(straight.parent / "run")
    assert loop.train(runs.resumed(run_dir, f"max_num_steps={STEPS + 1}")).steps == 1


def test_a_deadline_before_the_first_step_is_an_error(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=2")
    with pytest.raises(NothingTrained, match=r"no training step was done: the deadline .*, the run is at step 2"):
        loop.train(runs.resumed(run_dir, "max_num_steps=4", "checkpointing.checkpoint_must_save_by='00:00:00:00'"))


def test_a_broken_newest_is_skipped_loudly(straight: Path, memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", f"max_num_steps={STEPS}", "checkpointing.save_period=1")
    broken = run_dir / "checkpoints" / f"step_{STEPS}" / "policy" / "weights" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    run = runs.resumed(run_dir)
    assert run.clock.step == STEPS - 1
    assert any(f"step_{STEPS}" in record.message and "SKIPPED" in record.message for record in caplog.records)
    loop.train(run)
    assert final_state(run_dir) == final_state(straight.parent / "run")


def test_a_broken_checkpoint_named_explicitly_is_an_error(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=2")
    (run_dir / "checkpoints" / "step_2" / "clock" / "clock.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"clock\.json"):
        runs.resumed(run_dir, checkpoint=run_dir / "checkpoints" / "step_2")


def test_a_branch_left_behind_is_never_picked_up(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=6")
    run = runs.resumed(run_dir, "max_num_steps=7", checkpoint=run_dir / "checkpoints" / "step_2")
    run.checkpoints.shutdown()  # the second attempt dies before its first save
    assert runs.resumed(run_dir, "max_num_steps=7").clock.step == 2
    assert (run_dir / "checkpoints" / "step_6").is_dir(), "nothing of the old branch is deleted"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("policy.optimizer.lr=0.5", ("policy.optimizer.lr", "0.01", "0.5")),
        ("policy.train_micro_batch_size=1", ("policy.train_micro_batch_size", "2", "1")),
        ("seed=8", ("seed", "7", "8")),
        ("policy.model_init.hidden_size=32", ("policy.model_init.hidden_size", "16", "32")),
        ("data.train_on=last_assistant", ("data.train_on", "all_assistant", "last_assistant")),
    ],
)
def test_what_may_not_change_is_refused_with_both_values(
    straight: Path, override: str, named: tuple[str, str, str]
) -> None:
    with pytest.raises(ResumeRefused) as caught:
        runs.resumed(straight.parent / "run", override)
    assert all(word in str(caught.value) for word in named)


@pytest.mark.parametrize("allowed", ["policy.optimizer", "policy", "policy.optimizer.lr", "policy.optimizer.beta1"])
def test_a_section_is_allowed_with_all_keys_beneath_it(straight: Path, memory_path: Path, allowed: str) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=2")
    changes = ("policy.optimizer.lr=0.5", "policy.optimizer.beta1=0.8", "max_num_steps=3")
    if allowed.count(".") == 2:
        with pytest.raises(
            ResumeRefused, match=r"policy\.optimizer\.(beta1|lr): .*\n.*which may be a section's: --allow"
        ):
            runs.resumed(run_dir, *changes, allow=frozenset({allowed, "policy.opt"}))
    else:
        run = runs.resumed(run_dir, *changes, allow=frozenset({allowed}))
        assert run.kit.config.policy.optimizer.lr == 0.5
        assert loop.train(run).steps == 1


def test_other_data_is_refused_unless_allowed(
    straight: Path, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=2")
    lines = (straight.parent / "train.jsonl").read_text().splitlines()
    other = memory_path / "other.jsonl"
    for count in (3, 20):
        other.write_text("\n".join([*lines[-count:][::-1]]))
        with pytest.raises(ResumeRefused, match=r"(?s)dataset: the checkpoint was written with.*--allow dataset$"):
            runs.resumed(run_dir, f"data.train.path={other}", "max_num_steps=4")
    run = runs.resumed(run_dir, f"data.train.path={other}", "max_num_steps=4", allow=frozenset({"dataset"}))
    assert any("starts again at row 0" in record.message for record in caplog.records)
    assert loop.train(run).steps == 2


def test_the_same_data_elsewhere_goes_on(straight: Path, memory_path: Path) -> None:
    run_dir, moved = memory_path / "run", memory_path / "moved.jsonl"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=2")
    moved.write_bytes((straight.parent / "train.jsonl").read_bytes())
    assert loop.train(runs.resumed(run_dir, f"data.train.path={moved}", "max_num_steps=3")).steps == 1


def test_without_optimizer_state_there_is_no_resume(every_straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    words = ("max_num_steps=2", "checkpointing.save_period=1", "checkpointing.save_optimizer=false")
    runs.trained(every_straight, f"run_dir={run_dir}", *words)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before = files()
    with pytest.raises(ResumeRefused, match="save_optimizer"):
        runs.resumed(run_dir, "max_num_steps=3", checkpoint=run_dir / "checkpoints" / "step_1")
    assert files() == before, "what is refused changes nothing, and leaves no checkpoint behind"


def test_not_a_run(memory_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        runs.resumed(memory_path / "nothing")
    with pytest.raises(ConfigError, match=r"it has no config\.yaml"):
        runs.resumed(memory_path)


def test_a_run_in_use_is_not_resumed(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    run = runs.started(straight, f"run_dir={run_dir}")
    with pytest.raises(CheckpointError, match="in use by another run"):
        runs.resumed(run_dir)
    loop.train(run)


def test_the_learning_rate_goes_on_where_it_was(straight: Path, memory_path: Path) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=4", "policy.scheduler.decay_steps=8")
    loop.train(runs.resumed(run_dir, "max_num_steps=8"))
    rates = [json.loads(line).get("lr") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line).get("lr") for line in (straight.parent / "run/metrics.jsonl").read_text().splitlines()]
    assert [r for r in rates if r is not None] == [r for r in whole if r is not None]


def test_a_longer_run_whose_decay_follows_its_length_says_so(
    straight: Path, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.trained(straight, f"run_dir={memory_path / 'run'}", "max_num_steps=4")
    loop.train(runs.resumed(memory_path / "run", "max_num_steps=6"))
    assert "decay now ends at optimizer step 6, it ended at 4" in caplog.text
    assert "resume with policy.scheduler.decay_steps=4 --allow policy.scheduler.decay_steps" in caplog.text
    caplog.clear()
    loop.train(
        runs.resumed(
            memory_path / "run",
            "max_num_steps=8",
            "policy.scheduler.decay_steps=6",
            allow=frozenset({"policy.scheduler.decay_steps"}),
        )
    )
    assert "decay now ends" not in caplog.text


def test_checkpoints_that_are_gone_are_missed(
    straight: Path, memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=4")
    shutil.rmtree(run_dir / "checkpoints" / "step_4")
    run = runs.resumed(run_dir)
    run.checkpoints.shutdown()
    assert run.clock.step == 2
    assert "step_4: latest_checkpoint_status.json says that it was saved, and it is not there any more" in caplog.text
    shutil.rmtree(run_dir / "checkpoints" / "step_2")
    with pytest.raises(CorruptCheckpoint, match=r"step_4: .* not there any more"):
        runs.resumed(run_dir)


@pytest.mark.parametrize("how", ["deleted", "named another"])
def test_a_run_never_begins_again_because_its_checkpoints_are_elsewhere(
    straight: Path, memory_path: Path, how: str
) -> None:
    run_dir = memory_path / "run"
    runs.trained(straight, f"run_dir={run_dir}", "max_num_steps=2")
    if how == "deleted":
        shutil.rmtree(run_dir / "checkpoints")
    other = [] if how == "deleted" else [f"checkpointing.checkpoint_dir={memory_path / 'other'}"]
    with pytest.raises(CheckpointError, match="has no checkpoint of the run in"):
        runs.resumed(run_dir, *other)
    assert len(runs.metric_lines(run_dir)) == 3, "the metrics are as they were"
    assert not (memory_path / "other").exists()


def test_other_rounding_is_said(straight: Path, memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.trained(straight, f"run_dir={memory_path / 'run'}", "max_num_steps=2")
    loop.train(runs.resumed(memory_path / "run", "max_num_steps=3", "policy.num_threads=null"))
    assert "with another policy.num_threads sums are rounded otherwise" in caplog.text
