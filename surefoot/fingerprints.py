"""What a run is made of, as hashes to compare on a resume and words to name in a refusal."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.checkpoint import Fingerprint
from surefoot.config import AlgorithmConfig, RunConfig
from surefoot.data.prepare import Dataset
from surefoot.engine.models import LoadedModel, weights_fingerprint
from surefoot.rollout.config import RolloutRunConfig

_log = logging.getLogger(__name__)


def fingerprints(
    algorithm: str, section: AlgorithmConfig, policy: LoadedModel, dataset: Dataset
) -> dict[str, Fingerprint]:
    """Of the model's architecture, tokenizer, chat template, data set, algorithm and parallel layout."""
    config = {k: v for k, v in json.loads(policy.base_files["config.json"]).items() if k not in _COSMETIC}
    model, tokenizer = policy.model, policy.tokenizer
    size = f"hidden size {getattr(model.config, 'hidden_size', '?')}, {model.num_parameters():,} parameters"
    words = {name: data for name, data in sorted(policy.files.items()) if name.startswith(_TOKENIZER_FILES)}
    template = tokenizer.chat_template
    return {
        "model": _of(config, f"{type(model).__name__} ({size}) from {policy.source}"),
        "tokenizer": _of(
            [[name, hashlib.sha256(data).hexdigest()] for name, data in words.items()],
            f"a {type(tokenizer).__name__} of {len(tokenizer)} tokens",
        ),
        "chat_template": _of(template, "none" if template is None else f"one that begins {str(template)[:60]!r}"),
        "dataset": Fingerprint(dataset.fingerprint, dataset.description),
        "algorithm": _of(
            [algorithm, section.model_dump(mode="json", exclude=set(section.places))], f"{algorithm} with {section!r}"
        ),
        "layout": _of([1], "1 rank"),
    }


def judges(config: RunConfig) -> dict[str, Fingerprint]:
    """Of the files that a run's own reward functions and its environment are in, and of its reward models' weights, as
    "judges"; nothing where it has none. What these files import is not looked at."""
    if not isinstance(config, RolloutRunConfig):
        return {}
    paths = [reward.function for reward in config.rewards if reward.function is not None]
    paths += [config.environment.name] if config.environment is not None and "." in config.environment.name else []
    found = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for path in paths for file in _source_of(path)}
    for name in (reward.model for reward in config.rewards if reward.model is not None):
        section = config.policy.model_copy(update={"model_name": name, "model_init": None})
        found[name] = str(weights_fingerprint(section))
    return {"judges": _of(sorted(found.values()), ", ".join(found))} if found else {}


def warn_of_other_judges(saved: Mapping[str, Fingerprint], live: Mapping[str, Fingerprint]) -> None:
    """A mended reward is no reason to refuse a resume; a run that goes on with another one says so."""
    before, now = saved.get("judges"), live.get("judges")
    if before is not None and now is not None and before.hash != now.hash:
        _log.warning(
            "rewards or environment are not what they were when the checkpoint was written (%s; now %s): the run goes "
            "on with what is there now, and not as it would have",
            *(before.description, now.description),
        )


def _source_of(path: str) -> list[Path]:
    """The file of a dotted path's module, which is not imported."""
    parts = path.split(".")[:-1]
    files = (
        file
        for folder in sys.path
        for file in (Path(folder, *parts, "__init__.py"), Path(folder, *parts[:-1], f"{parts[-1]}.py"))
    )
    return [file for file in files if file.is_file()][:1]


_COSMETIC = {"_name_or_path", "transformers_version"}
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece")


def _of(value: Any, description: str) -> Fingerprint:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest()[:32], description)
