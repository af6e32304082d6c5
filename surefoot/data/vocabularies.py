"""Two vocabularies side by side: which tokens are the same bytes, and what the others are in the other one's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.data.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """From a student's tokens to a teacher's.

    Attributes:
        same: int64 [2, n]: ids of the student and of the teacher that stand for the same bytes, each id once.
        rows, columns, weights: int64, int64 and float32 [entries]: a sparse matrix [student, teacher], sorted by
            student. A token with the same bytes has its one counterpart, with weight 1; every other one shares its
            weight of 1 evenly among the tokens that the teacher writes it with. Special tokens have none, but for those
            that end a turn.
        sizes: of the two vocabularies.
    """

    same: Tensor
    rows: Tensor
    columns: Tensor
    weights: Tensor
    sizes: tuple[int, int]

    @property
    def mapped_share(self) -> float:
        """Of the student's tokens, those with a byte-identical counterpart."""
        return self.same.shape[1] / max(self.sizes[0], 1)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("same", "rows", "columns", "weights")}


def map_vocabulary(student: TokenBytes, teacher: TokenBytes) -> VocabularyMap:
    """Byte-identical tokens first; the rest by tokenizing each of the student's tokens with the teacher's tokenizer."""
    theirs = _ids_by_bytes(teacher)
    same = {i: theirs[data] for data, i in _ids_by_bytes(student).items() if data in theirs}
    if student.end_ids and teacher.end_ids:
        same[student.end_ids[-1]] = teacher.end_ids[-1]
    rest = [i for i in range(len(student)) if i not in same and i not in student.special and student.table[i]]
    written = _written([student.table[i] for i in rest], teacher)
    pieces = {i: [j] for i, j in same.items()} | dict(zip(rest, written, strict=True))
    entries = [(i, j, 1 / len(pieces[i])) for i in sorted(pieces) for j in pieces[i]]
    rows, columns, weights = zip(*entries, strict=True) if entries else ((), (), ())
    return VocabularyMap(
        torch.tensor(sorted(same.items()), dtype=torch.int64).reshape(-1, 2).t().contiguous(),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(columns, dtype=torch.int64),
        torch.tensor(weights, dtype=torch.float32),
        (len(student), len(teacher)),
    )


def _ids_by_bytes(tokens: TokenBytes) -> dict[bytes, int]:
    """The tokens that a text is made of, by their bytes. Where several have the same (a letter and the byte that it
    is), the one that the tokenizer itself writes counts, else the first."""
    found: dict[bytes, list[int]] = {}
    for i, data in enumerate(tokens.table):
        if data and i not in tokens.special and i not in tokens.end_ids:
            found.setdefault(data, []).append(i)
    twice = [data for data, ids in found.items() if len(ids) > 1]
    for data, written in zip(twice, _written(twice, tokens), strict=True):
        found[data].sort(key=lambda i: [i] != written)
    return {data: ids[0] for data, ids in found.items()}


def _written(parts: list[bytes], tokens: TokenBytes) -> list[list[int]]:
    """The tokens that write each of these bytes in the middle of a text; none where that cannot be done. What is no
    whole character is written byte by byte, where there are tokens for bytes."""
    texts = [data.decode(errors="replace") for data in parts]
    encodings = tokens.backend.encode_batch(texts, add_special_tokens=False)
    special = tokens.special.union(tokens.end_ids)
    single = {data: i for i, data in enumerate(tokens.table) if len(data) == 1 and i not in special}
    found = []
    for data, encoding in zip(parts, encodings, strict=True):
        ids = encoding.ids
        if tokens.join(ids) not in (data, b" " + data):
            ids = [single[byte] for byte in (bytes([b]) for b in data) if byte in single]
            ids = ids if len(ids) == len(data) else []
        elif tokens.join(ids) != data and tokens.table[ids[0]] == b" ":
            ids = ids[1:]  # the space that this tokenizer puts before every text
        found.append(ids)
    return found
