"""Functions that hang, loop in C, fork, crash, print: their time limit is real, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.rollout.rewards import RewardConfig, Rewards, Scored, load_rewards
from tests.rollout import reward_samples as samples

MISBEHAVE = "tests.rollout.reward_samples.misbehave"
TIMEOUT_S = 2.0  # far above what a harmless call takes on a busy machine


def rows(folder: Path, *deeds: str) -> list[Scored]:
    return [Scored(f"e0_d0_g{i}", "p", deed, {"folder": str(folder)}) for i, deed in enumerate(deeds)]


def misbehaving() -> Rewards:
    return load_rewards([RewardConfig(function=MISBEHAVE, timeout_s=TIMEOUT_S)])


def values(folder: Path, *deeds: str) -> list[float | None]:
    with misbehaving() as rewards:
        return asyncio.run(rewards.score(rows(folder, *deeds))).values["misbehave"]


def noted(folder: Path) -> list[int]:
    """The processes that have made a note of themselves."""
    return [int(file.stem) for file in folder.glob("*.pid")]


def running(pid: int) -> bool:
    """A zombie that its parent has yet to reap is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    while any(map(running, pids)):
        time.sleep(0.05)


@pytest.mark.parametrize("deed", ["sleep", "loop in C", "ignore signals", "fork and hang"])
def test_a_call_that_hangs_is_ended(deed: str, tmp_path: Path) -> None:
    with misbehaving() as rewards:
        found = asyncio.run(rewards.score(rows(tmp_path, deed)))
        assert found.values["misbehave"] == [None] and found.failures == {"misbehave": 1}
        assert len(noted(tmp_path)) == (3 if deed == "fork and hang" else 1)
        assert not any(map(running, noted(tmp_path))), "something is left although the call is over"


def test_only_the_row_that_hangs_abstains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with misbehaving() as rewards:
        found = asyncio.run(rewards.score(rows(tmp_path, "fine", "sleep", "fine")))
        assert found.values["misbehave"] == [1.0, None, 1.0] and found.failures == {"misbehave": 1}
    assert "failed on 3 rows: it took longer than 2 s and was ended; trying each alone" in caplog.text
    assert "failed on row e0_d0_g1, whose completion begins 'sleep'" in caplog.text


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("exit", "SystemExit: enough"),
        ("exit at once", "its process died (exit status 3)"),
        ("crash", "its process died (by SIGSEGV)"),
    ],
)
def test_a_call_that_ends_its_process(deed: str, cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert values(tmp_path, "fine", deed) == [1.0, None]
    assert f"row e0_d0_g1, whose completion begins {deed!r}: {cause}" in caplog.text


@pytest.mark.parametrize("deed", ["print", "read input", "use the main thread"])
def test_what_a_function_may_do(deed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert values(tmp_path, deed, deed) == [1.0, 1.0]
    out, err = capfd.readouterr()
    assert out == "" and ("to standard output" in err) == (deed == "print")


def test_an_alarm_that_was_left_on_does_not_end_the_worker(tmp_path: Path) -> None:
    with misbehaving() as rewards:
        asyncio.run(rewards.score(rows(tmp_path, "use the main thread")))
        time.sleep(1.2)
        assert asyncio.run(rewards.score(rows(tmp_path, "fine"))).total == [1.0]


def test_a_child_that_comes_back_as_the_worker(tmp_path: Path) -> None:
    with misbehaving() as rewards:
        for _ in range(3):
            assert asyncio.run(rewards.score(rows(tmp_path, "fork and return"))).total == [1.0]
    wait_until_gone(noted(tmp_path))


def test_calls_run_at_one_time_in_fresh_processes(tmp_path: Path) -> None:
    """Each of two functions hangs; neither keeps the other from its own answer."""
    twice = [RewardConfig(function=MISBEHAVE, timeout_s=TIMEOUT_S, label=label) for label in ("first", "second")]
    with load_rewards(twice, num_workers=2) as rewards:
        found = asyncio.run(rewards.score(rows(tmp_path, "sleep")))
        assert found.failures == {"first": 1, "second": 1}
        assert len(set(noted(tmp_path))) == 2 and os.getpid() not in noted(tmp_path)


def test_closing_ends_a_call_in_flight(tmp_path: Path) -> None:
    rewards = load_rewards([RewardConfig(function=MISBEHAVE, timeout_s=600.0)])

    async def cancelled() -> None:
        scoring = asyncio.ensure_future(rewards.score(rows(tmp_path, "fork and hang")))
        while len(noted(tmp_path)) < 3:
            await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(cancelled())
    rewards.close()
    assert not any(map(running, noted(tmp_path)))


CHILD = """
import asyncio, signal, sys
from pathlib import Path
from tests.rollout.test_workers import MISBEHAVE, rows
from surefoot.rollout.rewards import RewardConfig, load_rewards

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
with load_rewards([RewardConfig(function=MISBEHAVE, timeout_s=600.0)]) as rewards:
    asyncio.run(rewards.score(rows(Path(sys.argv[1]), "fork and hang")))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_parent(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stderr=subprocess.DEVNULL) as parent:
        while len(noted(tmp_path)) < 3:
            assert parent.poll() is None
            time.sleep(0.05)
        os.kill(parent.pid, number)
    wait_until_gone(noted(tmp_path))


def test_a_stop_of_the_whole_job_leaves_the_workers_to_the_parent(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM to every process of a job; the parent saves, and may still score meanwhile."""
    others = set(descendants(os.getpid()))  # the tests' own helpers live on
    with misbehaving() as rewards:
        asyncio.run(rewards.score(rows(tmp_path, "fine")))
        workers = set(descendants(os.getpid())) - others
        assert len(workers) >= 2
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        found = asyncio.run(rewards.score(rows(tmp_path, "fine")))
        assert found.total == [1.0] and found.failures == {"misbehave": 0}


def descendants(pid: int) -> list[int]:
    stats = [file.read_text() for file in Path("/proc").glob("[0-9]*/stat")]
    parents = {int(stat.split()[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [found for child in children for found in descendants(child)]


def test_a_limit_of_any_length() -> None:
    with load_rewards([RewardConfig(name="exact_match", timeout_s=1e300)]) as rewards:
        assert asyncio.run(rewards.score([Scored("r", "p", "4", {"answer": "4"})])).total == [1.0]


def test_texts_of_megabytes() -> None:
    with load_rewards([samples.lengths], num_workers=1) as rewards:
        scored = [Scored(f"r{i}", "p", "é\n" * 1_000_000) for i in range(2)]
        assert asyncio.run(rewards.score(scored)).total == [2e6, 2e6]
        many = [Scored(f"r{i}", "p", "c") for i in range(20_000)]
        assert sum(asyncio.run(rewards.score(many)).total) == 20_000


def test_workers_do_not_import_torch_or_run_main_again() -> None:
    script = (
        "import asyncio\nfrom surefoot.rollout.rewards import RewardConfig, Scored, load_rewards\n"
        "print('main runs')\n"
        "with load_rewards([RewardConfig(function='tests.rollout.reward_samples.heavy_modules')]) as rewards:\n"
        "    print(asyncio.run(rewards.score([Scored('r', 'p', 'c')])).total)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "main runs\n[0.0]\n"


def test_results_are_the_same_in_every_process() -> None:
    """Sets of texts have one order, so that a resumed run sums in the order of the straight one."""
    orders = []
    for _ in range(2):
        with load_rewards([samples.order_of_a_set]) as rewards:
            orders.append(asyncio.run(rewards.score([Scored("r", "p", "c")])).total)
    assert orders[0] == orders[1]
