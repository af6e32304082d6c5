"""The teachers of cross-tokenizer distillation: what their tokens are of the student's, and what they say of rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.algorithms._teachers import Teachers, chosen
from surefoot.alignment import align_rows
from surefoot.checkpoint import TensorCache, cache_home
from surefoot.data.encode import Encoder, num_ids
from surefoot.data.retokenize import Retokenizer, Retold, same_tokens
from surefoot.data.rows import RowError
from surefoot.data.token_bytes import TokenBytes
from surefoot.data.vocabularies import VocabularyMap, map_vocabulary
from surefoot.engine.models import has_same_tokenizer
from surefoot.errors import ModelError
from surefoot.losses.cross_tokenizer import (
    ChunkLoss,
    CrossTokenizerLoss,
    Gold,
    Projection,
    SameVocabulary,
    chunk_columns,
    no_chunks,
)
from surefoot.types import BatchRef, Head, Kit, Metric, Objective

if TYPE_CHECKING:
    from surefoot.algorithms.cross_tokenizer import CrossTokenizerConfig

_log = logging.getLogger(__name__)

_PROBED_TEXTS = 256


@dataclass(frozen=True)
class _Reader:
    """
    Attributes:
        head: what the teacher puts out, on completions alone.
        retokenize: `None` where its tokenizer is the student's: then it reads the student's own rows, and each token is
            a chunk.
    """

    head: Head
    loss: ChunkLoss
    retokenize: Retokenizer | None


class CrossTeachers(Teachers):
    """Of each teacher, rows get the columns that `CrossTokenizerLoss` reads; "<name>/likelihood" [rows], as
    `Teachers._likelihoods` has it; and where the teacher reads it "<name>/input_ids", the row in its own tokens.

    Attributes:
        ce_scale: of the cross-entropy, besides its weight.
        tokenizers: a fingerprint of each.
    """

    _config: CrossTokenizerConfig

    def __init__(self, config: CrossTokenizerConfig) -> None:
        head = Head(("logprobs", "topk"), config.temperature, config.top_k or 0, mask="loss_mask", known_only=True)
        super().__init__(config, head)
        self.ce_scale = 1.0
        self._told = set[str]()

    def _head(self, name: str) -> Head:
        return self._readers[name].head

    def check(self, kit: Kit) -> None:
        """Raises `ModelError` when a teacher's tokenizer cannot be aligned with the student's."""
        super().check(kit)
        student = TokenBytes(kit.tokenizer, Encoder(kit.tokenizer, kit.config.data, 1).stop_ids())
        self._readers = {name: self._reader(name, student, kit) for name in self._config.names}
        readers = self._readers.items()
        self.tokenizers = {n: r.retokenize.teacher.fingerprint if r.retokenize else "the student's" for n, r in readers}

    def _reader(self, name: str, student: TokenBytes, kit: Kit) -> _Reader:
        config, teacher, tokenizer = self._config, self._config.names[name], kit.tokenizers[name]
        size = num_ids(tokenizer)
        head = replace(self.head, k=config.top_k or size, inputs=f"{name}/input_ids", mask=f"{name}/mask")
        if has_same_tokenizer(kit.tokenizer, tokenizer):
            return _Reader(head, SameVocabulary(self._form, whole=head.k == size), None)
        longest = config.specs()[name].max_length or kit.config.policy.max_total_sequence_length
        retokenize = Retokenizer(student, tokenizer, kit.config.data, longest)
        vocabulary = known_map(student, retokenize.teacher, Path(config.cache) if config.cache else None)
        prompts = kit.train_data.prompts
        texts = [prompt.columns.get("answer") or prompt.shown for prompt in prompts[:_PROBED_TEXTS]]
        report(teacher.model, vocabulary, retokenize, [text for text in texts if isinstance(text, str) and text])
        with suppress(RowError):  # of this one row
            retokenize.prompt_ids(prompts[0])  # raises when there is no chat template for chats
        if config.loss == "projection":
            matrix = (vocabulary.rows, vocabulary.columns, vocabulary.weights)
            return _Reader(head, Projection.of(self._form, *matrix, size), retokenize)
        given = config.matched_weight, config.unmatched_weight
        weights = None if given[0] is None or given[1] is None else (given[0], given[1])
        options = {"divergence": self._form, "merge": config.token_merge or "observed", "whole": head.k == size}
        return _Reader(head, Gold.of(vocabulary.same, vocabulary.sizes, weights, **options), retokenize)

    def add(self, ref: BatchRef, kit: Kit) -> BatchRef:
        self.metrics = {}
        ref = super().add(ref, kit)
        if self._config.teacher_choice == "best":
            best = torch.stack([self._likelihoods(name, ref, kit) for name in self.used]).argmax(0)
            ref = kit.plane.put(ref, {f"{name}/weight": (best == i).float() for i, name in enumerate(self.used)})
        return ref

    def _infer(self, name: str, ref: BatchRef, rows: Sequence[int], kit: Kit) -> BatchRef:
        """Each row in the teacher's own tokens, what these are of the student's, and what the teacher says of them."""
        head, loss = self._head(name), self._readers[name].loss
        retold = dict(zip(rows, self._retold(name, chosen(ref, rows), kit), strict=True))
        read = {i: row for i, row in retold.items() if row is not None}
        chunks = align_rows([row.turns for row in read.values()])
        share = chunks.one_to_one / max(chunks.num_chunks, 1)
        self.metrics = {**self.metrics, f"one_to_one/{name}": Metric(share, float(chunks.num_chunks))}
        ids, masks = [row.ids for row in read.values()], [row.mask for row in read.values()]
        own = kit.plane.put(chosen(ref, list(read)), {f"{name}/input_ids": ids, f"{name}/mask": masks})
        said = self._said(name, own, head, {output: f"{name}/{output}" for output in head.names}, kit)
        columns: Any = kit.plane.get(ref, ["loss_mask"])
        found = [no_chunks(length, head.k) for length in ref.lengths]
        for at, (i, row) in enumerate(read.items()):
            out = {output: said[f"{name}/{output}"][at][row.mask != 0] for output in head.names}
            found[i] = chunk_columns(columns["loss_mask"][i], chunks.first[at], chunks.second[at], out, loss)
        return kit.plane.put(ref, {f"{name}/{part}": [row[part] for row in found] for part in no_chunks(0, 0)})

    def _retold(self, name: str, ref: BatchRef, kit: Kit) -> list[Retold | None]:
        """What the teacher reads of each row. Where it can read nothing, that is counted, and logged once of a kind."""
        columns: Any = kit.plane.get(ref, ["chat", "input_ids", "loss_mask"])
        retokenize, found = self._readers[name].retokenize, list[Retold | None]()
        for row, chat, ids, mask in zip(ref.ids, *columns.values(), strict=True):
            try:
                found.append(retokenize(chat, ids, mask) if retokenize else same_tokens(ids, mask))
            except RowError as error:
                found.append(None)
                if error.reason not in self._told:
                    self._told.add(error.reason)
                    where = f"{self._config.names[name].model}: row {row}"
                    _log.warning("%s is dropped for this teacher, as others will be: %s", where, error)
        cut = sum(row is not None and row.cut > 0 for row in found)
        for key, count in (("dropped_rows", found.count(None)), ("cut_rows", cut)):
            self.metrics = {**self.metrics, f"{key}/{name}": Metric(float(count), reduce="sum")}
        return found

    def objective(self, kit: Kit) -> Objective:
        """For the rows last added to."""
        config, losses = self._config, {name: self._readers[name].loss for name in self.used}
        ce = {"ce_weight": config.ce_weight, "ce_scale": self.ce_scale}
        loss = CrossTokenizerLoss(losses, config.temperature, config.reduction, **ce)
        return Objective("policy", Head(loss.outputs, config.temperature, known_only=True), loss)

    def _likelihoods(self, name: str, ref: BatchRef, kit: Kit) -> Tensor:
        columns: Any = kit.plane.get(ref, [f"{name}/likelihood"])
        return torch.as_tensor(columns[f"{name}/likelihood"])


def known_map(student: TokenBytes, teacher: TokenBytes, folder: Path | None) -> VocabularyMap:
    """From the cache, or made and put there. `folder`: default: surefoot/vocabularies in the user's cache."""
    key = {"student": student.fingerprint, "teacher": teacher.fingerprint, "version": "1"}
    with TensorCache(folder or cache_home() / "surefoot" / "vocabularies", key).held() as cache:
        found = cache.read("map")
        if found is None:
            found = map_vocabulary(student, teacher).tensors()
            cache.write("map", found)
    return VocabularyMap(**found, sizes=(len(student), len(teacher)))


