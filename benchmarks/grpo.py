"""A GRPO step against TRL's, each from its own configuration: prompts in, weights changed and with the sampler.

One thread, both sides in turn, medians; the table gives ratios, and from which to which they went. Processor time is
what other programs do not change. Peak memory is that of a process of its own, and what of it came after the imports.
Where TRL is not installed, only the split of our own step is printed.

The last columns compare with a floor: the products of weights and tokens that no implementation can leave out, each
prompt computed once for all its completions, at the rate of a large product on this machine. "Most" is the ratio that
a step at that floor would have.

Both train a Llama with random weights on the demo's sums, in float32, with AdamW, the same number of prompts and
completions, one optimizer step on each batch, a reward by length, and no reference model. TRL checkpoints gradients by
default; here it keeps all activations, as we do, which is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table

from surefoot.demo import task

PROMPTS, SAMPLES, TARGET = 4, 8, 40
STEPS = 3  # of a run; the first one is not counted
Times = list[tuple[float, float]]  # by the clock and of the processor, at the end of each step


@dataclass(frozen=True)
class Case:
    """Attributes:
    equal: the token that ends a completion is banned, so that all have `longest` tokens.
    """

    name: str
    hidden_size: int
    num_layers: int
    longest: int
    equal: bool

    def model_init(self) -> dict[str, Any]:
        return task.model_init(self.hidden_size, self.num_layers) | {"max_position_embeddings": 128}


CASES = (
    Case("2.5M parameters, 64 tokens", 256, 3, 64, True),
    Case("2.5M parameters, up to 64 tokens", 256, 3, 64, False),
    Case("0.1M parameters, 64 tokens", 64, 2, 64, True),
    Case("0.1M parameters, up to 64 tokens", 64, 2, 64, False),
)


def surefoot(case: Case, folder: Path) -> Callable[[], Times]:
    from surefoot import build, loop
    from surefoot.config_file import parse_config

    config = {
        "algorithm": "grpo",
        "run_dir": str(folder / "run"),
        "max_num_steps": STEPS,
        "val_period": 0,
        "grpo": {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": SAMPLES},
        "generation": {"max_new_tokens": case.longest},
        "rewards": [{"name": "length", "target": TARGET, "unit": "characters"}],
        "policy": {
            "model_init": case.model_init(),
            "tokenizer": {"name": str(folder / "tokenizer")},
            "train_global_batch_size": PROMPTS * SAMPLES,
            "train_micro_batch_size": PROMPTS * SAMPLES,
            "max_total_sequence_length": 128,
            "num_threads": 1,
            "optimizer": {"lr": 1e-5},
        },
        "data": {"train": {"path": str(folder / "train.jsonl")}},
        "checkpointing": {"enabled": False},
        "logger": {"progress": "off", "tensorboard": False},
    }

    def run() -> Times:
        started = build.start(parse_config(config), overwrite=True, console=Console(file=io.StringIO()))
        rollouts: Any = started.kit.rollouts
        report: Any = started.report
        if case.equal:
            rollouts.sampling = dataclasses.replace(rollouts.sampling, stop_ids=(), ban_ids=rollouts.sampling.stop_ids)
        times: Times = []
        ended = report.step

        def step(*arguments: Any) -> None:
            ended(*arguments)
            times.append(now())

        report.step = step
        loop.train(started)
        return times

    return run


def trl(case: Case, folder: Path) -> Callable[[], Times]:
    warnings.simplefilter("ignore", FutureWarning)  # what TRL asks of Transformers is to be renamed there
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left")
    rows = [{"prompt": row["messages"][:1]} for row in task.read_rows(folder / "train.jsonl")]
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=case.longest,
        learning_rate=1e-5,
        generation_kwargs={"suppress_tokens": [tokenizer.eos_token_id]} if case.equal else None,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [max(0.0, 1 - abs(len(text) - TARGET) / TARGET) for text in texts]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: Times = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(now())

    def run() -> Times:
        torch.manual_seed(0)
        ends = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        config = LlamaConfig(**case.model_init() | ends)
        clock = Clock()
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_config(config),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return clock.times

    return run


SIDES = {"surefoot": surefoot, "trl": trl}


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def per_step(times: Times, kind: int) -> float:
    """Seconds of a step; `kind`: of `now`."""
    return statistics.median(after[kind] - before[kind] for before, after in pairwise(times))


def write_project(folder: Path) -> None:
    task.write_dataset(folder / "train.jsonl", folder / "heldout.jsonl", 0, 64, 0)
    task.train_tokenizer(task.read_rows(folder / "train.jsonl"), folder / "tokenizer")


def peak_kib() -> int:
    """Of this process; `getrusage` would count what its parent had before."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def peaks(case: Case, side: str, folder: Path) -> str:
    """KiB at the peak of a run, and when everything was imported."""
    run = SIDES[side](case, folder)
    before = peak_kib()
    run()
    return f"{peak_kib()} {before}"


