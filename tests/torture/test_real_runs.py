"""A few of each torture, kills in every case. `python -m tests.torture` does hundreds of each in every case."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.project import ONE_CASE
from tests.helpers import runs
from tests.helpers.fork_server import ForkServer
from tests.torture import flipped_runs, moments, operations
from tests.torture.real_runs import Reference, Tally

in_every_case = pytest.mark.parametrize("reference", runs.CASES, indirect=True)
in_one_case = pytest.mark.parametrize("reference", [ONE_CASE], indirect=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, server: ForkServer, memory_path_of_session: Path) -> Reference:
    # Made anew when a worker takes over tests from another one, so its folder has a name of its own.
    folder = Path(tempfile.mkdtemp(prefix="torture_", dir=memory_path_of_session))
    return Reference.made(server, folder / request.param, request.param)


def accept(tally: Tally, at_least: int) -> None:
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.done >= at_least


@in_every_case
def test_kills_at_random_moments(server: ForkServer, reference: Reference, memory_path: Path) -> None:
    accept(moments.kill(server, reference, memory_path / "t", count=6), 6)


@in_one_case
@pytest.mark.parametrize("how", ["kill", "kill without exchange", "fail"])
def test_at_single_operations(server: ForkServer, reference: Reference, memory_path: Path, how: str) -> None:
    accept(operations.torture(server, reference, memory_path / "t", how, count=8), 8)


@in_one_case
@pytest.mark.needs_root
@pytest.mark.usefixtures("can_mount")
def test_power_cuts_at_random_moments(server: ForkServer, reference: Reference, memory_path: Path) -> None:
    accept(moments.cut_power(server, reference, memory_path / "t", count=12), 12)


@in_one_case
def test_damage_to_every_file(reference: Reference, memory_path: Path) -> None:
    files = sum(path.is_file() for path in reference.straight.glob("checkpoints/step_8/**/*"))
    accept(flipped_runs.flip(reference, memory_path / "t", count=2 * files), 2 * files)
