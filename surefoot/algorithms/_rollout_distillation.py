"""Distillation on rollouts, whatever the teachers' tokenizers: who answers the prompts, and what is measured."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from surefoot.algorithms._teachers import Teachers, TeachersConfig
from surefoot.config import PositiveInt, Real
from surefoot.data.prepare import Dataset
from surefoot.losses.supervised import NLL
from surefoot.rollout.config import RolloutAlgorithmConfig, RolloutRunConfig
from surefoot.rollout.evaluation import evaluate, over_sets
from surefoot.rollout.mixture import MixedSource, has_answer, require_answers, rows_with_chats
from surefoot.rollout.rollouts import Request, Rollout
from surefoot.types import Algorithm, BatchRef, Clock, Head, Kit, Metrics, Objective, Poll, Source, merge_metrics

_SENSE_ROWS = 8
T = TypeVar("T")


class RolloutDistillationConfig(TeachersConfig, RolloutAlgorithmConfig):
    """
    Attributes:
        student_fraction: the share of prompts that the student answers; the rest is answered by the data set's column
            `answer`. 1 is on-policy, 0 off-policy.
    """

    needs_rewards: ClassVar[bool] = False
    compares_siblings: ClassVar[bool] = False
    or_else: ClassVar[str] = ""  # what else to do where the data set cannot answer

    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 1
    student_fraction: Annotated[Real, Field(ge=0, le=1)] = 1.0

    @property
    def dataset_answers(self) -> bool:
        """Some prompts."""
        return self.student_fraction < 1

    @property
    def policy_samples(self) -> bool:
        return self.student_fraction > 0 or not self.dataset_answers  # validation is on its samples in the latter case

    @property
    def other_models(self) -> list[tuple[str, float]]:
        """Those that answer prompts in the data set's place, with their weights."""
        return []

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        if self.dataset_answers and self.num_generations_per_prompt > 1:
            raise ValueError(
                f"student_fraction: the data set has one answer to a prompt, and num_generations_per_prompt is "
                f"{self.num_generations_per_prompt}; expected 1{self.or_else}"
            )
        return self

    def check(self, run: RolloutRunConfig) -> None:
        super().check(run)
        if self.dataset_answers and run.environment is not None:
            section = run.algorithm.rpartition(".")[2]
            raise ValueError(
                f"{section}.student_fraction: an environment replies to what is said, and the data set's answers are "
                f"there beforehand; expected 1{self.or_else}"
            )


class RolloutDistillation(Algorithm):
    """Rollouts come from the source, what the teachers say of them is added, one loss is minimised."""

    config: RolloutDistillationConfig
    rows = "prompts"
    run_config = RolloutRunConfig

    @abstractmethod
    def teachers(self, kit: Kit) -> Teachers: ...

    def source(self, kit: Kit) -> Source:
        run, config = kit.config, self.config
        self.optimizer_steps_per_step = config.optimizer_steps(run)
        self._kit, self._minibatch_rows, self._sense_is_checked = kit, run.policy.train_global_batch_size, False
        self._teachers = self.teachers(kit)
        self._teachers.check(kit)
        if not config.policy_samples:
            for data in kit.validation_data.values():
                require_answers(data.prompts)
        source = MixedSource(kit, config, policy_fraction=config.student_fraction, others=config.other_models)
        self._answers = source.answers
        return source

    def enrich(self, ref: BatchRef, kit: Kit) -> BatchRef:
        if not self._sense_is_checked:
            self._sense_is_checked = True
            self._check_sense(kit)
        ref = self._teachers.add(ref, kit)
        self.metrics = self._teachers.metrics
        return ref

    def _check_sense(self, kit: Kit) -> None:
        """On the data set's own answers, where it has some."""
        prompts = [(i, prompt) for i, prompt in enumerate(kit.train_data.prompts) if has_answer(prompt)][:_SENSE_ROWS]
        found = self._answers([Request(f"answer_d{i}", 0, prompt, ()) for i, prompt in prompts])
        if found:
            self._on(found, kit, lambda ref: self._teachers.warn_of_nonsense(ref, kit))

    def objectives(self, clock: Clock) -> Sequence[Objective]:
        epochs, rows = self.config.num_epochs_per_step, self._minibatch_rows
        return [replace(self._teachers.objective(self._kit), epochs=epochs, minibatch_rows=rows)]

    def evaluate(self, kit: Kit, poll: Poll) -> Metrics:
        """Rewards, where there are some, and how far the student is from its teachers, on its own answers; on the data
        set's, where nothing is sampled from it. Where the data set answers prompts, also "answer_nll", the student's
        loss per token on these answers."""
        before = self.metrics

        def measure(found: Sequence[Rollout]) -> Metrics:
            poll()
            own = self._on(found, kit, lambda ref: self._measured(self.enrich(ref, kit), kit))
            asked = [each.request for each in found if has_answer(each.request.prompt) and not each.request.index]
            if not (asked and self.config.dataset_answers):
                return own
            nll = Objective("policy", Head(), NLL())
            told = self._on(self._answers(asked), kit, lambda ref: kit.engines["policy"].evaluate(ref, nll))
            return {**own, "answer_nll": told["loss"]}

        def on_answers(data: Dataset) -> Metrics:
            asked = [Request(f"v{data.fingerprint}_d{i}", 0, prompt, ()) for i, prompt in enumerate(data.prompts)]
            rows = run.num_prompts_per_batch
            batches = [asked[at : at + rows] for at in range(0, len(asked), rows)]
            return merge_metrics(measure(self._answers(batch)) for batch in batches)

        run = kit.config.evaluation
        if self.config.policy_samples or kit.rollouts.weights:
            measured = evaluate(kit.rollouts, kit.validation_data, run, poll, measure)
        else:
            measured = over_sets({name: on_answers(data) for name, data in kit.validation_data.items()})
        self.metrics = before
        return measured

    def _measured(self, ref: BatchRef, kit: Kit) -> Metrics:
        return {**self.metrics, **kit.engines["policy"].evaluate(ref, self._teachers.objective(kit))}

    def _on(self, rollouts: Sequence[Rollout], kit: Kit, do: Callable[[BatchRef], T]) -> T:
        """Do it with rows that are not the step's, and drop them."""
        ref, columns = rows_with_chats(rollouts)
        ref = kit.plane.put(ref, columns)
        try:
            return do(ref)
        finally:
            kit.plane.drop(ref)
