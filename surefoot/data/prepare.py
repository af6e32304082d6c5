"""Prepares a data set before anything heavy starts: every row is read, checked, rendered, tokenized and masked, so that
all that is wrong with the data is known, and said, before a model is loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from surefoot.config import DataConfig, DatasetConfig
from surefoot.data.datasets import read
from surefoot.data.encode import Encoded, Encoder, EncodingOptions
from surefoot.data.rows import BadRow, Row, RowChecker, RowError
from surefoot.data.workers import encode_chunks
from surefoot.errors import DataError, ModelError

_log = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
_CHUNK_ROWS = 256
_LISTED = 10


@dataclass(frozen=True)
class Counts:
    """What became of a file's rows.

    Attributes:
        rows: rows read.
        kept: sequences to train on; a chat whose template rewrites earlier turns gives several.
        split: chats that gave several.
        dropped: sequences or rows without anything to train, by reason.
        skipped: bad rows left out (`on_bad_row: skip`), by reason.
        truncated: sequences that were cut at the length limit.
        longest: tokens of the longest sequence, before cutting.
        tokens, trained_tokens: of what is kept.
    """

    rows: int
    kept: int
    split: int
    dropped: dict[str, int]
    skipped: dict[str, int]
    truncated: int
    longest: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """Token sequences and their loss masks, in file order, in flat arrays.

    Attributes:
        name: the path as configured.
        tokens: int32 [all tokens].
        trained: bool [all tokens].
        offsets: int64 [sequences + 1]; sequence i is tokens[offsets[i]:offsets[i + 1]].
        row_index: int64 [sequences]; the row in the file each comes from, counted from 0.
        fingerprint: of tokens, masks and row indices. These follow from the rows and from every option of the encoding,
            so a change of either that makes a difference changes it, and moving the file does not.
    """

    name: str
    tokens: Tensor
    trained: Tensor
    offsets: Tensor
    row_index: Tensor
    counts: Counts
    fingerprint: str

    def __len__(self) -> int:
        return len(self.row_index)

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
        parts = [f"{self.name}: {c.kept} of {c.rows} rows, {c.tokens} tokens, {c.trained_tokens} of them trained"]
        parts += [f"{c.split} chats split by turn"] if c.split else []
        parts += [f"{c.truncated} cut at the length limit (longest: {c.longest} tokens)"] if c.truncated else []
        parts += [f"{_reasons(c.dropped)} dropped"] if c.dropped else []
        parts += [f"{_reasons(c.skipped)} skipped"] if c.skipped else []
        return "; ".join(parts)


def prepare(
    config: DatasetConfig, data: DataConfig, tokenizer: Any, max_length: int, progress: Progress | None = None
) -> Dataset:
    """Read and encode a whole data set.

    Args:
        tokenizer: a Hugging Face fast tokenizer whose `chat_template` is the one to use.
        max_length: tokens of a row; the rest is cut off at the right.
        progress: called now and then with the rows done and their number (`None`: not known).

    Raises:
        DataError: the file cannot be read, rows are bad, or nothing is left to train on.
        ModelError: the tokenizer does not fit the rows.
    """
    options = encoding_options(data, tokenizer, max_length)
    encoder = Encoder(options)
    as_chat = data.prompt_format == "chat" or (data.prompt_format == "auto" and options.chat_template is not None)
    checker = RowChecker(config.columns, as_chat=as_chat)
    raw, total = read(config)
    bad: list[BadRow] = []
    out, done = Encoded(), 0

    def chunks() -> Iterator[list[Row]]:
        chunk: list[Row] = []
        for row in raw:
            try:
                if isinstance(row.value, BadRow):
                    bad.append(row.value)
                else:
                    chunk.append(checker.check(row.index, row.where, row.value))
            except RowError as error:
                bad.append(BadRow(row.index, row.where, error.reason, error.detail))
            if len(chunk) == _CHUNK_ROWS:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    with closing(encode_chunks(chunks(), options, encoder, data.num_workers)) as results:
        for rows, encoded in results:
            out.extend(encoded)
            done += rows
            if progress is not None:
                progress(done + len(bad), total)
    if progress is not None:
        progress(done + len(bad), done + len(bad))
    dataset = _assemble(config, out, done + len(bad), sorted(bad + out.bad, key=lambda row: row.index))
    _warn_of_what_has_no_effect(config, data, checker, options.chat_template)
    return dataset


def _warn_of_what_has_no_effect(
    config: DatasetConfig, data: DataConfig, checker: RowChecker, template: str | dict[str, str] | None
) -> None:
    if not checker.saw_chats and (data.system_prompt is not None or data.fold_system):
        _log.warning("%s: no row is a chat: data.system_prompt and data.fold_system have no effect", config.path)
    if checker.saw_tools and "tools" not in str(template):
        _log.warning("%s: rows have tools, which the chat template never mentions: no model sees them", config.path)


def encoding_options(data: DataConfig, tokenizer: Any, max_length: int) -> EncodingOptions:
    """All that decides the tokens of a row, as plain data.

    Raises:
        ModelError: the tokenizer is not a fast one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__}: expected a fast tokenizer (one with a tokenizer.json), found a slow one"
        )
    return EncodingOptions(
        tokenizer=backend.to_str(),
        special_tokens=dict(tokenizer.special_tokens_map),
        chat_template=tokenizer.chat_template,
        last_answer_only=data.train_on == "last_assistant",
        system_prompt=data.system_prompt,
        fold_system=data.fold_system,
        max_length=max_length,
    )


