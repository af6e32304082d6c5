"""The teachers of cross-tokenizer distillation: what each says of the rows of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.algorithms._cross_reader import reader
from surefoot.algorithms._teachers import Teachers, chosen
from surefoot.alignment import align_rows
from surefoot.data.encode import Encoder
from surefoot.data.retokenize import Retold, same_tokens
from surefoot.data.rows import RowError
from surefoot.data.token_bytes import TokenBytes
from surefoot.losses.cross_tokenizer import CrossTokenizerLoss, chunk_columns, no_chunks
from surefoot.types import BatchRef, Head, Kit, Metric, Objective

if TYPE_CHECKING:
    from surefoot.algorithms.cross_tokenizer import CrossTokenizerConfig

_log = logging.getLogger(__name__)


class CrossTeachers(Teachers):
    """Of each teacher, rows get the columns that `CrossTokenizerLoss` reads; "<name>/likelihood" [rows], as
    `Teachers._likelihoods` has it; and where the teacher reads it "<name>/input_ids", the row in its own tokens.

    Attributes:
        ce_scale: of the cross-entropy, besides its weight.
        tokenizers, templates: a fingerprint of each one's tokenizer, and of its chat template.
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
        names, config = self._config.names, self._config
        self._readers = {name: reader(name, self.head, student, config, kit) for name in names}
        self.tokenizers = {name: each.tokenizer for name, each in self._readers.items()}
        self.templates = {name: each.template for name, each in self._readers.items()}

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
        return Objective(
            "policy", Head(loss.outputs, config.temperature, known_only=True, function=loss.function), loss
        )

    def _likelihoods(self, name: str, ref: BatchRef, kit: Kit) -> Tensor:
        columns: Any = kit.plane.get(ref, [f"{name}/likelihood"])
        return torch.as_tensor(columns[f"{name}/likelihood"])
