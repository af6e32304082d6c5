"""The wiring of what samples and scores completions: rewards, environment, and the generator with its own weights."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint import Arena
from surefoot.config import RunConfig, TokenizerConfig
from surefoot.config_file import algorithm_config
from surefoot.data.encode import Encoder
from surefoot.data.prepare import Dataset
from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine import lora, models
from surefoot.engine.folder import GENERATION_FILE, weights_by_name
from surefoot.engine.local import LocalEngine
from surefoot.errors import ModelError
from surefoot.generation.torch_sampler import TorchSampler
from surefoot.generation.vllm import VLLMSampler, require_vllm
from surefoot.rollout.config import RolloutAlgorithmConfig, RolloutRunConfig
from surefoot.rollout.conversations import Conversations
from surefoot.rollout.reward_model import RewardModel
from surefoot.rollout.rewards import load_rewards
from surefoot.rollout.rollouts import Rollouts
from surefoot.rollout.turns import check_turns
from surefoot.types import Generator, Sampling
from surefoot.weights import fingerprint

_log = logging.getLogger(__name__)


def longest_row(config: RunConfig) -> int:
    """Tokens of a row of the data sets: a prompt leaves room for what is sampled."""
    room = config.generation.max_new_tokens if isinstance(config, RolloutRunConfig) else 0
    return config.policy.max_total_sequence_length - room


def check_backend(config: RunConfig) -> None:
    """Raises `ConfigError` when what samples is not installed."""
    if isinstance(config, RolloutRunConfig) and config.generation.backend == "vllm":
        require_vllm()


def conversations(config: RunConfig, tokenizer: Any, opened: ExitStack) -> Conversations | None:
    """`None` where no environment is configured.

    Raises:
        ConfigError: the environment cannot be made.
        ModelError: the chat template does not suit several turns.
    """
    if not isinstance(config, RolloutRunConfig) or config.environment is None:
        return None
    longest = config.policy.max_total_sequence_length
    encoder = Encoder(tokenizer, config.data, longest)
    made = Conversations(config.environment, encoder, max_tokens=longest, seed=config.seed)
    opened.callback(made.close)
    if config.environment.max_turns > 1:
        check_turns(encoder, tokenizer, role=made.reply_role, tools=made.tools)
    return made


def rollouts(
    config: RunConfig, tokenizer: Any, conversations: Conversations | None, opened: ExitStack
) -> Rollouts | None:
    """`None` where nothing is sampled. Raises `ConfigError` when a reward function cannot be had."""
    if not isinstance(config, RolloutRunConfig):
        return None
    share = config.max_reward_failures
    named = {reward.model: f"rewards.{i}.model" for i, reward in enumerate(config.rewards) if reward.model}
    models = {model: _reward_model(model, key, config) for model, key in named.items()}
    rewards = load_rewards(config.rewards, models=models, max_reward_failures=share) if config.rewards else None
    made = Rollouts(tokenizer, rewards, conversations, seed=config.seed, max_failures=share)
    opened.callback(made.close)
    return made


def check_columns(rollouts: Rollouts | None, datasets: Iterable[Dataset]) -> None:
    """Raises `RewardError` when a reward function needs a column that a data set lacks."""
    if rollouts is not None:
        for dataset in datasets:
            rollouts.check(dataset.prompts)


def _reward_model(name: str, key: str, config: RolloutRunConfig) -> RewardModel:
    """Run as the policy is, with a tokenizer of its own. `key`: where the configuration names it. Raises `ModelError`
    when the model has no score head."""
    settings = {"model_name": name, "model_init": None, "tokenizer": TokenizerConfig(), "lora": None}
    section = config.policy.model_copy(update=settings)
    models.check_folder(section, "scalar", key)
    tokenizer = models.load_tokenizer(section)
    try:
        loaded = models.load(section, tokenizer=tokenizer, seed=None, kind="scalar")
    except ModelError as error:
        raise ModelError(f"{key}: {error}. Expected a reward model, as algorithm: rm trains one") from error
    plane = MemoryPlane()
    engine = LocalEngine(loaded.model, loaded.files, section, plane, Arena(), seed=config.seed, trained=False)
    return RewardModel(engine, plane, Encoder(tokenizer, config.data, section.max_total_sequence_length))


def generators(rollouts: Rollouts | None, config: RunConfig, policy: models.LoadedModel) -> list[Generator]:
    """What samples from the policy, connected to the rollouts: a model of its own, which weights are published to. None
    where neither a step nor validation samples from it."""
    if rollouts is None or not isinstance(config, RolloutRunConfig):
        return []
    algorithm = algorithm_config(config)
    if isinstance(algorithm, RolloutAlgorithmConfig) and not algorithm.policy_samples and not rollouts.weights:
        return []
    return [connect(rollouts, config, policy, _copy(policy), slots=num_slots(config))]


def num_slots(config: RolloutRunConfig) -> int:
    """Completions sampled at a time in a run."""
    algorithm = algorithm_config(config)
    rows = algorithm.rows_per_step if isinstance(algorithm, RolloutAlgorithmConfig) else config.generation.num_slots
    return min(config.generation.num_slots, rows)


def connect(
    rollouts: Rollouts, config: RolloutRunConfig, policy: models.LoadedModel, model: Any, *, slots: int
) -> Generator:
    """What samples from `model`, which is from here on its own: a plain one with the policy's weights.

    Args:
        slots: each step computes all of them.
    """
    section, sampler = config.generation, _sampler(config, policy.tokenizer, model, slots)
    if not sampler.exact:
        _log.warning(
            "completions depend on what else is sampled with them: a run that is killed and resumed goes on well, and "
            "not bit for bit as if it had not been killed"
        )
    sampling = Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        stop_ids=_stop_ids(config, policy),
        stop=tuple(section.stop),
    )
    rollouts.connect(sampler, sampling)
    return sampler


def lend(rollouts: Rollouts | None, config: RunConfig, tokenizer: Any, lent: Mapping[str, Any]) -> None:
    """Copies of further models, by their engines' names, answer prompts as well."""
    if rollouts is not None and isinstance(config, RolloutRunConfig):
        for name, model in lent.items():
            rollouts.lend(name, _sampler(config, tokenizer, copy.deepcopy(model), num_slots(config)))


