"""What a model can do, measured on what was held out from all training: before, with the very weights that a run begins
with; after, with the folder in its last checkpoint, by Transformers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from surefoot.demo import task

Kind: TypeAlias = Literal["causal_lm", "scalar"]

SAMPLED = "sampled answers right"
GREEDY = "most likely answers right"
GUESSES = "right scored above a guess"
SLIPS = "right scored above a slip"


class Heldout(NamedTuple):
    """`guesses`, `slips`: preferences of the rows' sums, right against wrong ones of two kinds."""

    rows: Sequence[task.Row]
    guesses: Sequence[task.Row]
    slips: Sequence[task.Row]
    seed: int


def first_model(config_file: Path, kind: Kind = "causal_lm") -> tuple[Any, Any]:
    """The model, with the weights that a run of this configuration begins with, and its tokenizer."""
    import torch
    from transformers.utils import logging

    from surefoot.config_file import load_config
    from surefoot.engine import models

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = load_config(config_file)
    tokenizer = models.load_tokenizer(config.policy)
    return models.load(config.policy, tokenizer=tokenizer, seed=config.seed, kind=kind).model, tokenizer


def last_model(weights: Path, kind: Kind = "causal_lm") -> tuple[Any, Any]:
    """A checkpoint's weights are a plain Hugging Face folder: nothing of Surefoot is needed to use them."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    auto: Any = AutoModelForCausalLM if kind == "causal_lm" else AutoModelForSequenceClassification
    return auto.from_pretrained(weights), AutoTokenizer.from_pretrained(weights)


def answers(model: Any, tokenizer: Any, heldout: Heldout) -> Mapping[str, float]:
    """Shares of held-out sums that are right: drawn from the model's distribution, and most likely under it."""
    sampled = task.sampled_answers(model, tokenizer, heldout.rows, heldout.seed)
    greedy = task.greedy_answers(model, tokenizer, heldout.rows)
    return {SAMPLED: task.exact_match(sampled, heldout.rows), GREEDY: task.exact_match(greedy, heldout.rows)}


def scores(model: Any, tokenizer: Any, heldout: Heldout) -> Mapping[str, float]:
    """Shares of held-out pairs whose right side has the higher score, under a model with one label."""
    return {GUESSES: _wins(model, tokenizer, heldout.guesses), SLIPS: _wins(model, tokenizer, heldout.slips)}


def _wins(model: Any, tokenizer: Any, pairs: Sequence[task.Row]) -> float:
    right, wrong = (task.scores(model, tokenizer, pairs, side) for side in ("chosen", "rejected"))
    return sum(a > b for a, b in zip(right, wrong, strict=True)) / len(pairs)