def floor_s(case: Case, folder: Path) -> float:
    """Seconds that a step's products take at least: 2 operations per weight and token in a forward pass, 6 with the
    backward pass; sampling needs the former of every token, training the latter."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "num_tokens" in line]
    completions = statistics.mean(line["num_tokens"] for line in steps)
    prompts = statistics.mean(line["tokens"] for line in steps) - completions
    init = case.model_init()
    width, inner = init["hidden_size"], init["intermediate_size"]
    weights = init["num_hidden_layers"] * (4 * width**2 + 3 * width * inner)
    return (2 + 6) * weights * (completions + prompts / SAMPLES) / products_per_s()


def products_per_s(size: int = 1024) -> float:
    """Operations, of one large product in float32 on one thread."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    took = []
    for _ in range(9):
        began = time.process_time()
        torch.mm(a, b)
        took.append(time.process_time() - began)
    return 2 * size**3 / min(took)


def measured(case: Case, folder: Path, rounds: int, command: list[str]) -> list[str]:
    """A line of the table."""
    runs = {side: make(case, folder) for side, make in SIDES.items()}
    found = [{side: run() for side, run in runs.items()} for _ in range(rounds)]
    cells = [case.name]
    for kind in (0, 1):
        ratios = [per_step(times["trl"], kind) / per_step(times["surefoot"], kind) for times in found]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    floor = floor_s(case, folder)
    ours_s, theirs_s = (statistics.median(per_step(times[side], 1) for times in found) for side in ("surefoot", "trl"))
    kib = {
        side: [
            int(part)
            for part in subprocess.check_output(
                [*command, "--peak", side], text=True, stderr=subprocess.DEVNULL
            ).split()[-2:]
        ]
        for side in SIDES
    }
    (ours, imported), (theirs, imported_there) = kib["surefoot"], kib["trl"]
    cells += [f"{theirs / ours:.2f}", f"{(theirs - imported_there) / (ours - imported):.2f}"]
    return [*cells, f"{floor / ours_s:.0%}", f"{theirs_s / floor:.2f}"]


def split(case: Case, folder: Path) -> list[str]:
    """What share of our step each phase takes, in percent."""
    surefoot(case, folder)()
    lines = [json.loads(line)["timing"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_s" in line][1:]
    whole = sum(line["step_s"] for line in lines)
    return [case.name, *(f"{100 * sum(line.get(f'{name}_s', 0.0) for line in lines) / whole:.0f}" for name in PHASES)]


PHASES = ("rollout", "reward", "log-probs", "train", "sync", "data", "enrich", "record")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), help="only this one")
    parser.add_argument("--peak", choices=SIDES, help="print this side's memory, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [(number, case) for number, case in enumerate(CASES) if options.case in (None, number)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_project(folder)
        if options.peak:
            print(peaks(chosen[0][1], options.peak, folder))
            return
        console = Console()
        own = Table("case", *PHASES, title="our own step, percent")
        for _, case in chosen:
            own.add_row(*split(case, folder))
        console.print(own)
        if importlib.util.find_spec("trl") is None:
            console.print("TRL is not installed (pip install trl==1.16.0): nothing to compare with")
            return
        heading = ("case", "time", "processor time", "peak memory", "after imports", "floor / surefoot", "most")
        table = Table(*heading, title="GRPO step: TRL / surefoot (above 1: surefoot is faster, or takes less)")
        for number, case in chosen:
            table.add_row(*measured(case, folder, options.rounds, [sys.executable, *sys.argv, f"--case={number}"]))
        console.print(table)


if __name__ == "__main__":
    main()
