"""One teacher of cross-tokenizer distillation: how its tokens correspond to the student's, and what it says of rows."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.alignment import Tokens, align, one_to_one
from surefoot.checkpoint import TensorCache, cache_home
from surefoot.data.retokenize import Retokenizer, Retold
from surefoot.data.rows import Prompt
from surefoot.data.token_bytes import TokenBytes
from surefoot.data.vocabularies import VocabularyMap, map_vocabulary
from surefoot.errors import ModelError, NonFiniteError
from surefoot.losses.cross_tokenizer import Spans, Target
from surefoot.types import BatchRef, Head, Kit, Metric, Metrics

_log = logging.getLogger(__name__)

PROBED_TEXTS = 256
FAR_ABOVE = 10.0  # times the student's perplexity
Summary = Callable[[Target, Tensor, Spans], Target]  # of tokens' distributions, with their own log-probs, to chunks'


@dataclass
class CrossTeacher:
    """
    Attributes:
        name: of its engine and columns. `model`: for people. `student`: the student's tokens.
        retokenize: `None` where its tokenizer is the student's: then it reads the student's own rows, and each token is
            a chunk.
        head: what it puts out, on completions alone.
        summary: what a chunk of several tokens comes to.
        metrics: of the rows that columns were last made for.
    """

    name: str
    model: str
    student: TokenBytes
    retokenize: Retokenizer | None
    head: Head
    summary: Summary
    metrics: Metrics = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def columns(
        self, ref: BatchRef, prompts: Sequence[Prompt], kit: Kit
    ) -> tuple[dict[str, list[Tensor]], list[float]]:
        """What the loss reads of this teacher: "chunk", "ids", "logprobs" and "rest" of each row; and how likely it
        finds each row's completion: the mean log-prob per byte, or -inf for a row that is dropped.

        Raises:
            NonFiniteError: the teacher puts out NaN or infinity; names the row.
        """
        columns: Any = kit.plane.get(ref, ["input_ids", "loss_mask"])
        places = [mask.nonzero()[:, 0] for mask in columns["loss_mask"]]
        completions = [ids[at].tolist() for ids, at in zip(columns["input_ids"], places, strict=True)]
        given = zip(prompts, completions, columns["input_ids"], columns["loss_mask"], strict=True)
        retold = [self._retold(*row) for row in given]
        kept = [i for i, row in enumerate(retold) if isinstance(row, Retold)]
        rows = [row for row in retold if isinstance(row, Retold)]
        self._count(retold, ref)
        sides = Tokens.of([row.student_ends for row in rows]), Tokens.of([row.ends for row in rows])
        chunks = align(*sides)
        ours = dict(zip(kept, torch.split(chunks.first, [len(row.student_ends) for row in rows]), strict=True))
        theirs = torch.split(chunks.second, [len(row.ends) for row in rows])
        total = int(chunks.counts.sum())
        share = one_to_one(*sides, chunks) / max(total, 1)
        self.metrics = {**self.metrics, f"one_to_one/{self.name}": Metric(share, float(total))}
        said = self._said([ref.ids[i] for i in kept], rows, kit)
        found = [self._blank(length) for length in ref.lengths]
        likelihoods = [-torch.inf] * len(ref)
        for i, row, out, numbers in zip(kept, rows, said, theirs, strict=True):
            likelihoods[i] = float(out["logprobs"].sum()) / max(int(row.ends.max()), 1)
            self._fill(found[i], places[i], ours[i], out, numbers)
        return {part: [row[part] for row in found] for part in self._blank(0)}, likelihoods

    def _blank(self, length: int) -> dict[str, Tensor]:
        """A row's columns where it has no chunks."""
        k = self.head.k
        return {
            "chunk": torch.zeros(length, dtype=torch.int64),
            "ids": torch.zeros(length, k, dtype=torch.int64),
            "logprobs": torch.zeros(length, k),
            "rest": torch.zeros(length),
        }

    def _fill(
        self, row: dict[str, Tensor], places: Tensor, ours: Tensor, out: Mapping[str, Tensor], theirs: Tensor
    ) -> None:
        """`places` [completion]: its tokens in the row. `ours`, `theirs`: the chunk of each token on that side."""
        inside = theirs >= 0
        if not inside.any():
            return
        target = Target(*(out[f"topk_{part}"][inside] for part in ("ids", "logprobs", "rest")))
        target = self.summary(target, out["logprobs"][inside], Spans.of(theirs[inside]))
        row["chunk"][places] = ours + 1
        first = places[Spans.of(ours[ours >= 0]).first]
        row["ids"][first], row["logprobs"][first], row["rest"][first] = target.ids, target.logprobs, target.rest

    def _retold(self, prompt: Prompt, completion: Sequence[int], ids: Tensor, mask: Tensor) -> Retold | str:
        if self.retokenize is not None:
            return self.retokenize(prompt, completion)
        ends = torch.from_numpy(self.student.ends(completion))
        return Retold(ids, mask, ends, ends, 0) if completion else "an empty completion"

    def _said(self, names: Sequence[str], rows: Sequence[Retold], kit: Kit) -> list[dict[str, Tensor]]:
        """The outputs on each row's completion. The rows are the teacher's own, under ids of their own."""
        if not rows:
            return []
        ids = tuple(f"{self.name}:{name}" for name in names)
        lengths = tuple(len(row.ids) for row in rows)
        ref = BatchRef(ids, ids, lengths, (0,) * len(rows), frozenset())
        ref = kit.plane.put(ref, {"input_ids": [row.ids for row in rows], "loss_mask": [row.mask for row in rows]})
        try:
            with kit.phase("teacher"):
                kit.engines[self.name].infer(ref, self.head, {output: output for output in self.head.names})
            columns: Any = kit.plane.get(ref, self.head.names)
        finally:
            kit.plane.drop(ref)
        for output, values in columns.items():
            for name, value in zip(names, values, strict=True):
                if not value.isfinite().all():
                    raise NonFiniteError(
                        f"the teacher {self.model} puts out {output} that are not all finite for row {name} "
                        f"({len(value)} tokens): its weights, or policy.precision, do not suit these tokens"
                    )
        return [{output: values[i][row.mask != 0] for output, values in columns.items()} for i, row in enumerate(rows)]

    def _count(self, retold: Sequence[Retold | str], ref: BatchRef) -> None:
        reasons = Counter(row for row in retold if isinstance(row, str))
        for reason in reasons.keys() - self._told:
            self._told.add(reason)
            row = ref.ids[list(retold).index(reason)]
            _log.warning(
                "%s: row %s has %s: it is dropped for this teacher, as will be others", self.model, row, reason
            )
        cut = sum(row.cut > 0 for row in retold if isinstance(row, Retold))
        self.metrics = {
            f"dropped_rows/{self.name}": Metric(float(reasons.total()), reduce="sum"),
            f"cut_rows/{self.name}": Metric(float(cut), reduce="sum"),
        }