def report(model: str, vocabulary: VocabularyMap, retokenize: Retokenizer, texts: Sequence[str]) -> None:
    """Says how well the two tokenizers go together, on some texts of the data.

    Raises:
        ModelError: no token of the student's is one of the teacher's, or none of the texts can be aligned.
    """
    sides = [tokens.spell_all(texts) for tokens in (retokenize.student, retokenize.teacher)]
    both = [(a.ends, b.ends) for a, b in zip(*sides, strict=True) if a is not None and b is not None]
    share = f"{100 * vocabulary.mapped_share:.1f} % of the student's {vocabulary.sizes[0]:,} tokens"
    if not vocabulary.same.shape[1] or (texts and not both):
        lost = [sum(text is None for text in side) for side in sides]
        raise ModelError(
            f"{model}: its tokenizer and the student's cannot be aligned: byte-identical are {share}; of {len(texts)} "
            f"texts of the data {lost[0]} are not given back by the student's tokenizer and {lost[1]} by the teacher's "
            "(it drops spaces or has unknown characters). Take a teacher whose tokenizer is byte-level or falls back "
            "to bytes"
        )
    chunks = align_rows([both])
    _log.info(
        "%s has another tokenizer: byte-identical are %s; on %d texts of the data %.1f %% of the chunks are one token "
        "to one, and %d texts cannot be aligned",
        *(model, share, len(texts), 100 * chunks.one_to_one / max(chunks.num_chunks, 1)),
        len(texts) - len(both),
    )
