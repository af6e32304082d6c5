from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.project import ONE_CASE, Project
from tests.helpers import runs
from tests.helpers.fork_server import ForkServer
from tests.helpers.memory_path import memory_path, memory_path_of_session
from tests.helpers.mounts import can_mount

__all__ = ["can_mount", "memory_path", "memory_path_of_session"]


@pytest.fixture(scope="session", params=runs.CASES)
def every_project(request: pytest.FixtureRequest, memory_path_of_session: Path) -> Project:
    """A project of each case in turn, with its straight run done."""
    return Project.made(memory_path_of_session, request.param)


@pytest.fixture(scope="session")
def project(memory_path_of_session: Path) -> Project:
    """One project, for what does not depend on the case."""
    return Project.made(memory_path_of_session, ONE_CASE)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