def _assemble(config: DatasetConfig, out: Encoded, rows: int, bad: list[BadRow]) -> Dataset:
    if rows == 0:
        raise DataError(f"{config.path}: expected at least one row, found none: the file is empty")
    skipped = dict(Counter(row.reason for row in bad))
    if bad and config.on_bad_row == "error":
        raise DataError(_bad_rows(config.path, bad, rows))
    if not out.rows:
        reasons = _reasons(skipped | dict(out.dropped))
        listed = [f"  {row}" for row in bad[:_LISTED]]
        raise DataError("\n".join([f"{config.path}: none of its {rows} rows can be trained on: {reasons}", *listed]))
    lengths = [len(ids) for ids in out.ids]
    tokens, trained = np.concatenate(out.ids), np.concatenate(out.mask)
    row_index = np.array(out.rows, np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    digest = xxhash.xxh3_128()
    for array in (tokens, trained, offsets, row_index):
        digest.update(array.tobytes())
    counts = Counts(
        rows=rows,
        kept=len(out.rows),
        split=out.split,
        dropped=dict(out.dropped),
        skipped=skipped,
        truncated=out.truncated,
        longest=out.longest,
        tokens=len(tokens),
        trained_tokens=int(trained.sum()),
    )
    flat = [torch.from_numpy(array) for array in (tokens, trained, offsets, row_index)]
    dataset = Dataset(config.path, flat[0], flat[1], flat[2], flat[3], counts, digest.hexdigest())
    if counts.dropped or counts.skipped:
        _log.warning("%s", dataset.description)
        for row in bad[:_LISTED]:
            _log.warning("skipped %s", row)
    return dataset


def _bad_rows(path: str, bad: list[BadRow], rows: int) -> str:
    lines = [f"{path}: {len(bad)} of {rows} rows cannot be used:"]
    lines += [f"  {row}" for row in bad[:_LISTED]]
    lines += [f"  and {len(bad) - _LISTED} more"] if len(bad) > _LISTED else []
    lines += [f"by reason: {_reasons(dict(Counter(row.reason for row in bad)))}"]
    return "\n".join([*lines, "mend these rows, or set `on_bad_row: skip` to leave them out and count them"])


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} × {reason}" for reason, number in counts.items())