def _sampler(config: RolloutRunConfig, tokenizer: Any, model: Any, slots: int) -> TorchSampler | VLLMSampler:
    section = config.generation
    model = model.to(dtype=_dtype(config))
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_total_sequence_length": config.policy.max_total_sequence_length,
        "slots": slots,
    }
    if section.backend == "vllm":
        return VLLMSampler(model, weights_by_name(model), kv_cache_gib=section.kv_cache_gib, **given)
    model.to(models.resolve_device(config.policy.device))
    return TorchSampler(model, weights_by_name(model), exact=section.exact, **given)


def checksum(config: RunConfig) -> Callable[[Mapping[str, Tensor]], str]:
    """What a generator says of weights once it has them."""
    dtype = _dtype(config) if isinstance(config, RolloutRunConfig) else torch.float32
    return lambda weights: fingerprint({name: tensor.to(dtype) for name, tensor in weights.items()})


def _dtype(config: RolloutRunConfig) -> torch.dtype:
    return torch.bfloat16 if (config.generation.precision or config.policy.precision) == "bfloat16" else torch.float32


def _copy(policy: models.LoadedModel) -> Any:
    """A plain model with the policy's weights, an adapter merged in; names are those that the engine publishes."""
    if policy.adapter is None:
        return copy.deepcopy(policy.model)
    return lora.merge(copy.deepcopy(policy.adapter))


def _stop_ids(config: RunConfig, policy: models.LoadedModel) -> tuple[int, ...]:
    """What ends a turn for the tokenizer, for its chat template, and for the model's own generation settings."""
    named = json.loads(policy.base_files.get(GENERATION_FILE, b"{}")).get("eos_token_id")
    own = named if isinstance(named, list) else [named]
    found = [*Encoder(policy.tokenizer, config.data, 1).stop_ids(), *(i for i in own if isinstance(i, int))]
    return tuple(dict.fromkeys(found))
