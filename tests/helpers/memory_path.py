"""A temporary directory in memory, for tests that sync a great many files. Imported by a folder's conftest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where the system has such a place, else an ordinary `tmp_path`."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="surefoot-test-", dir=shared))
    yield directory
    shutil.rmtree(directory)
