"""Prepares a data set before anything heavy starts: every row is read, checked, rendered, tokenized and masked, so that
all that is wrong with the data is known, and said, before a model is loaded."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.datasets import read
from surefoot.data.encode import Encoded, Encoder, Outcome
from surefoot.data.pairs import PairChecker
from surefoot.data.prompts import Opener, PromptChecker
from surefoot.data.rows import BadRow, Checked, Prompt, RowChecker
from surefoot.data.workers import encode_chunks
from surefoot.errors import ConfigError, DataError
from surefoot.types import Rows

_log = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
_CHUNK_ROWS = 256
_LISTED = 10


@dataclass
class Counts:
    """What became of a file's rows.

    Attributes:
        rows: rows read.
        split: chats that became several sequences, because their template rewrites earlier turns; rows of preferences
            that became several pairs.
        truncated: sequences that were cut at the length limit, those dropped for it included.
        longest: tokens of the longest sequence, before cutting.
        dropped: rows, sequences or pairs without anything to train, by reason.
        skipped: bad rows left out (`on_bad_row: skip`), by reason.
    """

    rows: int
    split: int = 0
    truncated: int = 0
    longest: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Token sequences and their loss masks, in file order, in flat arrays. Of preferences, each chosen sequence is
    followed by the rejected one: sequences 2 i and 2 i + 1 are pair i.

    Attributes:
        name: the path as configured.
        tokens: int32 [all tokens].
        trained: bool [all tokens].
        offsets: int64 [sequences + 1]; sequence i is tokens[offsets[i]:offsets[i + 1]].
        row_index: int64 [sequences]; the row in the file each comes from, counted from 0.
        fingerprint: of tokens, masks and row indices. These follow from the rows and from every option of the encoding,
            so a change of either that makes a difference changes it, and moving the file does not.
        group_size: sequences that belong together: 2 of preferences, else 1.
        margins: float32 [sequences], of the pair that each belongs to; `None` where the file has none.
        sources: what kind of row each sequence comes from, where the file has a column `source`.
        prompts: the rows that the sequences were made of, where they are prompts: nothing of these is trained.
    """

    name: str
    tokens: Tensor
    trained: Tensor
    offsets: Tensor
    row_index: Tensor
    counts: Counts
    fingerprint: str
    group_size: int = 1
    margins: Tensor | None = None
    prompts: tuple[Prompt, ...] = ()
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.row_index)

    @property
    def num_groups(self) -> int:
        return len(self) // self.group_size

    @property
    def usable(self) -> str:
        """How many there are, in words: "5 usable rows", or of preferences "5 usable pairs"."""
        return f"{self.num_groups} usable {'pairs' if self.group_size == 2 else 'rows'}"

    def ids(self, i: int) -> Tensor:
        """int64 [tokens]."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]].long()

    def loss_mask(self, i: int) -> Tensor:
        """float32 [tokens]: 1 where the token is trained. The first entry is 0: nothing predicts the first token."""
        return self.trained[self.offsets[i] : self.offsets[i + 1]].float()

    @property
    def lengths(self) -> Tensor:
        """int64 [sequences]."""
        return self.offsets.diff()

    @property
    def description(self) -> str:
        """One line for people."""
        c = self.counts
        trained = int(self.trained.sum())
        kept, split = f"{len(self)} of {c.rows} rows", "chats split by turn"
        if self.group_size == 2:
            kept, split = f"{self.num_groups} pairs from {c.rows} rows", "rows of several pairs"
        of_them = "all of prompts" if self.prompts else f"{trained} of them trained"
        parts = [f"{self.name}: {kept}, {len(self.tokens)} tokens, {of_them}"]
        parts += [f"{c.split} {split}"] if c.split else []
        parts += [f"{c.truncated} cut at the length limit (longest: {c.longest} tokens)"] if c.truncated else []
        parts += [f"{_reasons(c.dropped)} dropped"] if c.dropped else []
        parts += [f"{_reasons(c.skipped)} skipped"] if c.skipped else []
        return "; ".join(parts)


def prepare(
    config: DatasetConfig,
    data: DataConfig,
    tokenizer: Any,
    max_length: int,
    progress: Progress | None = None,
    *,
    rows: Rows = "sequences",
    opener: Opener | None = None,
) -> Dataset:
    """Read and encode a whole data set.

    Args:
        tokenizer: a Hugging Face fast tokenizer whose `chat_template` is the one to use.
        max_length: tokens of a row; the rest is cut off at the right. Longer prompts are dropped.
        progress: called now and then with the rows done and their number.
        rows: what the file's rows are; pairs are preferences.
        opener: of prompts, what makes chats of them, where something does.

    Raises:
        DataError: the file cannot be read, rows are bad, or nothing is left to train on.
        ModelError: the tokenizer does not fit the rows.
    """
    encoder = Encoder(tokenizer, data, max_length)
    template = tokenizer.chat_template
    as_chat = data.prompt_format == "chat" or (data.prompt_format == "auto" and template is not None)
    checker: RowChecker
    if rows == "pairs":
        checker = PairChecker(config.columns, as_chat=as_chat, ranking=data.ranking)
    elif rows == "prompts":
        checker = PromptChecker(config.columns, as_chat=as_chat, opener=opener)
    else:
        checker = RowChecker(config.columns, as_chat=as_chat)
    raw, total = read(config) if config.format != "environment" else _made(config, opener)
    outcomes: list[Outcome] = []
    with closing(encode_chunks(_chunks(raw, checker), encoder, data.num_workers)) as results:
        for encoded in results:
            outcomes += encoded
            if progress is not None:
                progress(len(outcomes), total)
    dataset = _assemble(config, outcomes, max_length, group_size=2 if rows == "pairs" else 1)
    if checker.missing:
        ours, theirs = next(iter(checker.missing.items()))
        raise DataError(
            f"{config.path}: columns names {theirs!r} for {ours!r}, and none of {len(outcomes)} rows has such a key: "
            "name another, or leave it out"
        )
    if not checker.saw_chats and (data.system_prompt is not None or data.fold_system):
        _log.warning("%s: no row is a chat: data.system_prompt and data.fold_system have no effect", config.path)
    if checker.saw_tools and "tools" not in str(template):
        _log.warning("%s: rows have tools, which the chat template never mentions: no model sees them", config.path)
    return dataset


def _made(config: DatasetConfig, opener: Opener | None) -> tuple[Iterator[tuple[str, Any]], int]:
    """Rows of an environment's own making. Raises `ConfigError` where it makes none."""
    if opener is None or config.max_rows is None:
        missing = "max_rows, for how many rows to make" if opener is not None else "an environment that makes the rows"
        raise ConfigError(f"{config.path}: format environment needs {missing}")
    made = opener.rows(config.max_rows, config.path)
    return ((f"{config.path} row {i}", row) for i, row in enumerate(made)), len(made)


