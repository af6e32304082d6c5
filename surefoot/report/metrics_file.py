"""`metrics.jsonl`: one line per step, appended at once, synced with each checkpoint, cut back on resume.

Two kinds of line: `{"step": 7, "kind": "train", "epoch": 0, "rows": 56, "tokens": 4032, <metrics>, "timing": {…}}` and
`{"step": 7, "kind": "val", <metrics>}`. Outside "timing" a line is the same, bit for bit, in every run of the same
configuration. Numbers round-trip exactly; what JSON has no number for is the text "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from surefoot.errors import StorageFailed

logger = logging.getLogger(__name__)


class MetricsFile:
    """Append-only lines of JSON. `append` and `cut` raise `StorageFailed`, which names the file and the cause."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        odd = {k: json.dumps(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
        line = (json.dumps({**record, **odd}, allow_nan=False) + "\n").encode()
        with explained("write", self.path):
            if self._file is None:
                self._file = FileIO(self.path, "ab")
            while line:
                line = line[self._file.write(line) :]

    def size(self) -> int:
        """Bytes that are written."""
        if self._file is not None:
            return self._file.tell()
        return self.path.stat().st_size if self.path.exists() else 0

    def sync(self) -> None:
        """May be called from any thread, and after `close`.

        Raises:
            OSError: what is in the file may not be on disk.
        """
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
        sync_folder(self.path.parent)

    def cut(self, step: int, size: int) -> None:
        """Take the file back to the size that it had when `step` was saved.

        Later lines are moved to `metrics.after_step_<step>.<k>.jsonl`. A file that is missing, or is not the one that
        the checkpoint saw, is warned about: then the whole lines in this size stay.
        """
        self.close()
        with explained("cut back", self.path):
            data = self.path.read_bytes() if self.path.exists() else b""
            end = data.rfind(b"\n", 0, size) + 1
            if end != size:
                logger.warning(
                    "%s is not as the checkpoint of step %d left it (no line ends at byte %d, it has %d bytes in all): "
                    "the metrics before the resume may have gaps or steps twice",
                    *(self.path, step, size, len(data)),
                )
            if end == len(data):
                return
            names = (f"{self.path.stem}.after_step_{step}.{k}{self.path.suffix}" for k in count(1))
            aside = next(path for path in map(self.path.with_name, names) if not path.exists())
            _write_synced(aside, data[end:])
            fresh = self.path.with_suffix(".tmp")
            _write_synced(fresh, data[:end])
            fresh.replace(self.path)
            sync_folder(self.path.parent)
            logger.info("%s: what came after step %d is set aside in %s", self.path, step, aside.name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder is on disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Raises `StorageFailed` in place of an `OSError`."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"cannot {what} {path}: {error.strerror or error}. The run stops, since its record would have a gap. "
            "Make room, or make the file and its folder writable, then resume the run"
        ) from error
