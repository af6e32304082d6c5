"""One sample being made: its prompt, its random numbers, its tokens so far, and when it ends."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from surefoot.errors import ConfigError, DataError, NonFiniteError
from surefoot.generation.drawing import check_sampling
from surefoot.seeds import derive_seed
from surefoot.types import Completion, Sampling

Ends: TypeAlias = Callable[[Sequence[int]], bool]


@dataclass(eq=False)
class Request:
    """Attributes:
    limit: the most tokens that it may get.
    uniform: the next random number of this sample, in [0, 1).
    stopped: whether the text of these tokens holds a stop text, given that it did not without the last.
    slot: place in the running batch; -1 outside it.
    keys: length of the cache's part that it attends to.
    start: its prompt's keys and values, until they are in the cache; [layers, 2, heads, tokens, head_dim].
    length: tokens of the prompt and so far. Like `cancelled`, asked for every request in every turn.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    uniform: Callable[[], float]
    stopped: Ends | None
    future: Future[Completion] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    keys: int = 0
    start: Tensor | None = None
    length: int = field(init=False)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.length = len(self.prompt)
        self.future.add_done_callback(self._ended)

    def _ended(self, future: Future[Completion]) -> None:
        self.cancelled = future.cancelled()

    def add(self, token: int, logprob: float, version: int) -> bool:
        """Take a token. True when the sample is done, and handed over.

        Raises:
            NonFiniteError: the log-prob is no number.
        """
        if not math.isfinite(logprob):
            raise NonFiniteError(
                f"sampling after {self.length} tokens: the log-prob of the token drawn is {logprob}. The model's "
                "weights, or its outputs on these tokens, are not finite: lower the learning rate, or look at the model"
            )
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.length += 1
        if token in self.sampling.stop_ids or (self.stopped is not None and self.stopped(self.ids)):
            return self._finish("stop", version)
        if len(self.ids) == self.limit:
            return self._finish("length", version)
        return False

    def _finish(self, reason: Literal["stop", "length"], version: int) -> bool:
        with suppress(InvalidStateError):  # cancelled just now
            self.future.set_result(Completion(tuple(self.ids), tuple(self.logprobs), reason, version))
        return True

    def fail(self, error: BaseException) -> None:
        """Hand over an error: a copy where one can be made, since whoever waits may add a note to it."""
        own = error
        with suppress(Exception):
            own = copy.copy(error).with_traceback(error.__traceback__)
        with suppress(InvalidStateError):
            self.future.set_exception(own)


class Texts:
    """Finds stop texts in tokens, also where a text spans several. Nothing is decoded until a token comes that can be
    the last of one.

    Args:
        tokenizer: a Hugging Face tokenizer, or `None`, and then no stop text can be found.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def ends(self, stop: tuple[str, ...]) -> Ends | None:
        """Raises `ConfigError` when there is no tokenizer to find stop texts with."""
        if not stop:
            return None
        if self._tokenizer is None:
            raise ConfigError(f"sampling: stop {stop} needs a tokenizer, and this generator was given none")
        last = {text[-1] for text in stop} | {"\ufffd"}  # which stands for a part of a character
        spaces = any(character.isspace() for character in last)  # some tokenizers drop those beside a cut
        window = 2 * max(len(text.encode()) for text in stop) + 8  # a token is a byte or more, save for rare ones

        def stopped(ids: Sequence[int]) -> bool:
            if not spaces and last.isdisjoint(self._piece(ids[-1])):
                return False
            text = self._decode(ids[-window:])
            return any(end in text for end in stop)

        return stopped

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def make_request(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    group: str,
    index: int,
    texts: Texts,
    vocabulary: int,
    max_length: int,
) -> Request:
    """Checks everything that a user can get wrong.

    Args:
        vocabulary: tokens that the model has.
        max_length: of prompt and completion together.

    Raises:
        DataError: the prompt is empty, too long, or has ids that the model lacks.
        ConfigError: a sampling setting is out of range.
    """
    prompt = tuple(prompt_ids)
    check_sampling(sampling, vocabulary)
    if not prompt:
        raise DataError(f"the prompt of {group} is empty: expected at least one token to go on from")
    if len(prompt) >= max_length:
        raise DataError(
            f"the prompt of {group} has {len(prompt)} tokens, and prompt and completion together may have {max_length} "
            "(max_total_sequence_length): shorten the prompt, or raise that"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        bad = next(token for token in prompt if not 0 <= token < vocabulary)
        raise DataError(f"the prompt of {group} has the token {bad}; the model has only 0 to {vocabulary - 1}")
    return Request(
        prompt=prompt,
        sampling=sampling,
        limit=min(sampling.max_new_tokens, max_length - len(prompt)),
        uniform=random.Random(derive_seed(seed, "sample", group, index)).random,
        stopped=texts.ends(sampling.stop),
    )
