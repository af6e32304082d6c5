"""A training step of the engine against a plain PyTorch loop over the same rows.

One thread, both sides in turn, medians; the table gives ratios. `--model FOLDER` adds a real model.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from surefoot.checkpoint import Arena
from surefoot.config import EngineConfig
from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine.local import LocalEngine
from surefoot.losses.supervised import NLL
from surefoot.types import BatchRef, Head, Objective

VOCABULARY = 19


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def rows(count: int, shortest: int, longest: int, vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(shortest, longest, count).long().tolist()
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def engine_step(model: torch.nn.Module, ids: list[torch.Tensor]) -> Callable[[], None]:
    plane = MemoryPlane()
    ref = BatchRef(
        tuple(f"e0_d{i}_g0" for i in range(len(ids))),
        tuple(f"e0_d{i}" for i in range(len(ids))),
        tuple(len(row) for row in ids),
        (0,) * len(ids),
        frozenset(),
    )
    masks = [torch.cat([torch.zeros(1), torch.ones(len(row) - 1)]) for row in ids]
    ref = plane.put(ref, {"input_ids": ids, "loss_mask": masks})
    config = EngineConfig(
        model_name="-", train_global_batch_size=len(ids), train_micro_batch_size=len(ids), max_total_sequence_length=256
    )
    engine = LocalEngine(model, {}, config, plane, Arena(), seed=0)
    objective = Objective("policy", Head(), NLL())
    return lambda: void(engine.train(ref, objective))


def plain_step(model: torch.nn.Module, ids: list[torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    longest = max(len(row) for row in ids)
    padded = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in ids])
    mask = torch.stack([torch.arange(longest) < len(row) for row in ids]).long()
    labels = padded.masked_fill(mask == 0, -100)
    model.train()

    def step() -> None:
        model(input_ids=padded, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def void(value: object) -> None:
    """A step's result is not needed here."""


def ratio(ours: Callable[[], None], theirs: Callable[[], None], rounds: int, steps: int) -> tuple[float, float]:
    """Median of theirs / ours (above 1: we are faster), and its spread over the rounds."""
    ours(), theirs()
    found = []
    for _ in range(rounds):
        seconds = []
        for side in (ours, theirs):
            began = time.perf_counter()
            for _ in range(steps):
                side()
            seconds.append(time.perf_counter() - began)
        found.append(seconds[1] / seconds[0])
    return statistics.median(found), max(found) - min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face folder to time as well")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        ("tiny, 32 rows of 14", tiny(), rows(32, 14, 14, VOCABULARY), 20),
        ("tiny, 32 rows of 8 to 128", tiny(), rows(32, 8, 128, VOCABULARY), 3),
    ]
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        cases.append(("the model, 4 rows of 64", model, rows(4, 64, 64, model.config.vocab_size), 1))
    table = Table(title="training step: plain loop / engine (above 1: the engine is faster)")
    for heading in ("case", "ratio", "spread"):
        table.add_column(heading)
    for name, model, ids, steps in cases:
        middle, spread = ratio(engine_step(copy.deepcopy(model), ids), plain_step(model, ids), options.rounds, steps)
        table.add_row(name, f"{middle:.2f}", f"{spread:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