def _chunks(raw: Iterator[tuple[str, Any]], checker: RowChecker) -> Iterator[list[Checked]]:
    while some := list(islice(raw, _CHUNK_ROWS)):
        yield [checker.check(where, value) for where, value in some]


def _assemble(config: DatasetConfig, outcomes: list[Outcome], max_length: int, group_size: int) -> Dataset:
    bad = [outcome for outcome in outcomes if isinstance(outcome, BadRow)]
    counts = Counts(len(outcomes), skipped=dict(Counter(row.reason for row in bad)))
    dropped: Counter[str] = Counter()
    kept: list[Encoded] = []
    rows: list[int] = []
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, BadRow):
            continue
        counts.split += len(outcome) > group_size
        dropped["no assistant turn to train" if group_size == 1 else "all ranks tied"] += not outcome
        for start in range(0, len(outcome), group_size):
            group = outcome[start : start + group_size]
            counts.longest = max(counts.longest, *(sequence.length for sequence in group))
            counts.truncated += sum(len(sequence.ids) < sequence.length for sequence in group)
            reason = _nothing_to_learn(group, max_length)
            if reason:
                dropped[reason] += 1
            else:
                kept += group
                rows += [index] * group_size
    counts.dropped = dict(+dropped)
    listed = _refuse_or_list(config, bad, counts, len(kept))
    tokens = np.concatenate([sequence.ids for sequence in kept])
    trained = np.concatenate([sequence.mask for sequence in kept])
    offsets = np.cumsum([0, *(len(sequence.ids) for sequence in kept)], dtype=np.int64)
    arrays: list[npt.NDArray[Any]] = [tokens, trained, offsets, np.array(rows, np.int64)]
    margins = [sequence.margin for sequence in kept if sequence.margin is not None]
    if margins:
        arrays.append(np.array(margins, np.float32))
    prompts = tuple(sequence.prompt for sequence in kept if sequence.prompt is not None)
    sources = tuple(sequence.source for sequence in kept) if any(sequence.source for sequence in kept) else ()
    digest = xxhash.xxh3_128(json.dumps([[p.tools, p.columns] for p in prompts]).encode() if prompts else b"")
    digest.update(json.dumps(sources).encode() if sources and not prompts else b"")
    for array in arrays:
        digest.update(array.tobytes())
    flat = [torch.from_numpy(array) for array in arrays]
    fingerprint, last = digest.hexdigest(), flat[4] if margins else None
    dataset = Dataset(
        config.path, flat[0], flat[1], flat[2], flat[3], counts, fingerprint, group_size, last, prompts, sources
    )
    if counts.dropped or counts.skipped:
        _log.warning("%s", "\n".join([dataset.description, *listed]))
    return dataset


def _nothing_to_learn(group: Sequence[Encoded], max_length: int) -> str:
    """Why a sequence, or a pair of them, could not change a model; empty where it can."""
    if group[0].prompt is not None:
        if group[0].length > max_length:
            return f"prompt of more than {max_length} tokens, the room that generation.max_new_tokens leaves"
        return "" if group[0].length else "prompt without tokens"
    within = f" within {max_length} tokens" if any(s.length > max_length for s in group) else ""
    if not all(sequence.mask.any() for sequence in group):
        return f"nothing to train{within}"
    same = len(group) == 2 and np.array_equal(group[0].ids, group[1].ids)
    return f"both sides the same{within}" if same else ""


def _refuse_or_list(config: DatasetConfig, bad: list[BadRow], counts: Counts, num_kept: int) -> list[str]:
    """Lines that name the first bad rows, where it is possible and permitted to go on without them."""
    listed = [f"  {row}" for row in bad[:_LISTED]] + [f"  and {len(bad) - _LISTED} more"] * (len(bad) > _LISTED)
    if counts.rows == 0:
        raise DataError(f"{config.path}: expected at least one row, found none: the file is empty")
    if bad and config.on_bad_row == "error":
        head = f"{config.path}: {len(bad)} of {counts.rows} rows cannot be used:"
        advice = "mend these rows, or set `on_bad_row: skip` to leave them out and count them"
        raise DataError("\n".join([head, *listed, f"by reason: {_reasons(counts.skipped)}", advice]))
    if num_kept == 0:
        reasons = _reasons(counts.skipped | counts.dropped)
        head = f"{config.path}: none of its {counts.rows} rows can be trained on: {reasons}"
        raise DataError("\n".join([head, *listed]))
    return listed


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} × {reason}" for reason, number in counts.items())
