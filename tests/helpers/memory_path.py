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
    yield from _in_memory(tmp_path)


@pytest.fixture(scope="session")
def memory_path_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, one for all tests: for what is made once and then only read."""
    yield from _in_memory(tmp_path_factory.mktemp("session"))


def _in_memory(otherwise: Path) -> Iterator[Path]:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield otherwise
        return
    directory = Path(tempfile.mkdtemp(prefix="surefoot-test-", dir=shared))
    yield directory
    shutil.rmtree(directory)
