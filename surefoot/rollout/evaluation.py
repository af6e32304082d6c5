"""How well a policy answers prompts: mean reward and pass@k, in validation and in `surefoot eval` alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from surefoot.data.prepare import Dataset
from surefoot.rollout.config import EvaluationConfig
from surefoot.rollout.rewards import Scores
from surefoot.rollout.rollouts import Request, Rollout, Rollouts
from surefoot.types import Metric, Metrics, Poll, merge_metrics

Measure = Callable[[Sequence[Rollout]], Metrics]


def evaluate(
    rollouts: Rollouts,
    datasets: Mapping[str, Dataset],
    config: EvaluationConfig,
    poll: Poll,
    measure: Measure = lambda found: {},
) -> Metrics:
    """ "<set>/<metric>" for each set and "<metric>" over all: where there are rewards, `reward` and `reward/<name>`
    (means over completions) and `pass@<k>` (mean over prompts); `truncated` (a fraction), `completion_tokens` (a mean),
    and what `measure` finds on each batch of rollouts."""
    by_set: dict[str, dict[str, Metric]] = {}
    for name, dataset in datasets.items():
        batches = range(0, len(dataset), config.num_prompts_per_batch)
        by_set[name] = merge_metrics(_batch(rollouts, dataset, start, config, poll, measure) for start in batches)
    found = {f"{name}/{key}": metric for name, metrics in by_set.items() for key, metric in metrics.items()}
    return found | merge_metrics(by_set.values())


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that among k of n completions, drawn without replacement, one is among the `passed`: an unbiased
    estimate of that for k new ones (arXiv:2107.03374).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _batch(
    rollouts: Rollouts, dataset: Dataset, start: int, config: EvaluationConfig, poll: Poll, measure: Measure
) -> Metrics:
    n = config.num_generations_per_prompt
    rows = range(start, min(start + config.num_prompts_per_batch, len(dataset)))
    requests = [
        Request(f"v{dataset.fingerprint}_d{i}", g, dataset.prompts[i], tuple(dataset.ids(i).tolist()))
        for i in rows
        for g in range(n)
    ]
    temperature = rollouts.sampling.temperature if config.temperature is None else config.temperature
    found = rollouts.sample(requests, replace(rollouts.sampling, temperature=temperature), poll)
    return {**_measured(found, rollouts.score(found, poll), config), **measure(found)}


def _measured(found: Sequence[Rollout], scores: Scores, config: EvaluationConfig) -> dict[str, Metric]:
    values = {name: [math.nan if v is None else v for v in column] for name, column in scores.values.items()}
    judged = scores.total if config.pass_reward is None else values[config.pass_reward]
    passed: dict[str, list[bool]] = {}
    for rollout, value in zip(found, judged, strict=True):
        if scores.values:
            passed.setdefault(rollout.request.group, []).append(value >= config.pass_threshold)
    lists = {
        "reward": scores.total,
        **{f"reward/{name}": column for name, column in values.items()},
        "truncated": [float(rollout.truncated) for rollout in found],
        "completion_tokens": [float(sum(rollout.said.own)) for rollout in found],
    }
    for k in (2**i for i in range(config.num_generations_per_prompt.bit_length())):
        lists[f"pass@{k}"] = [pass_at_k(len(group), sum(group), k) for group in passed.values() if len(group) >= k]
    known = {name: [value for value in column if not math.isnan(value)] for name, column in lists.items()}
    return {name: Metric(sum(column) / len(column), float(len(column))) for name, column in known.items() if column}
