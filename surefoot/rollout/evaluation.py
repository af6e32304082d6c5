"""How well a policy answers prompts: mean reward, pass@k and the majority's answer, in validation and in
`surefoot eval` alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot.data.prepare import Dataset
from surefoot.rollout.config import EvaluationConfig
from surefoot.rollout.reward_functions import answer_text, last_number
from surefoot.rollout.rollouts import Request, Rollout, Rollouts
from surefoot.types import Metric, Metrics, Poll, merge_metrics


@dataclass(frozen=True, slots=True)
class Judged:
    """One completion of a validation prompt and what the rewards say of it.

    Attributes:
        row_index: the prompt's row in the file, counted from 0.
        reward, rewards: the row's whole reward, and each function's own; NaN where all, or it, abstained.
    """

    rollout: Rollout
    row_index: int
    reward: float
    rewards: dict[str, float]
    passed: bool


def evaluate(
    rollouts: Rollouts,
    datasets: Mapping[str, Dataset],
    config: EvaluationConfig,
    poll: Poll,
    further: Callable[[Sequence[Rollout]], Metrics] = lambda batch: {},
) -> Metrics:
    """The metrics of `measure`, and what `further` finds on batches of rollouts: "<set>/<metric>" for each set and
    "<metric>" over all."""
    by_set: dict[str, Metrics] = {}
    rows = config.num_prompts_per_batch * config.num_generations_per_prompt
    for name, dataset in datasets.items():
        judged = judge(rollouts, dataset, config, poll)
        answers = [each.rollout for each in judged]
        batches = [answers[start : start + rows] for start in range(0, len(answers), rows)]
        by_set[name] = {**measure(judged, config), **merge_metrics(map(further, batches))}
    return over_sets(by_set)


def over_sets(by_set: Mapping[str, Metrics]) -> Metrics:
    """ "<set>/<metric>" for each set and "<metric>" over all."""
    found = {f"{name}/{key}": metric for name, metrics in by_set.items() for key, metric in metrics.items()}
    return found | merge_metrics(by_set.values())


def judge(
    rollouts: Rollouts,
    dataset: Dataset,
    config: EvaluationConfig,
    poll: Poll,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> list[Judged]:
    """Answers the set's prompts, in their order, and judges the answers. Those that fail in their environment are left
    out.

    Args:
        progress: is told how many completions are done, and of how many.

    Raises:
        RolloutError, RewardError: as sampling and scoring do.
    """
    n, judged = config.num_generations_per_prompt, list[Judged]()
    temperature = rollouts.sampling.temperature if config.temperature is None else config.temperature
    for start in range(0, len(dataset), config.num_prompts_per_batch):
        rows = range(start, min(start + config.num_prompts_per_batch, len(dataset)))
        requests = [
            Request(f"v{dataset.fingerprint}_d{i}", g, dataset.prompts[i], tuple(dataset.ids(i).tolist()))
            for i in rows
            for g in range(n)
        ]
        index = {request.group: int(dataset.row_index[i]) for request, i in zip(requests[::n], rows, strict=True)}
        found = rollouts.sample(requests, replace(rollouts.sampling, temperature=temperature), poll)
        scores = rollouts.score(found, poll)
        for row, rollout in enumerate(found):
            rewards = {name: _number(column[row]) for name, column in scores.values.items()}
            reward = scores.total[row]
            value = reward if config.pass_reward is None else rewards[config.pass_reward]
            passed = value >= config.pass_threshold
            judged.append(Judged(rollout, index[rollout.request.group], reward, rewards, passed))
        progress(rows.stop * n, len(dataset) * n)
    return judged


def measure(judged: Sequence[Judged], config: EvaluationConfig) -> dict[str, Metric]:
    """Where there are rewards, `reward` and `reward/<name>` (means over the completions on which they did not abstain),
    `pass@<k>` and `majority@<n>` (means over prompts); `truncated` (a fraction) and `completion_tokens` (a mean)."""
    n, groups = config.num_generations_per_prompt, dict[str, list[Judged]]()
    names = tuple(judged[0].rewards) if judged else ()
    for each in judged if names else ():
        groups.setdefault(each.rollout.request.group, []).append(each)
    lists = {
        "reward": [each.reward for each in judged],
        **{f"reward/{name}": [each.rewards[name] for each in judged] for name in names},
        "truncated": [float(each.rollout.truncated) for each in judged],
        "completion_tokens": [float(sum(each.rollout.said.own)) for each in judged],
    }
    for k in config.pass_at_k or [2**i for i in range(n.bit_length())]:
        counted = [(len(group), sum(each.passed for each in group)) for group in groups.values() if len(group) >= k]
        lists[f"pass@{k}"] = [pass_at_k(size, passed, k) for size, passed in counted]
    if n > 1:
        votes = ([(voted_answer(each.rollout), each.passed) for each in group] for group in groups.values())
        lists[f"majority@{n}"] = [majority_passes(group) for group in votes]
    known = {name: [value for value in column if not math.isnan(value)] for name, column in lists.items()}
    return {name: Metric(sum(column) / len(column), float(len(column))) for name, column in known.items() if column}


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that among k of n completions, drawn without replacement, one is among the `passed`: an unbiased
    estimate of that for k new ones (arXiv:2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def majority_passes(votes: Sequence[tuple[str, bool]]) -> float:
    """Whether the answer that most completions gave passes (self-consistency, arXiv:2203.11171). Where several answers
    have as many votes, and where completions of one answer pass and others do not, their share; without any answer 0.

    Args:
        votes: each completion's answer, empty where it gave none, and whether it passes.

    >>> majority_passes([("4", True), ("5", False), ("4", True)])
    1.0
    """
    by_answer: dict[str, list[bool]] = {}
    for answer, passed in votes:
        if answer:
            by_answer.setdefault(answer, []).append(passed)
    most = max(map(len, by_answer.values()), default=0)
    first = [sum(passed) / most for passed in by_answer.values() if len(passed) == most]
    return sum(first) / len(first) if first else 0.0


def voted_answer(rollout: Rollout) -> str:
    """What a completion votes for: of its last turn the last `<answer>…</answer>`, else the last number, else all."""
    text = answer_text(rollout.said.messages)
    marked = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if marked:
        return str(marked[-1]).strip()
    number = last_number(text)
    if number is None:
        return text.strip()
    digits = f"{number:f}"  # 4, 4.0 and 4.00 are one answer
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _number(value: float | None) -> float:
    return math.nan if value is None else value
