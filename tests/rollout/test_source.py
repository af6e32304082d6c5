"""The source of rollouts, with a generator that says what a test tells it to: draws, columns, failures, dynamic
sampling, versions. All else is real."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from surefoot.config_file import algorithm_config, parse_config
from surefoot.data.encode import Encoder
from surefoot.data.prepare import prepare
from surefoot.data.rows import Prompt
from surefoot.data_plane.memory import MemoryPlane
from surefoot.errors import ConfigError, RolloutError, StaleWeights, StopRequested
from surefoot.rollout.config import EvaluationConfig
from surefoot.rollout.conversations import Conversations, Said
from surefoot.rollout.evaluation import evaluate, majority_passes, pass_at_k, voted_answer
from surefoot.rollout.rewards import RewardError, load_rewards
from surefoot.rollout.rollouts import Request, Rollout, Rollouts
from surefoot.rollout.source import RolloutSource
from surefoot.types import BatchRef, Clock, Completion, Kit, Metric, Sampling
from tests.helpers import tokenizers as tiny
from tests.helpers.memory_store import saved

TOKENIZER = tiny.byte_level()
END = TOKENIZER.eos_token_id
Say = Callable[[str, int], str]  # prompt, index in the group -> text


class Scripted:
    """A `Generator` that says what it is told, one token a character."""

    def __init__(self, say: Say, *, version: int = 0, max_calls: float = float("inf"), ended: bool = True) -> None:
        self.say, self.version, self.max_calls, self.ended = say, version, max_calls, ended
        self.calls: list[tuple[str, int]] = []
        self.open = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, group: str, index: int, sampling: Sampling, session: str | None
    ) -> Completion:
        self.calls.append((group, index))
        number, self.open = len(self.calls), self.open + 1
        try:
            await asyncio.sleep(0.01 * (index % 2))  # others come first
            if number > self.max_calls:
                raise ConnectionError("the generator is gone")
        finally:
            self.open -= 1
        text = self.say(TOKENIZER.decode(prompt_ids), index)
        ids = [i for c in text for i in TOKENIZER.encode(c, add_special_tokens=False)] + [END] * self.ended
        cut = ids[: sampling.max_new_tokens]
        reason = "stop" if len(cut) == len(ids) and self.ended else "length"
        return Completion(tuple(cut), tuple(-0.1 * (i + 1) for i in range(len(cut))), reason, self.version)  # type: ignore[arg-type]

    def assign(self, weights: Any, version: int) -> None:
        self.version = version

    def weights_checksum(self) -> str:
        return ""

    def close(self) -> None:
        pass


Made = tuple[RolloutSource, Kit]
Make = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[RolloutSource] = []

    def build(
        generator: Any,
        *overrides: str,
        rewards: Sequence[Any] = (),
        rows: int = 10,
        environment: dict[str, Any] | None = None,
        length: int = 200,
        **grpo: Any,
    ) -> Made:
        data = [{"prompt": f"q{i}", "answer": str(i)} for i in range(rows)]
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        config: Any = parse_config(
            {
                "algorithm": "grpo",
                "run_dir": str(tmp_path / "run"),
                "seed": 3,
                "max_num_steps": 100,
                "policy": {"model_name": "x", "train_global_batch_size": 4, "max_total_sequence_length": length},
                "data": {"train": {"path": str(path)}},
                "generation": {"max_new_tokens": 20},
                "rewards": [{"name": "exact_match"}],
                "environment": environment,
                "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, **grpo},
            },
            overrides,
        )
        encoder = Encoder(TOKENIZER, config.data, length)
        talk = None
        if environment is not None:
            talk = Conversations(config.environment, encoder, max_tokens=length, seed=3)
        dataset = prepare(config.data.train, config.data, TOKENIZER, 100, rows="prompts", opener=talk)
        scored = load_rewards(rewards) if rewards else None
        rollouts = Rollouts(TOKENIZER, scored, talk, seed=3, max_failures=config.max_reward_failures)
        rollouts.connect(generator, Sampling(config.generation.max_new_tokens, stop_ids=encoder.stop_ids()))
        kit = Kit(config, TOKENIZER, dataset, {"held": dataset}, {}, MemoryPlane(), rollouts)
        made.append(RolloutSource(kit, algorithm_config(config)))  # type: ignore[arg-type]
        return made[-1], kit

    yield build
    for source in made:
        source.close()


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def here(function: Callable[..., Any], name: str = "right") -> Callable[..., Any]:
    """One that no worker can import, so that it is called in this process."""

    def local(completions: list[Any], answer: list[Any], **columns: Any) -> Any:
        return function(completions=completions, answer=answer, **columns)

    local.__name__ = name
    return local


def sometimes(prompt: str, index: int) -> str:
    """The first of each group is right."""
    number = prompt.partition("q")[2].partition("<")[0]
    return number if index == 0 else "no"


def done(version: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(version)
    return future


def nothing() -> None:
    pass


def took(source: RolloutSource, clock: Clock | None = None) -> BatchRef:
    ref = source.take(clock or Clock(), nothing)
    assert ref is not None
    return ref


# ------------------------------------------------------------------------------------------------------------ the rows


def test_a_row_is_what_was_sampled_and_how_it_was_judged(make: Make) -> None:
    source, kit = make(Scripted(sometimes, version=4), rewards=[here(right), (here(right, "twice"), 2.0)])
    ref = took(source, Clock(step=4, version=4))
    assert ref.ids == ("e0_d0_g0", "e0_d0_g1", "e0_d1_g0", "e0_d1_g1")
    assert ref.groups == ("e0_d0", "e0_d0", "e0_d1", "e0_d1")
    assert ref.versions == (4, 4, 4, 4)
    columns: dict[str, Any] = kit.plane.get(ref, sorted(ref.fields))
    assert columns["reward"].tolist() == [3.0, 0.0, 3.0, 0.0]
    assert columns["reward/twice"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert columns["truncated"].tolist() == [0.0] * 4
    for i, row in enumerate(columns["row_index"].tolist()):
        prompt = kit.train_data.ids(row).tolist()
        said = [*[t for c in columns["completion"][i] for t in TOKENIZER.encode(c)], END]
        assert columns["completion"][i] == (str(row) if i % 2 == 0 else "no")
        assert columns["prompt"][i] == f"q{row}"
        assert columns["input_ids"][i].tolist() == [*prompt, *said]
        assert columns["loss_mask"][i].tolist() == [0.0] * len(prompt) + [1.0] * len(said)
        logprobs = columns["generator_logprobs"][i]
        assert logprobs.tolist() == pytest.approx([0.0] * len(prompt) + [-0.1 * (n + 1) for n in range(len(said))])
        assert columns["input_ids"][i].dtype == torch.int64
        assert ref.lengths[i] == len(prompt) + len(said)
    metrics = {name: metric.value for name, metric in source.metrics.items()}
    assert (
        metrics["reward"] == 1.5 and metrics["reward/right"] == 0.5 and metrics["reward_std"] == pytest.approx(3**0.5)
    )
    assert metrics["zero_variance_groups"] == metrics["truncated"] == metrics["failed_rollouts"] == 0.0
    assert metrics["completion_tokens"] == pytest.approx(sum(map(len, columns["completion"])) / 4 + 1)


def test_what_is_recorded(make: Make) -> None:
    source, kit = make(Scripted(sometimes), rewards=[here(right)])
    seen: list[tuple[int, Any]] = []
    object.__setattr__(kit, "record", lambda step, columns: seen.append((step, columns)))
    ref = took(source)
    masks: Any = kit.plane.get(ref, ["loss_mask"])["loss_mask"]
    ref = kit.plane.put(ref, {"advantages": [mask * (1.0 if i % 2 == 0 else -1.0) for i, mask in enumerate(masks)]})
    source.retire(ref, done(1))
    ((step, columns),) = seen
    assert step == 1
    assert [*columns] == [
        *("id", "group", "row_index", "prompt", "completion", "reward", "reward/right", "advantage"),
        *("tokens", "finish_reason", "version"),
    ]
    assert columns["advantage"].tolist() == [1.0, -1.0, 1.0, -1.0]
    assert columns["tokens"].tolist() == [2, 3, 2, 3]
    assert len(kit.plane) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "ended"), [("", True), ("", False), ("x" * 50, True)])
def test_empty_and_cut_completions(make: Make, text: str, ended: bool) -> None:
    source, kit = make(Scripted(lambda prompt, index: text, ended=ended), rewards=[here(right)])
    ref = took(source)
    columns: Any = kit.plane.get(ref, ["loss_mask", "truncated", "completion", "finish_reason"])
    assert [int(mask.sum()) for mask in columns["loss_mask"]] == [
        {("", True): 1, ("", False): 0}.get((text, ended), 20)
    ] * 4
    assert columns["completion"] == [text[:20]] * 4
    assert columns["truncated"].tolist() == [float(not (ended and not text))] * 4
    source.retire(ref, done(1))


# ----------------------------------------------------------------------------------------------------------- the draws


def test_each_epoch_has_every_prompt_and_a_restored_position_goes_on(make: Make) -> None:
    rewards = [here(right)]
    source, kit = make(Scripted(sometimes), rewards=rewards)
    order: list[list[int]] = []
    for step in range(7):
        ref = took(source)
        order.append(kit.plane.get(ref, ["row_index"])["row_index"].tolist()[::2])  # type: ignore[union-attr]
        source.retire(ref, done(0))
        if step == 2:
            position = saved(source)
    assert sorted(row for rows in order[:5] for row in rows) == list(range(10))
    assert source.epoch == 1
    again, kit = make(Scripted(sometimes), rewards=rewards)
    again.restore(position)  # type: ignore[arg-type]
    for expected in order[3:]:
        assert kit.plane.get(took(again), ["row_index"])["row_index"].tolist()[::2] == expected  # type: ignore[union-attr]


def test_a_poll_that_raises_ends_all_work_and_leaves_the_position(make: Make) -> None:
    generator = Scripted(sometimes)
    source, kit = make(generator, rewards=[here(right)])

    def stop() -> None:
        if generator.calls:
            raise StopRequested("a signal", 143)

    before = saved(source).json("cursor.json")
    with pytest.raises(StopRequested):
        source.take(Clock(), stop)
    assert saved(source).json("cursor.json") == before
    assert generator.open == 0 and len(kit.plane) == 0  # type: ignore[arg-type]
    assert took(source).ids[0] == "e0_d0_g0"


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_run_ends_with_its_epochs(make: Make, dynamic: bool) -> None:
    options = {"dynamic_sampling": dynamic, "dynamic_sampling_max_gen_batches": 50}
    source, _ = make(Scripted(sometimes), "max_num_epochs=2", rewards=[here(right)], rows=3, **options)
    taken = []
    while (ref := source.take(Clock(), nothing)) is not None:
        taken.append(len(set(ref.groups)))
        source.retire(ref, done(0))
    assert sum(taken) == 6
    assert "the training data is used up: 2 epochs" in source.exhausted
    assert source.steps_per_epoch == (None if dynamic else 2)


# ---------------------------------------------------------------------------------------------------- dynamic sampling


def test_groups_without_variance_are_replaced_and_none_is_lost(make: Make) -> None:
    """Every third prompt has completions of different rewards; a step needs two."""

    def say(prompt: str, index: int) -> str:
        number = prompt.partition("q")[2].partition("<")[0]
        return number if index == 0 and int(number) % 3 == 0 else "no"

    generator = Scripted(say)
    source, kit = make(generator, "max_num_epochs=1", rewards=[here(right)], dynamic_sampling=True, rows=12)
    rows: list[int] = []
    while (ref := source.take(Clock(), nothing)) is not None:
        rows += kit.plane.get(ref, ["row_index"])["row_index"].tolist()[::2]  # type: ignore[union-attr]
        drawn = source.metrics["drawn_groups"].value
        assert source.metrics["zero_variance_groups"].value >= 1 - 3 / drawn
        source.retire(ref, done(0))
    assert sorted(rows) == [0, 3, 6, 9], "each once: what was drawn beyond the need is drawn again"
    assert {group for group, _ in generator.calls} == {f"e0_d{i}" for i in range(12)}


def test_nothing_to_learn_from_is_an_error_with_counts(make: Make) -> None:
    options = {"dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 3}
    source, _ = make(Scripted(lambda prompt, index: "no"), rewards=[here(right)], **options)
    with pytest.raises(RolloutError, match=r"of 6 prompts in 3 batches, 0 had .* \(6 with 0 throughout\).*needs 2"):
        took(source)
    assert saved(source).json("cursor.json")["offset"] == 0

    def one(prompt: str, index: int) -> str:
        return "4" if "q4<" in prompt and index == 0 else "no"

    options["dynamic_sampling_max_gen_batches"] = 5
    source, _ = make(Scripted(one), rewards=[here(right)], **options)
    with pytest.raises(
        RolloutError, match=r"of 10 prompts in 5 batches, 1 had completions of different rewards \(9 wi"
    ):
        took(source)
    source, kit = make(Scripted(one), rewards=[here(right)], **options, dynamic_sampling_allow_fewer=True)
    assert kit.plane.get(took(source), ["row_index"])["row_index"].tolist() == [4, 4]  # type: ignore[union-attr]


def test_equal_rewards_for_ever_are_warned_about(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = make(Scripted(lambda prompt, index: "no"), rewards=[here(right)])
    for _ in range(4):
        source.retire(took(source), done(0))
    (warning,) = [record.message for record in caplog.records if "nothing is learned" in record.message]
    assert "is number 3 in a row in which the completions of each prompt had equal rewards" in warning
    assert source.metrics["zero_variance_groups"].value == 1.0


def test_rewards_that_abstain_for_ever_are_warned_about(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def none(completions: list[Any], **_: Any) -> list[None]:
        return [None] * len(completions)

    source, _ = make(Scripted(sometimes), rewards=[here(none)])
    for _ in range(4):
        source.retire(took(source), done(0))
    (warning,) = [record.message for record in caplog.records if "nothing is learned" in record.message]
    assert warning.startswith("step 1 is number 3 in a row in which all rewards abstained on every completion: nothing")


def test_rewards_that_abstain(make: Make) -> None:
    def some(completions: list[Any], **_: Any) -> list[float | None]:
        return [1.0 if text == "a" else None for text in completions]

    source, kit = make(Scripted(lambda prompt, index: "ab"[index]), rewards=[here(some)])
    reward: Any = kit.plane.get(took(source), ["reward"])["reward"]
    assert reward.isnan().tolist() == [False, True, False, True]
    assert source.metrics["reward"].value == 1.0


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("calls", [0, 5])
def test_a_generator_that_fails_ends_the_run_with_the_first_cause(make: Make, calls: int) -> None:
    generator = Scripted(sometimes, max_calls=calls)
    source, _ = make(generator, rewards=[here(right)])
    with pytest.raises(ConnectionError, match="the generator is gone") as caught:
        for _ in range(3):
            source.retire(took(source), done(0))
    assert re.fullmatch(r"while rollout e0_d[0-3]_g[01] was sampled, turn 1", caught.value.__notes__[0])
    assert generator.open == 0, "nobody goes on"


def test_stale_weights_are_an_error(make: Make) -> None:
    generator = Scripted(sometimes)
    source, _ = make(generator, rewards=[here(right)])
    source.retire(took(source), done(1))
    with pytest.raises(StaleWeights, match="was sampled with version 0 of the weights, expected 1"):
        took(source, Clock(step=1, version=1))
    generator.version = 1
    assert took(source, Clock(step=1, version=1)).versions == (1,) * 4
    with pytest.raises(StaleWeights, match="was sampled with version 1, not 2"):
        took(source, Clock(step=2, version=2))


def test_rollouts_wait_for_the_weights(make: Make) -> None:
    generator = Scripted(sometimes)
    source, _ = make(generator, rewards=[here(right)])
    live: Future[int] = Future()
    source.retire(took(source), live)
    calls, polls = len(generator.calls), 0

    def poll() -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            assert len(generator.calls) == calls
            generator.version = 1
            live.set_result(1)

    assert source.take(Clock(step=1, version=1), poll) is not None
    assert polls > 3


def test_a_reward_of_the_wrong_form_ends_the_run(make: Make) -> None:
    source, _ = make(Scripted(sometimes), rewards=[here(lambda completions, **_: [1.0])])
    with pytest.raises(RewardError, match="4 rows"):
        took(source)
    assert saved(source).json("cursor.json")["offset"] == 0


def test_rewards_whose_sum_is_no_float32_end_the_run(make: Make) -> None:
    great = here(lambda completions, **_: [1e38 for _ in completions], "great")
    source, _ = make(Scripted(sometimes), rewards=[(great, 10.0)])
    with pytest.raises(
        RewardError, match=r"rollout e0_d0_g0, each by its weight \({'great': 10.0}\), add up to 1e\+39"
    ):
        took(source)


# --------------------------------------------------------------------------------------------------------- environments


def choosy(**options: Any) -> dict[str, Any]:
    return {"name": "tests.rollout.environment_samples.Choosy", "options": options}


def test_a_rollout_that_fails_is_left_out_named_and_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = make(Scripted(sometimes), environment=choosy())
    counted, rows = 0.0, 0
    for _ in range(5):
        ref = took(source)
        rows, counted = rows + len(ref), counted + source.metrics["failed_rollouts"].value
        source.retire(ref, done(0))
    assert (rows, counted) == (18, 2.0)
    failed = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    (first, second) = [message for message in failed if "failed: KeyError: 'no row 5'" in message]
    assert "Traceback" in first and "in step" in first and "Traceback" not in second


def test_an_environment_that_fails_always_ends_the_run(make: Make) -> None:
    source, _ = make(Scripted(sometimes), environment=choosy(broken=True))
    with pytest.raises(
        RolloutError, match=r"4 of 4 rollouts failed in their environment.*first was e0_d0_g0: KeyError"
    ):
        took(source)


def test_rows_that_hang_as_they_are_opened_end_the_start(make: Make) -> None:
    hangs = {"name": "tests.rollout.environment_samples.HangsAtOnce", "timeout_s": 0.5}
    with pytest.raises(
        ConfigError, match=r"HangsAtOnce could not open 3 rows; the last time it took longer than 0.5 s"
    ):
        make(Scripted(sometimes), environment=hangs)


def test_too_many_failures_end_the_run(make: Make) -> None:
    source, _ = make(Scripted(sometimes), "max_reward_failures=0.03", environment=choosy(), rows=6)
    with pytest.raises(RolloutError, match="where max_reward_failures"):
        for _ in range(20):
            source.retire(took(source), done(0))


def hanging(tmp_path: Path) -> Callable[[str, int], str]:
    """The first of each group calls a tool that does not come back, and answers once it is told."""
    call = {"name": "wait", "arguments": {"seconds": 600, "folder": str(tmp_path)}}

    def say(prompt: str, index: int) -> str:
        return "answer" if index or "took longer" in prompt else f"<tool_call>{json.dumps(call)}</tool_call>"

    return say


TOOLS = {"name": "tools", "timeout_s": 1.0, "options": {"tools": ["tests.rollout.environment_samples.wait"]}}


def test_tools_that_hang_are_counted_and_too_many_end_the_run(make: Make, tmp_path: Path) -> None:
    options = ("generation.max_new_tokens=300", "max_reward_failures=0.02")
    rewards = [here(lambda completions, **_: [3.0 if isinstance(c, list) else 1.0 for c in completions], "length")]
    source, kit = make(Scripted(hanging(tmp_path)), *options, environment=TOOLS, rewards=rewards, length=900)
    ref = took(source)
    assert len(ref) == 4 and source.metrics["failed_turns"].value == 2.0
    assert source.metrics["failed_rollouts"].value == 0.0
    said: Any = kit.plane.get(ref, ["completion", "reward"])
    assert [text.endswith("answer") for text in said["completion"]] == [True] * 4
    assert said["reward"].tolist() == [3.0, 1.0] * 2
    source.retire(ref, done(0))
    with pytest.raises(RolloutError, match=r"2 of 4 rollouts failed in their environment, and 4 of the last 100.*took"):
        took(source)


def test_only_the_models_own_tokens_carry_loss(make: Make) -> None:
    rewards = [here(lambda completions, **_: [float(len(messages)) for messages in completions], "messages")]
    source, kit = make(Scripted(sometimes), environment=choosy(turns=3), rewards=rewards)
    ref = took(source)
    columns: Any = kit.plane.get(ref, sorted(ref.fields))
    for i, row in enumerate(columns["row_index"].tolist()):
        said = columns["completion"][i].split("\n")
        word = str(row) if i % 2 == 0 else "no"
        assert said == [f"assistant: {word}", "user: again"] * 2 + [f"assistant: {word}"]
        own = columns["input_ids"][i][columns["loss_mask"][i] > 0]
        assert TOKENIZER.decode(own) == f"{word}<|im_end|>" * 3
        assert (columns["generator_logprobs"][i] != 0).equal(columns["loss_mask"][i] > 0)
        assert columns["reward/environment"][i] == 0.5 + (i % 2 == 0)
        assert columns["reward"][i] == columns["reward/environment"][i] + 5.0
    assert ref.ids[0] == "e0_d0_g0"


# ----------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_measures_reward_and_pass_at_k(make: Make) -> None:
    config = EvaluationConfig(num_generations_per_prompt=4, num_prompts_per_batch=3, pass_reward="right")
    _, kit = make(Scripted(sometimes), rewards=[here(right), (here(right, "other"), -1.0)])
    found = {name: m.value for name, m in evaluate(kit.rollouts, kit.validation_data, config, nothing).items()}
    assert found["held/reward/right"] == found["reward/right"] == found["held/pass@1"] == 0.25
    assert (found["pass@2"], found["pass@4"], found["reward"]) == (0.5, 1.0, 0.0)
    assert found["truncated"] == 0.0
    # "no" has three votes of four, and the right number one.
    assert found["majority@4"] == found["held/majority@4"] == 0.0
    chosen = EvaluationConfig(num_generations_per_prompt=4, pass_at_k=[3], pass_reward="right")
    names = evaluate(kit.rollouts, {"h": kit.train_data}, chosen, nothing)
    assert [name for name in names if name.startswith("pass")] == ["pass@3"]


def test_evaluation_without_rewards_measures_what_else_is_asked(make: Make) -> None:
    """Nothing passes or fails; of 10 prompts, three at a time are handed on with their two completions each."""
    batches: list[int] = []

    def further(batch: Sequence[Rollout]) -> dict[str, Metric]:
        batches.append(len(batch))
        return {"rows": Metric(float(len(batch)), reduce="sum")}

    config = EvaluationConfig(num_generations_per_prompt=2, num_prompts_per_batch=3)
    _, kit = make(Scripted(sometimes))
    found = evaluate(kit.rollouts, kit.validation_data, config, nothing, further)
    names = ["completion_tokens", "rows", "truncated"]
    assert sorted(found) == [*names[:1], *(f"held/{name}" for name in names), *names[1:]]
    assert batches == [6, 6, 6, 2] and found["rows"].value == found["held/rows"].value == 20.0


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("4", True), ("5", False), ("4", True)], 1.0),
        ([("5", False), ("5", False), ("4", True)], 0.0),
        ([("4", True), ("5", False)], 0.5),  # as many votes for either
        ([("4", True), ("4", False), ("5", False)], 0.5),  # one of the two is in the wrong form, say
        ([("", False), ("", False), ("4", True)], 1.0),  # no answer is no vote
        ([("", False)], 0.0),
        ([("1", False), ("2", False), ("3", True)], 1 / 3),
    ],
)
def test_the_majority_passes(votes: list[tuple[str, bool]], expected: float) -> None:
    for order in permutations(votes):
        assert majority_passes(order) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        ("so it is 4.0", "4"),
        ("1,200 apples", "1200"),
        ("<answer> blue </answer> of 3", "blue"),
        ("<answer>1</answer> no <answer>2</answer>", "2"),
        (" perhaps\n", "perhaps"),
        ("0.50", "0.5"),
        ("100", "100"),
        ("9" * 40, "9" * 40),
        ("", ""),
    ],
)
def test_what_a_completion_votes_for(text: str, vote: str) -> None:
    said = Said(messages=[{"role": "assistant", "content": text}])
    assert voted_answer(Rollout(Request("g", 0, Prompt("here", "q", None, None, {}), ()), said)) == vote


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations_per_prompt": 4, "pass_at_k": [1, 5]}, "pass@5 is estimated from at least 5 completions"),
        ({"pass_at_k": [0]}, "greater than 0"),
        ({"num_generations_per_prompt": 2, "temperature": 0}, "the same completion 2 times"),
    ],
)
def test_an_evaluation_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluationConfig(**settings)


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 0, 2), (5, 2, 3), (5, 5, 1), (6, 1, 6), (4, 3, 2)])
def test_pass_at_k_counts_all_choices(n: int, passed: int, k: int) -> None:
    chosen = list(combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
