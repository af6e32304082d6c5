"""The configuration of runs whose rows are prompts: the sections they have besides every run's, and the part of their
algorithms' own sections that says what is sampled."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from surefoot.config import (
    AlgorithmConfig,
    GenerationConfig,
    NonNegativeReal,
    PositiveInt,
    Real,
    RunConfig,
    Section,
)
from surefoot.rollout.environments import EnvironmentConfig
from surefoot.rollout.reward_config import RewardConfig


class EvaluationConfig(Section):
    """How the prompts of validation sets are answered and judged.

    Attributes:
        num_generations_per_prompt: n; with several, the answer that most of a prompt's completions give is judged, too.
        pass_at_k: each k, up to n, for which pass@k is estimated, without bias; default: 1, 2, 4 … up to n.
        temperature: default: that of `generation`; 0 takes the likeliest token.
        num_prompts_per_batch: answered at a time; it changes speed, never the result.
        pass_reward: which reward says whether a completion passes; default: the row's whole reward.
        pass_threshold: a completion passes when that is at least this.
    """

    num_generations_per_prompt: PositiveInt = 1
    pass_at_k: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    temperature: NonNegativeReal | None = None
    num_prompts_per_batch: PositiveInt = 64
    pass_reward: str | None = None
    pass_threshold: Real = 1.0

    @model_validator(mode="after")
    def _enough_completions(self) -> EvaluationConfig:
        n = self.num_generations_per_prompt
        for k in self.pass_at_k or ():
            if k > n:
                raise ValueError(
                    f"pass_at_k: pass@{k} is estimated from at least {k} completions of a prompt, and "
                    f"num_generations_per_prompt is {n}"
                )
        if self.temperature == 0 and n > 1:
            raise ValueError(
                f"temperature 0 gives the same completion {n} times: expected num_generations_per_prompt 1, found {n}"
            )
        return self


class RolloutAlgorithmConfig(AlgorithmConfig):
    """What an algorithm's step samples, and how it is cut into optimizer steps.

    Attributes:
        num_prompts_per_step, num_generations_per_prompt: a step has as many rows as their product, and trains on them
            `policy.train_global_batch_size` at a time.
        num_epochs_per_step: passes over a step's rows.
        dynamic_sampling: groups whose raw rewards are all equal are left out and others drawn in their place.
        dynamic_sampling_max_gen_batches: batches of `num_prompts_per_step` prompts that a step may draw.
        dynamic_sampling_allow_fewer: when these are used up, go on with the groups found, at least one; else it is an
            error.
    """

    needs_rewards: ClassVar[bool] = True  # else they are only measured
    compares_siblings: ClassVar[bool] = True  # nothing is learned from completions of one prompt with equal rewards

    num_prompts_per_step: PositiveInt = 4
    num_generations_per_prompt: PositiveInt = 8
    num_epochs_per_step: PositiveInt = 1
    dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    dynamic_sampling_allow_fewer: bool = False

    @property
    def rows_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    def optimizer_steps(self, run: RunConfig) -> int:
        """In a step with all its rows."""
        return self.num_epochs_per_step * self.rows_per_step // run.policy.train_global_batch_size

    @property
    def policy_samples(self) -> bool:
        """Whether a step takes any completion from the policy."""
        return True

    def check(self, run: RolloutRunConfig) -> None:
        """Raises `ValueError` when this does not go with the run's other sections."""
        if (self.needs_rewards or self.dynamic_sampling) and not run.rewards and run.environment is None:
            raise ValueError("rewards: expected at least one function, or an environment that gives rewards")
        rows, per_step = self.rows_per_step, run.policy.train_global_batch_size
        if rows % per_step or per_step % self.num_generations_per_prompt:
            raise ValueError(
                f"policy.train_global_batch_size ({per_step}) must divide the {rows} rows of a step "
                f"(num_prompts_per_step {self.num_prompts_per_step} × num_generations_per_prompt "
                f"{self.num_generations_per_prompt}) and hold whole groups of {self.num_generations_per_prompt}"
            )
        if self.dynamic_sampling and self.num_generations_per_prompt == 1:
            section = run.algorithm.rpartition(".")[2]
            raise ValueError(
                f"{section}.dynamic_sampling: a group of one completion has no variance: none would be kept"
            )
        if run.generation.temperature == 0:
            raise ValueError(
                "generation.temperature: 0 always takes the same completion, and nothing is learned from that; "
                "expected a number above 0 (evaluation.temperature may be 0)"
            )


class RolloutRunConfig(RunConfig):
    """A whole run that samples completions.

    Attributes:
        rewards: functions that judge a completion. The row's reward is their weighted sum.
        environment: what opens each row and replies to the model, where rollouts have several turns or tools.
        max_reward_failures: the run stops when a function has failed on a greater share of its last 100 rows, or the
            environment on one of the last 100 rollouts.
    """

    generation: GenerationConfig = GenerationConfig()
    rewards: list[RewardConfig] = Field(default=[])
    environment: EnvironmentConfig | None = None
    max_reward_failures: Annotated[Real, Field(ge=0, le=1)] = 0.1
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _room_and_rewards(self) -> RolloutRunConfig:
        new, whole = self.generation.max_new_tokens, self.policy.max_total_sequence_length
        if new >= whole:
            raise ValueError(
                f"generation.max_new_tokens ({new}) must be below policy.max_total_sequence_length ({whole}), which "
                "holds the prompt too"
            )
        for temperature in (self.generation.temperature, self.evaluation.temperature):
            if temperature is not None:
                self.generation.check(temperature)
        if self.environment is not None and any(reward.shown_as == "environment" for reward in self.rewards):
            raise ValueError(
                'rewards: "environment" is what the environment\'s own reward is called; expected another label'
            )
        known = [reward.shown_as for reward in self.rewards] + ["environment"] * (self.environment is not None)
        if self.evaluation.pass_reward not in (None, *known):
            raise ValueError(
                f"evaluation.pass_reward: expected one of {', '.join(known)}, found {self.evaluation.pass_reward!r}"
            )
        section = getattr(self, self.algorithm.rpartition(".")[2], None)
        if isinstance(section, RolloutAlgorithmConfig):
            section.check(self)
        return self
