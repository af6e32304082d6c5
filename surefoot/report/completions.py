"""`completions/`: what was sampled and how it was judged, one Parquet file per step; a few are shown as the run goes.

A file has one row per completion: its columns as they come, numbers as numbers, with NaN (all reward functions
abstained) as null. Files of steps behind a resumed checkpoint are set aside, as lines of `metrics.jsonl` are.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from surefoot.report.metrics_file import explained, sync_folder
from surefoot.types import Column, Columns

_log = logging.getLogger(__name__)

Show = Callable[[int, Mapping[str, Mapping[str, Any]]], None]


class Completions:
    """Nothing is on disk before the first step. `write` and `cut` raise `StorageFailed`, which names the file.

    Attributes:
        show: is told each step's rollouts with the highest and the lowest reward, as "best" and "worst"; of equals, the
            one with the highest, or the lowest, advantage. Answers that are not the policy's are left aside.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._unsynced: deque[Path] = deque()
        self.show: Show = lambda step, rollouts: None

    def write(self, step: int, columns: Columns) -> None:
        """`columns`: texts and numbers, `reward` among them, one entry per row."""
        import pyarrow.parquet as pq

        rows = rows_of(columns)
        path = self._folder / f"step_{step}.parquet"
        with explained("write", path):
            self._folder.mkdir(exist_ok=True)
            partial = path.with_suffix(".tmp")
            pq.write_table(parquet_table(columns), partial)
            partial.replace(path)
        self._unsynced.append(path)
        judged = sorted(own_rows(rows), key=lambda row: (row["reward"], row.get("advantage") or 0), reverse=True)
        if judged:
            self.show(step, {"best": judged[0], "worst": judged[-1]} if len(judged) > 1 else {"best": judged[0]})

    def sync(self) -> None:
        """What is written by now is on disk when this returns. May be called from any thread; raises `OSError`."""
        if self._unsynced:
            while self._unsynced:
                with suppress(FileNotFoundError), self._unsynced.popleft().open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(self._folder)

    def cut(self, step: int) -> None:
        """Go on after `step`: files of later steps are moved to `completions.after_step_<step>.<k>/`."""
        with explained("set files aside in", self._folder):
            later = [file for file in self._folder.glob("step_*.parquet") if _step_of(file) > step]
            if not later:
                return
            names = (self._folder.with_name(f"{self._folder.name}.after_step_{step}.{k}") for k in count(1))
            aside = next(path for path in names if not path.exists())
            aside.mkdir()
            for file in later:
                file.rename(aside / file.name)
            sync_folder(aside)
            sync_folder(self._folder)
        _log.info("%s: what came after step %d is set aside in %s", self._folder, step, aside.name)


def own_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that the policy itself sampled, with a reward."""
    return [row for row in rows if row["reward"] is not None and row.get("answered_by", "policy") == "policy"]


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """One mapping for each row; None in place of NaN."""
    plain = {name: _plain(column) for name, column in columns.items()}
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


def parquet_table(columns: Columns) -> Any:
    """Made by way of JSON: of Python lists, pyarrow would import pandas first, if that is installed."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    def kind(column: Column) -> Any:
        if isinstance(column, list):
            return pa.string()
        return {"torch.bool": pa.bool_(), "torch.int64": pa.int64()}.get(str(column.dtype), pa.float64())

    schema = pa.schema([(name, kind(column)) for name, column in columns.items()])
    text = "".join(json.dumps(row) + "\n" for row in rows_of(columns)).encode()
    return arrow_json.read_json(
        io.BytesIO(text),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=arrow_json.ParseOptions(explicit_schema=schema),
    )


def _step_of(file: Path) -> int:
    number = file.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def _plain(column: Column) -> list[Any]:
    values = column if isinstance(column, list) else column.tolist()
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]
