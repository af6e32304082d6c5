"""Surefoot's sampler against `model.generate` with its key-value cache: tokens per second, both in float32.

One thread, both sides in turn, medians; the table gives ratios, and from which to which they went. Processor time is
what other programs do not change. Peak memory is what a process of its own grows by, from
the loaded model to the end of one turn. `--model FOLDER` adds a real model, at equal lengths.

Every completion is given its length beforehand, and the token that ends one is banned. Both sides run all of them at a
time: `generate` in one batch, padded on the left, until the longest is done. Only the tokens asked for count.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.utils import logging

from surefoot.demo import task
from surefoot.generation.torch_sampler import TorchSampler
from surefoot.types import Sampling

VOCABULARY, END = 19, 2  # the demo's
LONGEST_PROMPT = 16


@dataclass(frozen=True)
class Case:
    """`samples` completions of each of so many prompts, with lengths uniform over `shortest` to `longest` tokens.

    Attributes:
        model: a folder; empty: the demo's model, with random weights.
    """

    name: str
    model: str
    prompts: int
    samples: int
    shortest: int
    longest: int

    def load(self) -> Any:
        if self.model:
            return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        torch.manual_seed(0)
        settings = task.model_init() | {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
        return AutoModelForCausalLM.from_config(LlamaConfig(**settings)).eval()

    def rows(self) -> list[tuple[list[int], int]]:
        """A prompt's tokens and the length of its completion."""
        generator = torch.Generator().manual_seed(1)
        count = self.prompts * self.samples
        lengths = torch.linspace(self.shortest, self.longest, count).round().long()
        shuffled = lengths[torch.randperm(count, generator=generator)].tolist()
        sizes = torch.linspace(LONGEST_PROMPT // 2, LONGEST_PROMPT, self.prompts).long().tolist()
        prompts = [torch.randint(END + 1, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]
        return [(prompts[row // self.samples], length) for row, length in enumerate(shuffled)]


def surefoot(case: Case, model: Any) -> Callable[[], None]:
    rows = case.rows()
    sampler = TorchSampler(model, max_total_sequence_length=LONGEST_PROMPT + case.longest, slots=len(rows))
    runner = asyncio.Runner()

    async def sample() -> list[int]:
        made = [
            sampler.generate(
                prompt,
                seed=0,
                group=str(row // case.samples),
                index=row % case.samples,
                sampling=Sampling(max_new_tokens=length, ban_ids=(END,)),
            )
            for row, (prompt, length) in enumerate(rows)
        ]
        return [len(completion.ids) for completion in await asyncio.gather(*made)]

    def turn() -> None:
        assert runner.run(sample()) == [length for _, length in rows]

    return turn


def generate(case: Case, model: Any) -> Callable[[], None]:
    rows = case.rows()
    ids, mask = torch.zeros(2, len(rows), LONGEST_PROMPT, dtype=torch.long)
    for row, (prompt, _) in enumerate(rows):
        ids[row, -len(prompt) :] = torch.tensor(prompt)
        mask[row, -len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max(length for _, length in rows),
        suppress_tokens=[END],
        pad_token_id=0,
    )

    def turn() -> None:
        made = model.generate(ids, attention_mask=mask, generation_config=settings)
        assert made.shape[1] == LONGEST_PROMPT + case.longest

    return turn


SIDES = {"surefoot": surefoot, "generate": generate}


def grown(case: Case, side: str) -> int:
    """KiB of peak memory on top of the loaded model."""
    model = case.load()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = peak_kib()
    SIDES[side](case, model)()
    return peak_kib() - before


def peak_kib() -> int:
    """Of this process; `getrusage` would count what its parent had before."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def timed(case: Case, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each side's turn in each round, by the clock and of the processor."""
    model = case.load()
    turns = {side: make(case, copy.deepcopy(model)) for side, make in SIDES.items()}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(-1, rounds):  # the first one warms up
        for side, turn in turns.items():
            began, worked = time.perf_counter(), time.process_time()
            turn()
            if number >= 0:
                found[side].append((time.perf_counter() - began, time.process_time() - worked))
    return found


def measured(case: Case, rounds: int, command: Sequence[str]) -> list[str]:
    """A line of the table."""
    times = timed(case, rounds)
    kib = {side: int(subprocess.check_output([*command, "--grown", side])) for side in SIDES}
    wall, cpu = (
        [theirs[kind] / ours[kind] for theirs, ours in zip(times["generate"], times["surefoot"], strict=True)]
        for kind in (0, 1)
    )
    speed = sum(length for _, length in case.rows()) / statistics.median(cpu_s for _, cpu_s in times["surefoot"])
    return [
        case.name,
        f"{statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f})",
        f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
        f"{kib['generate'] / max(kib['surefoot'], 1):.2f}",
        f"{speed:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a Hugging Face folder to sample from as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--grown", choices=SIDES, help="print the KiB that this side takes, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    cases = [
        Case("demo model, 16 prompts x 8, of 8 to 128", "", 16, 8, 8, 128),
        Case("demo model, 16 prompts x 8, of 64", "", 16, 8, 64, 64),
    ]
    if options.model:
        cases.append(Case("the model, 4 prompts x 8, of 24", options.model, 4, 8, 24, 24))
    if options.grown:
        print(grown(cases[options.case or 0], options.grown))
        return
    table = Table(title="sampling: generate / surefoot (above 1: surefoot is faster, or takes less)")
    for heading in ("case", "time", "processor time", "peak memory", "surefoot: tokens / processor s"):
        table.add_column(heading)
    for number, case in enumerate(cases):
        if options.case in (None, number):
            table.add_row(*measured(case, options.rounds, [sys.executable, *sys.argv, f"--case={number}"]))
    Console().print(table)


if __name__ == "__main__":
    main()
