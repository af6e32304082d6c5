"""Batches of rollouts: prompts drawn from a data set, several completions sampled for each and scored."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from surefoot.advantages import deviation
from surefoot.data.source import CursorSource
from surefoot.errors import RolloutError, StaleWeights
from surefoot.rollout.config import RolloutAlgorithmConfig, RolloutRunConfig
from surefoot.rollout.rollouts import Request, Rollout, Rollouts
from surefoot.types import BatchRef, Clock, Column, Kit, Metric, Poll

_log = logging.getLogger(__name__)

_FLAT_STEPS = 3  # so many steps in a row without anything to learn from are warned about


@dataclass(frozen=True)
class Group:
    """One prompt's rollouts and what the reward functions, and all together, say of each. Nothing is asked of it before
    all is in it.

    Attributes:
        end: the cursor's position behind it.
        row_index: the prompt's row in the file.
    """

    name: str
    end: tuple[int, int]
    row_index: int
    rollouts: list[Rollout] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)

    @cached_property
    def varies(self) -> bool:
        return deviation(torch.tensor(self.rewards)) > 0

    @property
    def is_flat(self) -> bool:
        """With several rewards, all of them equal."""
        return sum(not math.isnan(reward) for reward in self.rewards) > 1 and not self.varies

    @property
    def is_unjudged(self) -> bool:
        """All rewards abstained on all of it."""
        return all(math.isnan(reward) for reward in self.rewards)


class RolloutSource(CursorSource):
    """A `surefoot.types.Source` of rollouts made with the weights last published.

    Each row gets `input_ids`, `loss_mask` and `generator_logprobs` (ragged, over prompt and completion); `reward`,
    `reward/<name>` (NaN where it abstained, and without any reward) and `truncated`, float32 [rows]; `row_index`, int64
    [rows]; and the texts `prompt`, `source`, `completion` and `finish_reason`. Groups are called "e<epoch>_d<draw>" by
    their place in the data's order, so that everything sampled follows from the seed, that place and the weights: the
    cursor is all state.

    With dynamic sampling, groups whose rewards are all equal are left out and more are drawn. Groups beyond those
    needed are given back to the cursor, and drawn again in the next step.
    """

    def __init__(self, kit: Kit, config: RolloutAlgorithmConfig) -> None:
        run: RolloutRunConfig = kit.config
        super().__init__(
            kit.train_data,
            seed=run.seed,
            groups_per_step=config.num_prompts_per_step,
            per_step=f"{config.num_prompts_per_step} prompts",
            max_epochs=run.max_num_epochs,
            shuffle=run.data.shuffle,
            drop_last=run.data.drop_last,
        )
        self._kit, self._config = kit, config
        self._rollouts: Rollouts = kit.rollouts
        self._step = self._flat_steps = 0

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self._config.dynamic_sampling else super().steps_per_epoch

    def take(self, clock: Clock, poll: Poll) -> BatchRef | None:
        """
        Raises:
            StaleWeights: the generator has other weights than those last published.
            RolloutError: no rollout could be made, or dynamic sampling found nothing to learn from.
            RewardError: a reward function returned no rewards, or failed too often.
        """
        poll()
        if self.exhausted:
            return None
        before = self._cursor.position
        try:
            groups = self._groups(clock, poll)
        except BaseException:
            self._cursor.position = before
            raise
        if not groups:
            return None
        self._step = clock.step + 1
        return self._put(groups)

    def retire(self, ref: BatchRef, live: Future[int]) -> None:
        self._record(ref)
        self._kit.plane.drop(ref)
        self._rollouts.live = live

    def close(self) -> None:
        self._rollouts.close()

    # ------------------------------------------------------------------------------------------------------- sampling

    def _groups(self, clock: Clock, poll: Poll) -> list[Group]:
        """The step's groups, in the data's order."""
        config, kept, drawn = self._config, list[Group](), list[Group]()
        needed, batches = config.num_prompts_per_step, 0
        self._failed = Counter[str]()
        while len(kept) < needed and not self.exhausted and batches < self._max_batches:
            batch, batches = self._draw(clock.version, poll), batches + 1
            drawn += batch
            kept += [group for group in batch if group.rollouts and (group.varies or not config.dynamic_sampling)]
        short = config.dynamic_sampling and len(kept) < needed and not self.exhausted
        if short and not (kept and config.dynamic_sampling_allow_fewer):
            raise RolloutError(self._nothing_to_learn(kept, drawn, batches))
        if len(kept) > needed:
            kept = kept[:needed]
            self._cursor.position = kept[-1].end
        self.metrics = self._measured(drawn, batches)
        self._warn_of_flat_steps(clock.step + 1, drawn)
        return kept

    @property
    def _max_batches(self) -> int:
        return self._config.dynamic_sampling_max_gen_batches if self._config.dynamic_sampling else 1

    def _draw(self, version: int, poll: Poll) -> list[Group]:
        """The next prompts' groups, sampled and scored. One whose rollouts have all failed is empty."""
        epoch, first, indices = self._cursor.take()
        groups: list[Group] = []
        requests: list[Request] = []
        for draw, i in enumerate(indices.tolist(), start=first):
            groups.append(Group(f"e{epoch}_d{draw}", (epoch, draw + 1), int(self._dataset.row_index[i])))
            prompt, ids = self._dataset.prompts[i], tuple(self._dataset.ids(i).tolist())
            requests += [
                Request(groups[-1].name, g, prompt, ids) for g in range(self._config.num_generations_per_prompt)
            ]
        with self._kit.phase("rollout"):
            found = self._answered(requests, version, poll)
        for rollout in found:
            if rollout.said.version != version:
                raise StaleWeights(
                    f"{rollout.request.id} was sampled with version {rollout.said.version}, not {version}"
                )
        with self._kit.phase("reward"):
            scores = self._rollouts.score(found, poll)
        by_name = {group.name: group for group in groups}
        for row, rollout in enumerate(found):
            group = by_name[rollout.request.group]
            group.rollouts.append(rollout)
            group.rewards.append(scores.total[row])
            values = {name: column[row] for name, column in scores.values.items()}
            group.values.append({name: math.nan if value is None else value for name, value in values.items()})
        turns = sum(rollout.said.failed_turns for rollout in found)
        failures = sum(scores.failures.values())
        self._failed += Counter(rollouts=len(requests) - len(found), rewards=failures, turns=turns)
        return groups

    def _answered(self, requests: Sequence[Request], version: int, poll: Poll) -> list[Rollout]:
        """What is to be trained on. One that failed is missing. `version`: of the weights that are to sample."""
        return self._rollouts.sample(requests, self._rollouts.sampling, poll)

    def _nothing_to_learn(self, kept: Sequence[Group], drawn: Sequence[Group], batches: int) -> str:
        flat = Counter(f"{group.rewards[0]:g}" for group in drawn if group.rewards and not group.varies)
        found = ", ".join(f"{count} with {reward} throughout" for reward, count in flat.most_common(5))
        return (
            f"dynamic sampling: of {len(drawn)} prompts in {batches} batches, {len(kept)} had completions of different "
            f"rewards ({found}), and a step needs {self._config.num_prompts_per_step}. Take easier or harder prompts, "
            "a finer reward, more num_generations_per_prompt or dynamic_sampling_max_gen_batches; or go on with fewer "
            "by dynamic_sampling_allow_fewer: true"
        )

    # ----------------------------------------------------------------------------------------------- what is told of it

    def _put(self, groups: Sequence[Group]) -> BatchRef:
        ref, columns = self._rows([rollout for group in groups for rollout in group.rollouts])
        values = [own for group in groups for own in group.values]
        columns |= {
            "reward": torch.tensor([reward for group in groups for reward in group.rewards]),
            **{f"reward/{name}": torch.tensor([own[name] for own in values]) for name in values[0]},
            "row_index": torch.tensor([group.row_index for group in groups for _ in group.rollouts]),
        }
        return self._kit.plane.put(ref, columns)

    def _rows(self, rollouts: Sequence[Rollout]) -> tuple[BatchRef, dict[str, Column]]:
        return rows_of(rollouts)

    def _record(self, ref: BatchRef) -> None:
        """The rows as they are at the end of their step, with the advantages that they were trained with."""
        first = ["row_index", "prompt", "completion", "reward", *(f"reward/{name}" for name in self._rollouts.weights)]
        columns: dict[str, Any] = self._kit.plane.get(ref, [*first, "finish_reason", "loss_mask"])
        tokens = torch.stack([mask.sum() for mask in columns["loss_mask"]])
        shown = {"id": list(ref.ids), "group": list(ref.groups), **{name: columns[name] for name in first}}
        if "advantages" in ref.fields:
            advantages: list[Any] = list(self._kit.plane.get(ref, ["advantages"])["advantages"])
            shown["advantage"] = torch.stack([values.sum() for values in advantages]) / tokens.clamp(min=1)
        shown |= {"tokens": tokens.long(), "finish_reason": columns["finish_reason"]}
        shown["version"] = torch.tensor(ref.versions)
        with self._kit.phase("record"):
            self._kit.record(self._step, {**shown, **self._shown(ref)})

    def _shown(self, ref: BatchRef) -> dict[str, Any]:
        """Further columns of `completions/`."""
        return {}

    def _measured(self, groups: Sequence[Group], batches: int) -> dict[str, Metric]:
        """Of everything that was drawn, kept or not."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lengths = torch.tensor([float(sum(rollout.said.own)) for rollout in rollouts])
        found = {
            **(self._judged(groups) if self._rollouts.weights else {}),
            "truncated": _mean(torch.tensor([float(rollout.truncated) for rollout in rollouts])),
            "completion_tokens": _mean(lengths),
            "failed_rollouts": Metric(float(self._failed["rollouts"]), reduce="sum"),
            "failed_rewards": Metric(float(self._failed["rewards"]), reduce="sum"),
        }
        if self._kit.config.environment is not None:
            found["failed_turns"] = Metric(float(self._failed["turns"]), reduce="sum")
        if self._config.dynamic_sampling:
            found["drawn_groups"] = Metric(float(len(groups)), reduce="sum")
            found["drawn_batches"] = Metric(float(batches), reduce="sum")
        return found

    def _judged(self, groups: Sequence[Group]) -> dict[str, Metric]:
        rewards = torch.tensor([reward for group in groups for reward in group.rewards])
        return {
            "reward": _mean(rewards),
            "reward_std": Metric(deviation(rewards), float(len(rewards))),
            **{f"reward/{name}": _mean(column) for name, column in _by_name(groups).items()},
            "zero_variance_groups": _mean(torch.tensor([float(group.is_flat) for group in groups])),
        }

    def _warn_of_flat_steps(self, step: int, drawn: Sequence[Group]) -> None:
        unjudged = self._config.needs_rewards and all(group.is_unjudged for group in drawn)
        flat = self._config.compares_siblings and all(group.is_flat or group.is_unjudged for group in drawn)
        self._flat_steps = self._flat_steps + 1 if flat or unjudged else 0
        if self._flat_steps != _FLAT_STEPS:
            return
        found = "the completions of each prompt had equal rewards"
        advice = "Take easier or harder prompts, a finer reward or more num_generations_per_prompt"
        if unjudged:
            found = "all rewards abstained on every completion"
            advice = "Look at the completions, and at what the rewards ask of them and of the rows"
        _log.warning(
            "step %d is number %d in a row in which %s: nothing is learned from them. %s",
            *(step, _FLAT_STEPS, found, advice),
        )


def rows_of(rollouts: Sequence[Rollout]) -> tuple[BatchRef, dict[str, Column]]:
    """As rows to train on, with what `RolloutSource` says of them but the rewards and the places in the file."""
    asked, said = [rollout.request.prompt_ids for rollout in rollouts], [rollout.said for rollout in rollouts]

    def whole(parts: Iterable[Sequence[float]]) -> list[torch.Tensor]:
        """Per token, 0 on the prompts."""
        return [torch.tensor([*[0.0] * len(p), *map(float, part)]) for p, part in zip(asked, parts, strict=True)]

    columns: dict[str, Column] = {
        "input_ids": [torch.tensor([*p, *each.ids]) for p, each in zip(asked, said, strict=True)],
        "loss_mask": whole(each.own for each in said),
        "generator_logprobs": whole(each.logprobs for each in said),
        "truncated": torch.tensor([float(rollout.truncated) for rollout in rollouts]),
        "prompt": [rollout.request.prompt.shown for rollout in rollouts],
        "source": [rollout.request.prompt.source for rollout in rollouts],
        "completion": [each.text for each in said],
        "finish_reason": [str(each.finish_reason) for each in said],
    }
    ref = BatchRef(
        ids=tuple(rollout.request.id for rollout in rollouts),
        groups=tuple(rollout.request.group for rollout in rollouts),
        lengths=tuple(len(p) + len(each.ids) for p, each in zip(asked, said, strict=True)),
        versions=tuple(each.version for each in said),
        fields=frozenset(),
    )
    return ref, columns


def _by_name(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    values = [own for group in groups for own in group.values]
    return {name: torch.tensor([own[name] for own in values]) for name in (values[0] if values else ())}


def _mean(values: torch.Tensor) -> Metric:
    """Over what is not NaN: functions that abstained have no part in it. NaN where nothing is left."""
    return Metric(float(values.double().nanmean()), float(values.isfinite().sum()))