def warn_of_nonsense(teacher: CrossTeacher, ref: BatchRef, prompts: Sequence[Prompt], kit: Kit) -> None:
    """A teacher that finds completions of the data far less likely than the student does reads something else than was
    meant, or teaches something else. `ref`: some of these rows, with the column "student/logprobs"."""
    _, theirs = teacher.columns(ref, prompts, kit)
    columns: Any = kit.plane.get(ref, ["input_ids", "loss_mask", "student/logprobs"])
    ids, masks, logprobs = columns.values()
    rows = [i for i, found in enumerate(theirs) if found > -torch.inf]
    if not rows:
        return
    completions = [ids[i][masks[i] != 0].tolist() for i in rows]
    num_bytes = sum(len(teacher.student.read(completion)[0]) for completion in completions)
    per_token = num_bytes / sum(map(len, completions))
    ours = -sum(float((logprobs[i] * masks[i]).sum()) for i in rows) / num_bytes
    mean = -sum(theirs[i] for i in rows) / len(rows)
    if (mean - ours) * per_token > math.log(FAR_ABOVE):
        worst = min(rows, key=lambda i: theirs[i])
        retold = teacher.retokenize(prompts[worst], completions[rows.index(worst)]) if teacher.retokenize else None
        read = retold.ids if isinstance(retold, Retold) else ids[worst]
        text = kit.tokenizers[teacher.name].decode(read.tolist(), skip_special_tokens=False)
        _log.warning(
            "the teacher %s finds completions of the data far less likely than the student does (%.3g bits per byte, "
            "the student %.3g): it was trained on other chats, or for something else. It saw %r",
            *(teacher.model, mean / math.log(2), ours / math.log(2), text[:500]),
        )


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
    both = [(a, b) for a, b in zip(*sides, strict=True) if a is not None and b is not None]
    share = f"{100 * vocabulary.mapped_share:.1f} % of the student's {vocabulary.sizes[0]:,} tokens"
    if not vocabulary.same.shape[1] or (texts and not both):
        lost = [sum(text is None for text in side) for side in sides]
        raise ModelError(
            f"{model}: its tokenizer and the student's cannot be aligned: byte-identical are {share}; of {len(texts)} "
            f"texts of the data {lost[0]} are not given back by the student's tokenizer and {lost[1]} by the teacher's "
            "(it drops spaces or has unknown characters). Take a teacher whose tokenizer is byte-level or falls back "
            "to bytes"
        )
    first, second = Tokens.of([a.ends for a, _ in both]), Tokens.of([b.ends for _, b in both])
    chunks = align(first, second)
    share_of_chunks = one_to_one(first, second, chunks) / max(int(chunks.counts.sum()), 1)
    _log.info(
        "%s has another tokenizer: byte-identical are %s; on %d texts of the data %.1f %% of the chunks are one token "
        "to one, and %d texts cannot be aligned",
        *(model, share, len(texts), 100 * share_of_chunks, len(texts) - len(both)),
    )


def texts_of(prompts: Sequence[Prompt]) -> list[str]:
    """Some texts of the data: answers where rows have them, else what is asked."""
    found = [prompt.columns.get("answer") or prompt.shown for prompt in prompts[:PROBED_TEXTS]]
    return [text for text in found if isinstance(text, str) and text]


def by_row_index(data: Any) -> Mapping[int, Prompt]:
    return dict(zip(data.row_index.tolist(), data.prompts, strict=True))
