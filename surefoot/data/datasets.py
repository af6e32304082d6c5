"""Reads a data set row by row: JSONL, a JSON array, Parquet, a folder that `datasets` saved, or a hub name.

JSON is parsed here and not by a library, so that every bad row is known by file and line. A row that cannot be parsed
comes out as a `BadRow` and the reading goes on; a file that cannot be read at all is a `DataError`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from surefoot.config import DatasetConfig
from surefoot.data.rows import BadRow, RowError, describe
from surefoot.errors import DataError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as the file has it. `index` counts from 0; in a JSONL file it is the line number minus one."""

    index: int
    where: str
    value: Any


def read(config: DatasetConfig) -> tuple[Iterator[RawRow], int | None]:
    """The rows, and how many there are at most (`None`: not known before the end).

    Raises:
        DataError: there is no such file, or it is not in the format it should be in. Some of this shows only while the
            rows are read.
    """
    name = config.format if config.format != "auto" else _format(config.path)
    rows, total = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "folder": _folder, "hub": _hub}[name](config)
    if config.max_rows is None:
        return rows, total
    return islice(rows, config.max_rows), config.max_rows if total is None else min(total, config.max_rows)


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
    folder = path.parent
    if not folder.is_dir():
        return DataError(f"{path}: no such file, and no folder {folder}")
    names = [item.name for item in folder.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return DataError(f"{path}: no such file; " + (f"did you mean {' or '.join(close)}?" if close else f"in {folder}"))


def _file(config: DatasetConfig) -> Path:
    path = Path(config.path)
    if not path.exists():
        raise _missing(path)
    if path.is_dir():
        raise DataError(f"{path}: expected a {config.format} file, found a folder")
    if config.split is not None:
        raise DataError(f"{path}: a single file has no splits, found split: {config.split!r}; leave it out")
    return path


# -------------------------------------------------------------------------------------------------------------- JSON


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError("duplicate key", f"the key {twice!r} comes twice in one object")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _jsonl(config: DatasetConfig) -> tuple[Iterator[RawRow], int | None]:
    path = _file(config)
    try:
        with path.open("rb") as file:
            total = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return _jsonl_rows(path), total


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    """Empty lines at the end of the file are no rows; before other rows each is a bad one."""
    empty: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                empty.append(number)
                continue
            for earlier in empty:
                yield _bad(
                    earlier - 1, f"{path}:{earlier}", RowError("empty line", "expected an object, found nothing")
                )
            empty.clear()
            where = f"{path}:{number}"
            try:
                yield RawRow(number - 1, where, _parse_line(line, first=number == 1))
            except RowError as error:
                yield _bad(number - 1, where, error)


def _bad(index: int, where: str, error: RowError) -> RawRow:
    return RawRow(index, where, BadRow(index, where, error.reason, error.detail))


def _parse_line(line: bytes, *, first: bool) -> Any:
    """A byte order mark is allowed where it belongs, at the start of the file."""
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
        return _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"expected UTF-8, found the byte 0x{line[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        if text.startswith("\ufeff"):
            problem = "a byte order mark in the middle of the file (were files joined?)"
        elif error.pos >= len(text) or error.msg.startswith("Unterminated string"):
            problem = f"it ends too early, after {text[-20:]!r}"
        else:
            problem = f"{error.msg} at column {error.colno}, before {text[error.pos : error.pos + 20]!r}"
        raise RowError("invalid JSON", f"expected one JSON object: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid JSON", f"expected one JSON object: {error}") from None


def _json(config: DatasetConfig) -> tuple[Iterator[RawRow], int | None]:
    path = _file(config)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8, found another encoding at byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return _json_rows(path, text), None


def _json_rows(path: Path, text: str) -> Iterator[RawRow]:
    """Walks an array item by item, to know each one's line. What is no JSON ends it: nothing after can be trusted."""
    position, line = _skip_space(text, 0), 1
    if not text[position:]:
        return
    if text[position] != "[":
        raise DataError(
            f"{path}: expected a JSON array of objects, found {text[position : position + 20]!r}; for one object per "
            "line say `format: jsonl`"
        )
    counted, index = 0, 0
    position = _skip_space(text, position + 1)
    closed = text[position : position + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, position), position
        where = f"{path}:{line} (row {index})"
        try:
            value, position = _DECODER.raw_decode(text, position)
            yield RawRow(index, where, value)
        except RowError as error:
            raise DataError(f"{where}: {error.detail}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not valid JSON in row {index}, which begins in line {line}: {error}") from None
        index, position = index + 1, _skip_space(text, position)
        closed = text[position : position + 1] == "]"
        if not closed and text[position : position + 1] != ",":
            found = repr(text[position : position + 20]) if text[position:] else "the end of the file"
            raise DataError(f"{path}: not valid JSON after row {index - 1}: expected ',' or ']', found {found}")
        position = position if closed else _skip_space(text, position + 1)
    if text[position + 1 :].strip():
        raise DataError(f"{path}: expected nothing after the array, found {describe(text[position + 1 :].strip())}")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


# ----------------------------------------------------------------------------------------------------- Arrow, the hub


def _parquet(config: DatasetConfig) -> tuple[Iterator[RawRow], int | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _file(config)
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole Parquet file: {error}") from error

    def rows() -> Iterator[RawRow]:
        index = 0
        try:
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    yield RawRow(index, f"{path} row {index}", value)
                    index += 1
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read from row {index // 1024 * 1024} on: {error}") from error

    return rows(), file.metadata.num_rows


def _folder(config: DatasetConfig) -> tuple[Iterator[RawRow], int | None]:
    import datasets

    path = Path(config.path)
    if not path.is_dir():
        raise _missing(path)
    if not any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        files = sorted(item.name for item in path.iterdir() if item.suffix.lower() in FORMATS)
        hint = f"; it holds {', '.join(files[:5])}: name one of these" if files else ""
        raise DataError(f"{path}: expected a folder written by datasets' save_to_disk{hint}")
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library finds wrong with a file is the reason to show
        raise DataError(f"{path}: datasets cannot load this folder: {error}") from error
    return _loaded(config, loaded)


def _hub(config: DatasetConfig) -> tuple[Iterator[RawRow], int | None]:
    import datasets

    try:
        loaded = datasets.load_dataset(config.path, split=config.split)
    except Exception as error:  # network, name, split, format: the library's own words say which
        raise DataError(
            f"{config.path}: no such file or folder here, and it could not be loaded from the hub either "
            f"({type(error).__name__}: {error})"
        ) from error
    return _loaded(config, loaded)


def _loaded(config: DatasetConfig, loaded: Any) -> tuple[Iterator[RawRow], int | None]:
    name = config.path
    if isinstance(loaded, dict):
        splits = ", ".join(loaded)
        if config.split is None and len(loaded) != 1:
            raise DataError(f"{name}: expected `split:` to be one of {splits}")
        if config.split is not None and config.split not in loaded:
            raise DataError(f"{name}: found split: {config.split!r}, expected one of {splits}")
        split = config.split or next(iter(loaded))
        name, loaded = f"{name}[{split}]", loaded[split]
    elif config.format != "hub" and config.split not in (None, str(loaded.split)) and Path(name).is_dir():
        raise DataError(f"{name}: found split: {config.split!r}, but the folder holds the single split {loaded.split}")
    plain = loaded.with_format(None)
    return (RawRow(i, f"{name} row {i}", value) for i, value in enumerate(plain)), len(plain)
