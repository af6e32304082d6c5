"""Reads a data set row by row: JSONL, a JSON array, Parquet, a folder that `datasets` saved, or a hub name.

JSONL is parsed here and not by a library, so that every bad row is known by file and line. A row that cannot be parsed
comes out as a `RowError` and the reading goes on; a file that cannot be read at all is a `DataError`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from surefoot.config import DatasetConfig
from surefoot.data.rows import RowError, describe
from surefoot.errors import DataError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}


def read(config: DatasetConfig) -> tuple[Iterator[tuple[str, Any]], int]:
    """For each row, where it is and what it is, or a `RowError`; and how many there are.

    Raises:
        DataError: there is no such file, or it is not in the format it should be in. Some of this shows only while the
            rows are read.
    """
    try:
        name = config.format if config.format != "auto" else _format(config.path)
        if name in ("folder", "hub"):
            total, values = _datasets(config, name)
        else:
            total, values = {"jsonl": _jsonl, "json": _json, "parquet": _parquet}[name](_file(config))
    except OSError as error:
        raise DataError(f"{config.path}: cannot be read: {error}") from error
    places = (f"{config.path}:{i + 1}" if name == "jsonl" else f"{config.path} row {i}" for i in count())
    return islice(zip(places, values, strict=False), config.max_rows), min(total, config.max_rows or total)


def _format(text: str) -> str:
    path = Path(text)
    if path.is_dir():
        return "folder"
    if path.suffix.lower() in FORMATS:
        return FORMATS[path.suffix.lower()]
    if path.exists():
        raise DataError(f"{text}: expected a name ending in {', '.join(FORMATS)}; or say which it is with `format:`")
    in_a_folder = "/" in text and path.parent.is_dir()
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text) and not in_a_folder:
        return "hub"
    raise _missing(path)


def _missing(path: Path) -> DataError:
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, cutoff=0.5)
    return DataError(f"{path}: no such file" + (f"; did you mean {' or '.join(close)}?" if close else ""))


def _file(config: DatasetConfig) -> Path:
    path = Path(config.path)
    if not path.exists():
        raise _missing(path)
    if path.is_dir():
        raise DataError(f"{path}: expected a {config.format} file, found a folder")
    if config.split is not None:
        raise DataError(f"{path}: a single file has no splits, found split: {config.split!r}; leave it out")
    return path


# Each reader gives the number of rows and the rows themselves, a `RowError` in place of one that cannot be parsed.


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise RowError("duplicate key", f"the key {twice!r} comes twice in {describe(value)}")
    return value


def _jsonl(path: Path) -> tuple[int, Iterable[Any]]:
    """Empty lines at the end of the file are no rows; before other rows each is a bad one."""
    with path.open("rb") as file:
        total = max((number for number, line in enumerate(file, 1) if line.strip()), default=0)

    def lines() -> Iterator[Any]:
        with path.open("rb") as file:
            for number, line in enumerate(islice(file, total)):
                try:
                    yield _parse_line(line, "utf-8" if number else "utf-8-sig")
                except RowError as error:
                    yield error

    return total, lines()


def _parse_line(line: bytes, encoding: str) -> Any:
    try:
        text = line.decode(encoding).strip()
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"expected UTF-8, found the byte 0x{line[error.start]:02x}") from None
    if not text:
        raise RowError("empty line", "expected an object, found nothing")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        found = repr(text[error.pos : error.pos + 20]) if error.pos < len(text) else "the end of the line"
        problem = f"{error.msg} at column {error.colno}, found {found}"
        raise RowError("invalid JSON", f"expected one JSON object: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid JSON", f"expected one JSON object: {error}") from None


def _json(path: Path) -> tuple[int, Iterable[Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        rows = json.loads(text, object_pairs_hook=_unique) if text.strip() else []
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8, found another encoding at byte {error.start}") from error
    except (ValueError, RecursionError, RowError) as error:
        hint = "for one object per line say `format: jsonl`"
        raise DataError(f"{path}: expected one JSON array of objects: {error}; {hint}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a JSON array of objects, found {describe(rows)}")
    return len(rows), rows


def _parquet(path: Path) -> tuple[int, Iterable[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a whole Parquet file: {error}") from error

    def rows() -> Iterator[Any]:
        try:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: damaged, cannot be read to its end: {error}") from error

    return file.metadata.num_rows, rows()


def _datasets(config: DatasetConfig, kind: str) -> tuple[int, Iterable[Any]]:
    import datasets

    try:
        if kind == "hub":
            loaded: Any = datasets.load_dataset(config.path, split=config.split)
        else:
            loaded = datasets.load_from_disk(config.path)
    except Exception as error:  # network, name, split, format: the library's own words say which
        what = "no such file or folder here, and not a data set on the hub that can be loaded"
        what = what if kind == "hub" else "expected a folder written by datasets' save_to_disk, or a file"
        raise DataError(f"{config.path}: {what} ({type(error).__name__}: {error})") from error
    splits = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split): loaded}
    if kind == "hub" and config.split is not None:
        chosen = loaded
    elif config.split is None and len(splits) == 1:
        (chosen,) = splits.values()
    elif config.split in splits:
        chosen = splits[config.split]
    else:
        raise DataError(f"{config.path}: found split: {config.split!r}, expected one of {', '.join(splits)}")
    plain = chosen.with_format(None)
    return len(plain), plain
