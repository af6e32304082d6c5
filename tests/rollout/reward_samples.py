"""Reward functions of every manner, as users write them. Workers import them by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def texts(completions: list[Any]) -> list[str]:
    return [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]


# ------------------------------------------------------------------------------------------------------ what they give


def lengths(prompts: list[Any], completions: list[Any]) -> list[float]:
    return [float(len(text)) for text in texts(completions)]


async def lengths_async(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return lengths(prompts, completions)


def scripted(completions: list[Any], value: list[Any]) -> list[Any]:
    """What the column says: numbers, None, and in words what JSON has no value for."""
    words = {"nan": float("nan"), "inf": float("inf"), "huge": 10**400}
    return [words.get(item[1:], item) if isinstance(item, str) and item[:1] == "=" else item for item in value]


def returns(completions: list[Any], what: list[str]) -> Any:
    """Something that is no list of one number per row, or is one in another form."""
    count = len(completions)
    given: dict[str, Any] = {
        "one": [1.0],
        "one less": [1.0] * (count - 1),
        "one more": [1.0] * (count + 1),
        "a float": 1.0,
        "text": "1" * count,
        "None": None,
        "a mapping": dict.fromkeys(range(count), 1.0),
        "a generator": (1.0 for _ in range(count)),
        "n x 1 array": np.ones((count, 1)),
        "n x 1 list": [[1.0]] * count,
        "0-d array": np.ones(()),
        "array": np.linspace(0, 1, count, dtype=np.float32),
        "array of bools": np.arange(count) % 2 == 0,
        "tuple of numpy numbers": tuple(np.float64(i) for i in range(count)),
    }
    return given[what[0]]


def constant(completions: list[Any], level: float = 1.0, **columns: Any) -> list[float]:
    return [level] * len(completions)


def row_names(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(columns))] * len(completions)


# -------------------------------------------------------------------------------------------------------- what they do


def misbehave(completions: list[Any], folder: list[str]) -> list[float]:
    for text, place in zip(texts(completions), folder, strict=True):
        if text in _DEEDS:
            _DEEDS[text](Path(place))
    return [1.0] * len(completions)


def _note(folder: Path, pid: int) -> None:
    (folder / f"{pid}.pid").touch()


def _raise(folder: Path) -> None:
    raise KeyError("no such answer")


def _sleep(folder: Path) -> None:
    _note(folder, os.getpid())
    time.sleep(600)


def _loop_in_c(folder: Path) -> None:
    _note(folder, os.getpid())
    re.match(r"(a+)+$", "a" * 60 + "b")


def _ignore_signals(folder: Path) -> None:
    _note(folder, os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def _fork_and_hang(folder: Path) -> None:
    """Leaves an orphan in a session of its own, and a program; then hangs."""
    _note(folder, os.getpid())
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os.setsid()
            _note(folder, os.getpid())
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    _note(folder, subprocess.Popen(SLEEP, start_new_session=True).pid)
    time.sleep(600)


def _fork_and_return(folder: Path) -> None:
    """The child comes back as if it were the worker."""
    if os.fork() == 0:
        _note(folder, os.getpid())


def _crash(folder: Path) -> None:
    ctypes.string_at(0)


def _exit(folder: Path) -> None:
    sys.exit("enough")


def _exit_at_once(folder: Path) -> None:
    os._exit(3)


def _print(folder: Path) -> None:
    sys.stdout.write("to standard output\n")
    sys.stdout.flush()
    os.write(1, b'{"value": [0.0]}\n')


def _use_the_main_thread(folder: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)


def _read_input(folder: Path) -> None:
    assert sys.stdin.read() == ""


_DEEDS = {
    "raise": _raise,
    "sleep": _sleep,
    "loop in C": _loop_in_c,
    "ignore signals": _ignore_signals,
    "fork and hang": _fork_and_hang,
    "fork and return": _fork_and_return,
    "crash": _crash,
    "exit": _exit,
    "exit at once": _exit_at_once,
    "print": _print,
    "use the main thread": _use_the_main_thread,
    "read input": _read_input,
}


def relative(completions: list[Any]) -> list[float]:
    """Depends on the other rows, and fails on a certain one."""
    if any(text == "raise" for text in texts(completions)):
        raise ValueError("not this one")
    longest = max(map(len, texts(completions)))
    return [len(text) / longest for text in texts(completions)]


# ------------------------------------------------------------------------------------- as other libraries' users do


def trl_accuracy(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float | None]:
    """As TRL's documentation shows them: completions are chats, everything else may be ignored."""
    contents = [completion[0]["content"] for completion in completions]
    assert [len(ids) for ids in kwargs["completion_ids"]] == [len(content) for content in contents]
    return [None if right is None else float(text == right) for text, right in zip(contents, solution, strict=True)]


def trl_logging(
    prompts: list[Any], completions: list[Any], log_extra: Any = None, log_metric: Any = None
) -> list[float]:
    log_extra("length", [len(text) for text in texts(completions)])
    log_metric("rows", len(prompts))
    return [0.5] * len(prompts)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert data_source in ("", "gsm8k") and isinstance(extra_info, dict)
    return 1.0 if solution_str.strip().endswith(ground_truth) else 0.1


async def compute_score_async(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, method: str = "strict", **kwargs: Any
) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": compute_score(data_source, solution_str, ground_truth, extra_info), "method": method}


def compute_scores(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any], **kwargs: Any
) -> list[Any]:
    return [
        {"score": compute_score(*row), "acc": 1}
        for row in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    ]


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> Any:
    """As OpenRLHF's examples: what was sampled is what the query has beyond the prompt, and tensors come back."""
    import torch

    right = [
        query[len(prompt) :].strip() == label for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    rewards = torch.tensor(right, dtype=torch.float)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"right": rewards.mean()}}


def of_nothing(a: int, b: int) -> list[float]:
    return []


def by_place(prompts: list[Any], completions: list[Any], /) -> list[float]:
    return [1.0] * len(completions)


def heavy_modules(completions: list[Any]) -> list[float]:
    return [float("torch" in sys.modules)] * len(completions)


def order_of_a_set(completions: list[Any]) -> list[float]:
    order = [int(text) for text in {str(i) for i in range(9)}]
    return [float(sum(digit * 10**i for i, digit in enumerate(order)))] * len(completions)
