"""What a run is made of, as hashes to compare on a resume and words to name in a refusal."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from surefoot.checkpoint import Fingerprint
from surefoot.config import AlgorithmConfig
from surefoot.data.prepare import Dataset
from surefoot.engine.models import LoadedModel


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


_COSMETIC = {"_name_or_path", "transformers_version"}
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "spiece")


def _of(value: Any, description: str) -> Fingerprint:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest()[:32], description)
