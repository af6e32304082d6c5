"""`metrics.jsonl`: one line per step, appended at once, synced with each checkpoint, cut back on resume.

Two kinds of line: `{"step": 7, "kind": "train", "epoch": 0, "rows": 56, "tokens": 4032, <metrics>, "timing": {…}}` and
`{"step": 7, "kind": "val", <metrics>}`. Outside "timing" a line is the same, bit for bit, in every run of the same
configuration. Numbers round-trip exactly; what JSON has no number for is the text "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any

import xxhash

from surefoot.errors import SurefootError

logger = logging.getLogger(__name__)

_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class MetricsFile:
    """Append-only lines of JSON. Opened by the first call that needs it.

    Attributes:
        offset: bytes of whole lines in the file.
        lines: their number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.lines = 0
        self._hash = xxhash.xxh3_128()
        self._file: FileIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, whole or not at all.

        Raises:
            SurefootError: the line cannot be written; names the path and the cause.
        """
        line = _line(record)
        file = self._opened()
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:]) or 0
        except OSError as error:
            self._drop_half_line(file)
            raise _failed("write", self.path, error) from error
        self._count(line)

    def state(self) -> dict[str, Any]:
        return {"offset": self.offset, "lines": self.lines, "xxh3": self._hash.hexdigest()}

    def sync_later(self) -> Callable[[], None]:
        """A function for another thread that syncs what is written by now, once. It holds the file open on its own, so
        it sees each failure of the disk and does not depend on when this file is closed."""
        try:
            copy = FileIO(os.dup(self._opened().fileno()), "ab")
        except OSError as error:
            raise _failed("sync", self.path, error) from error

        def sync() -> None:
            with copy:
                os.fsync(copy.fileno())

        return sync

    def cut(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Take the file back to where a checkpoint of `step` left it, or to its start where `state` is `None`.

        Later lines are moved to `metrics.after_step_<step>.<k>.jsonl`. A file that is missing, or is not the one that
        the checkpoint saw, is warned about: then the whole lines up to `step` stay.

        Raises:
            SurefootError: a file cannot be read or written.
        """
        self.close()
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            kept, later = (b"", data) if state is None else self._split(data, step, state)
            if later:
                aside = _write_aside(self.path, f"after_step_{step}", later)
                _replace(self.path, kept)
                logger.info("%s: what came after step %d is set aside in %s", self.path, step, aside.name)
        except OSError as error:
            raise _failed("cut back", self.path, error) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _split(self, data: bytes, step: int, state: Mapping[str, Any]) -> tuple[bytes, bytes]:
        kept, later = data[: state["offset"]], data[state["offset"] :]
        if xxhash.xxh3_128_hexdigest(kept) == state["xxh3"]:
            return kept, later
        logger.warning(
            "%s is not as the checkpoint of step %d left it (expected %d lines in %d bytes, found %d bytes in all): "
            "its lines up to step %d stay, the metrics before the resume may have gaps",
            *(self.path, step, state["lines"], state["offset"], len(data), step),
        )
        lines = data.splitlines(keepends=True)
        stays = [line.endswith(b"\n") and _step_of(line) <= step for line in lines]
        kept = b"".join(itertools.compress(lines, stays))
        return kept, b"".join(itertools.compress(lines, (not stay for stay in stays)))

    def _opened(self) -> FileIO:
        if self._file is not None:
            return self._file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            data = self.path.read_bytes() if self.path.exists() else b""
            whole, _, half = data.rpartition(b"\n")
            if half:
                aside = _write_aside(self.path, "half_line", half)
                logger.warning("%s ends in half a line, left by a crash: it is set aside in %s", self.path, aside.name)
                data = whole + b"\n" if whole else b""
                _replace(self.path, data)
            self._file = FileIO(self.path, "ab")
            _sync_folder(self.path.parent)
        except OSError as error:
            raise _failed("open", self.path, error) from error
        self.offset, self.lines, self._hash = 0, 0, xxhash.xxh3_128()
        self._count(data)
        return self._file

    def _count(self, data: bytes) -> None:
        self.offset += len(data)
        self.lines += data.count(b"\n")
        self._hash.update(data)

    def _drop_half_line(self, file: FileIO) -> None:
        """What comes later, such as a rescue, must find whole lines. Failing this, the next start sets it aside."""
        with contextlib.suppress(OSError):
            file.truncate(self.offset)


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = _encode(record)
    except ValueError:
        text = _encode(_without_nan(record))
    return (text + "\n").encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _step_of(line: bytes) -> int:
    """The line's step; 0, so that it stays, for a line that somebody else wrote."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError):
        return 0


def _write_aside(path: Path, label: str, data: bytes) -> Path:
    """Write to the first free `<stem>.<label>.<k><suffix>` beside `path`, on disk before this returns."""
    for k in itertools.count(1):
        aside = path.with_name(f"{path.stem}.{label}.{k}{path.suffix}")
        with contextlib.suppress(FileExistsError), aside.open("xb") as file:
            _write_synced(file, data)
            _sync_folder(path.parent)
            return aside
    raise AssertionError("unreachable")


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as file:
        _write_synced(file, data)
    fresh.replace(path)
    _sync_folder(path.parent)


def _write_synced(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failed(what: str, path: Path, error: OSError) -> SurefootError:
    return SurefootError(
        f"cannot {what} {path}: {error.strerror or error}. The run stops, since its metrics would have a gap. "
        "Make room, or make the file and its folder writable, then resume the run"
    )
