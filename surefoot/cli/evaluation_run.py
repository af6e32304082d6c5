"""What `surefoot eval` does: a checkpoint's own configuration, changed as asked, and validation's own code on it."""

from __future__ import annotations

import difflib
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from surefoot import build_rollouts
from surefoot.checkpoint.storage import write_small_file
from surefoot.cli import found_model
from surefoot.cli.data import columns_mapping
from surefoot.cli.found_model import FoundModel
from surefoot.config import DatasetConfig
from surefoot.config_file import checked
from surefoot.data.prepare import Dataset, prepare
from surefoot.errors import ConfigError, DataError
from surefoot.report.completions import parquet_table, rows_of
from surefoot.report.preparing import preparing
from surefoot.rollout.config import RolloutRunConfig
from surefoot.rollout.environments import environment_names
from surefoot.rollout.evaluation import Judged, judge, measure, voted_answer
from surefoot.rollout.reward_functions import BUILT_IN, gym_tasks
from surefoot.types import Column

_ROWS_MADE = 100
_log = logging.getLogger(__name__)

_FILE_ENDINGS = (".jsonl", ".json", ".parquet")
_SECTIONS = ("generation", "rewards", "environment", "evaluation", "max_reward_failures")
_NEED_OPTIONS = ("reasoning_gym", "tools")  # environments that a bare name does not say enough of


@dataclass(frozen=True)
class Evaluation:
    """Attributes:
    dataset: the prompts.
    judged: their completions, but for those that failed in their environment.
    """

    config: RolloutRunConfig
    dataset: Dataset
    judged: list[Judged]

    @property
    def summary(self) -> dict[str, Any]:
        """The metrics of validation, and what they are taken over."""
        counts, asked = self.dataset.counts, len(self.dataset) * self.config.evaluation.num_generations_per_prompt
        metrics = measure(self.judged, self.config.evaluation)
        return {
            "prompts": len(self.dataset),
            "completions": asked,
            **{name: metric.value for name, metric in metrics.items()},
            "abstained": sum(math.isnan(each.reward) for each in self.judged),
            "failed": asked - len(self.judged),
            "dropped": counts.dropped,
            "skipped": counts.skipped,
        }


def source_of(
    task: str, columns: Sequence[str], split: str | None, max_rows: int | None, skip_bad_rows: bool
) -> DatasetConfig:
    """Rows of a file, or those that an environment makes under a name of their own."""
    if _is_file(task):
        return DatasetConfig(
            path=task,
            split=split,
            columns=columns_mapping(list(columns)),
            max_rows=max_rows,
            on_bad_row="skip" if skip_bad_rows else "error",
        )
    _environment_of(task)  # refused before a checkpoint is read
    return DatasetConfig(path=f"eval/{task}", format="environment", max_rows=max_rows or _ROWS_MADE)


def evaluate(
    model: Path,
    source: DatasetConfig,
    sections: tuple[dict[str, Any], dict[str, Any]],
    asked: Mapping[str, Mapping[str, Any]],
    rewards: Sequence[str],
    seed: int | None,
    chat_template: str | None,
) -> Evaluation:
    """
    Args:
        sections: what is asked for in `policy` and in `data`. `asked`: in the others.

    Raises:
        ModelError, CheckpointError: there is no sound language model, or its template does not suit the rows.
        DataError: rows cannot be read or are bad, or a prompt is too long.
        ConfigError, RewardError: what is asked for cannot be, or a reward lacks its column.
        RolloutError: as validation does.
    """
    rewarded = [_reward(text) for text in rewards]
    found = found_model.find(model, source, *sections, kind="causal_lm")
    config = _config(found, source, asked, rewarded, seed)
    tokenizer, console = found.tokenizer(chat_template), Console(stderr=True)
    if config.policy.num_threads is not None:
        torch.set_num_threads(config.policy.num_threads)
    with ExitStack() as opened:
        talk = build_rollouts.conversations(config, tokenizer, opened)
        longest = build_rollouts.longest_row(config)
        with preparing(console, f"preparing {source.path}") as progress:
            dataset = prepare(source, config.data, tokenizer, longest, progress, rows="prompts", opener=talk)
        _require_all_fit(dataset, source, longest)
        rollouts = build_rollouts.rollouts(config, tokenizer, talk, opened)
        assert rollouts is not None
        rollouts.check(dataset.prompts)
        loaded = found.load(tokenizer)
        slots = min(config.generation.num_slots, len(dataset) * config.evaluation.num_generations_per_prompt)
        if isinstance(found.run, RolloutRunConfig):
            slots = build_rollouts.num_slots(found.run)
        elif talk is None:  # no more room than is needed: a plain folder's model may read very long texts
            room = int(dataset.lengths.max()) + config.generation.max_new_tokens
            policy = config.policy.model_copy(update={"max_total_sequence_length": room})
            config = config.model_copy(update={"policy": policy})
        build_rollouts.connect(rollouts, config, loaded, loaded.model, slots=slots)
        with preparing(console, f"answering {source.path}") as progress:
            judged = judge(rollouts, dataset, config.evaluation, lambda: None, progress)
    if judged and all(math.isnan(value) for each in judged for value in (each.reward, *each.rewards.values())):
        _log.warning("all rewards abstained on all %d completions: nothing was judged, and none passes", len(judged))
    return Evaluation(config, dataset, judged)


