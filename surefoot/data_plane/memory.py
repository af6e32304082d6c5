"""Columns in this process's memory: a dictionary of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.types import BatchRef, Column, Columns, Reader, Sink, Writer

_FILES = ("rows.json", "numbers.safetensors")


class MemoryPlane:
    """Stores what it is given, without copies: a caller who writes into a tensor after `put` changes the row."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Tensor | str]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, ref: BatchRef, columns: Columns) -> BatchRef:
        for name, column in columns.items():
            if len(column) != len(ref):
                raise ValueError(f"column {name!r} has {len(column)} rows where the batch has {len(ref)}")
        for name, column in columns.items():
            for row_id, value in zip(ref.ids, column, strict=True):
                self._rows.setdefault(row_id, {})[name] = value
        return ref.with_fields(columns)

    def get(self, ref: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        return {name: _column([self._value(row_id, name) for row_id in ref.ids]) for name in fields}

    def drop(self, ref: BatchRef) -> None:
        for row_id in ref.ids:
            self._rows.pop(row_id, None)

    def _value(self, row_id: str, name: str) -> Tensor | str:
        row = self._rows.get(row_id)
        if row is None or name not in row:
            found = "the row is not here" if row is None else f"it has {', '.join(sorted(row))}"
            raise KeyError(f"row {row_id!r} has no column {name!r}: {found}")
        return row[name]

    def settle(self) -> None:
        pass

    def snapshot(self) -> Writer:
        """Live rows are few and short-lived, so they are copied outright. A column's tensors of all rows are joined
        into one, since thousands of tiny tensors would be slow to write and to check."""
        rows: list[dict[str, Any]] = []
        parts: dict[str, list[Tensor]] = {}
        for row_id, columns in self._rows.items():
            entry: dict[str, Any] = {"id": row_id, "text": {}, "shapes": {}}
            for name, value in columns.items():
                if isinstance(value, str):
                    entry["text"][name] = value
                else:
                    key = f"{name}:{str(value.dtype).removeprefix('torch.')}"
                    entry["shapes"][name] = [key, list(value.shape)]
                    parts.setdefault(key, []).append(value.detach().cpu().reshape(-1))
            rows.append(entry)
        joined = {key: torch.cat(pieces) for key, pieces in parts.items()}

        def write(sink: Sink) -> None:
            sink.json(_FILES[0], rows)
            if joined:
                sink.tensors(_FILES[1], joined)

        return write

    def restore(self, reader: Reader) -> None:
        entries = reader.json(_FILES[0])
        joined = reader.tensors(_FILES[1]) if any(entry["shapes"] for entry in entries) else {}
        taken: dict[str, int] = {}
        self._rows = {}
        for entry in entries:
            row: dict[str, Tensor | str] = dict(entry["text"])
            for name, (key, shape) in entry["shapes"].items():
                start = taken.get(key, 0)
                taken[key] = start + torch.Size(shape).numel()
                row[name] = joined[key][start : taken[key]].reshape(shape).clone()
            self._rows[entry["id"]] = row


def _column(values: list[Any]) -> Column:
    """Numbers become one tensor; text and tensors of tokens stay one entry per row."""
    if values and isinstance(values[0], Tensor) and values[0].ndim == 0:
        return torch.stack(values)
    return values
