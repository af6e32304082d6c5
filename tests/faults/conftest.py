from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.config_file import algorithm_names
from tests.faults.project import Project
from tests.helpers.fork_server import ForkServer
from tests.helpers.memory_path import memory_path, memory_path_of_session
from tests.helpers.mounts import can_mount

__all__ = ["can_mount", "memory_path", "memory_path_of_session"]


@pytest.fixture(scope="session", params=algorithm_names())
def every_project(request: pytest.FixtureRequest, memory_path_of_session: Path) -> Project:
    """A project of each algorithm in turn, with its straight run done."""
    return Project.made(memory_path_of_session, request.param)


@pytest.fixture(scope="session")
def project(memory_path_of_session: Path) -> Project:
    """One project, for what does not depend on the algorithm."""
    return Project.made(memory_path_of_session, algorithm_names()[0])


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