def write(out: Path, found: Evaluation) -> None:
    """One row for each completion. The file appears, or is replaced, when it is whole."""
    columns = _columns(found.judged)
    if out.suffix == ".parquet":
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(parquet_table(columns), buffer)
        write_small_file(out, buffer.getvalue())
    else:
        write_small_file(out, "".join(json.dumps(row) + "\n" for row in rows_of(columns)).encode())


def _columns(judged: Sequence[Judged]) -> dict[str, Column]:
    names = judged[0].rewards if judged else ()
    said = [each.rollout.said for each in judged]
    return {
        "row": torch.tensor([each.row_index for each in judged]),
        "sample": torch.tensor([each.rollout.request.index for each in judged]),
        "prompt": [each.rollout.request.prompt.shown for each in judged],
        "completion": [each.text for each in said],
        "vote": [voted_answer(each.rollout) for each in judged],
        "reward": torch.tensor([each.reward for each in judged], dtype=torch.float64),
        **{f"reward/{name}": torch.tensor([each.rewards[name] for each in judged]).double() for name in names},
        "passed": torch.tensor([each.passed for each in judged]),
        "tokens": torch.tensor([sum(each.own) for each in said]),
        "finish_reason": [str(each.finish_reason) for each in said],
    }


# ------------------------------------------------------------------------------------------------ what is asked for


def _is_file(task: str) -> bool:
    return task.endswith(_FILE_ENDINGS) or "/" in task or Path(task).exists()


def _environment_of(task: str) -> dict[str, Any]:
    """Raises `DataError` where there is no such task."""
    own = [name for name in environment_names() if name not in _NEED_OPTIONS]
    if task in own or ("." in task and all(map(str.isidentifier, task.split(".")))):  # or a class of the user's own
        return {"name": task}
    known = gym_tasks()
    if task in known:
        return {"name": "reasoning_gym", "options": {"task": task}}
    close = difflib.get_close_matches(task, [*own, *known], n=1, cutoff=0.6)
    raise DataError(
        f"there is no task {task!r}: expected a file of prompts, {', '.join(own)}, my_module.MyEnvironment, or one of "
        f"reasoning-gym's {len(known)} tasks{f'; did you mean {close[0]}?' if close else ''}"
    )


def _reward(text: str) -> dict[str, Any]:
    """A section of `rewards`. Raises `ConfigError` when it is none."""
    if text in BUILT_IN:
        return {"name": text}
    if not text.startswith("{"):
        if "." in text:
            return {"function": text}
        close = difflib.get_close_matches(text, BUILT_IN, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"--reward: expected one of {known}, or a dotted path, found {text!r}{hint}")
    try:
        section = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--reward: {text!r} is no mapping: {error}") from None
    return dict(section)


def _config(
    found: FoundModel,
    source: DatasetConfig,
    asked: Mapping[str, Mapping[str, Any]],
    rewards: Sequence[Mapping[str, Any]],
    seed: int | None,
) -> RolloutRunConfig:
    """The run's own sections, where it has them, and what is asked for in their place. A task that is not the run's
    comes with a judge of its own. Raises `ConfigError` when that cannot be run."""
    run = found.run if isinstance(found.run, RolloutRunConfig) else None
    values: dict[str, Any] = run.model_dump(include=set(_SECTIONS)) if run is not None else {}
    own_rewards = not rewards
    if source.format == "environment":
        environment, ours = _environment_of(source.path.removeprefix("eval/")), values.get("environment")
        if ours is None or ours["name"] != environment["name"] or ours["options"].get("task") != _task(environment):
            values["environment"], own_rewards = environment, False
    if not own_rewards:
        values["rewards"] = list(rewards)
        values["evaluation"] = {**values.get("evaluation", {}), "pass_reward": None}
    if not values.get("rewards") and values.get("environment") is None:
        raise ConfigError(
            "nothing says which answers are right: name a reward, such as --reward exact_match, which compares with "
            "the column answer, or a task that judges by itself"
        )
    values |= {section: {**values.get(section, {}), **options} for section, options in asked.items()}
    values |= {"policy": found.policy.model_dump(), "data": found.data.model_dump()}
    values |= {"algorithm": "evaluation", "run_dir": "-", "max_num_steps": 1}
    return checked(RolloutRunConfig, {**values, "seed": found.seed if seed is None else seed}, "surefoot eval")


def _task(environment: Mapping[str, Any]) -> Any:
    """Of reasoning-gym; others have none."""
    return environment.get("options", {}).get("task")


def _require_all_fit(dataset: Dataset, source: DatasetConfig, longest: int) -> None:
    """Prompts that were left out would make the result one about easier rows."""
    if dataset.counts.dropped and source.on_bad_row == "error":
        reasons = ", ".join(f"{count} × {reason}" for reason, count in dataset.counts.dropped.items())
        raise DataError(
            f"{source.path}: {reasons}; the longest has {dataset.counts.longest}. Ask for fewer --max-new-tokens or a "
            "greater --max-length, or leave such rows out, and count them, with --skip-bad-rows"
        )
