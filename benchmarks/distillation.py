"""Peak memory of distillation's loss, forward and backward, against the KL of two whole arrays of logits.

2,048 tokens, a vocabulary of 32,000, float32: each side in a process of its own, whose peak resident memory above what
was there before is what counts. Both give the gradients in the student's hidden states and head; they are compared.
Names of losses on the command line measure these alone.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from surefoot.engine.heads import token_outputs
from surefoot.losses.distill import Divergence, TeacherDivergences
from surefoot.types import Head

TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 2048, 32_000, 128, 256
FORMS = {
    "forward KL": Divergence("forward_kl"),
    "reverse KL": Divergence("reverse_kl"),
    "mixed KL": Divergence("mixed_kl", 0.5),
    "Jensen–Shannon": Divergence("jsd", 0.5),
    "forward KL, top 64": Divergence("forward_kl", top_k=64),
}


def inputs() -> tuple[Tensor, nn.Linear, Tensor, nn.Linear]:
    torch.manual_seed(0)
    student, teacher = nn.Linear(WIDTH, VOCABULARY, bias=False), nn.Linear(TEACHER_WIDTH, VOCABULARY, bias=False)
    teacher.requires_grad_(False).weight.mul_(5)
    return torch.randn(TOKENS, WIDTH, requires_grad=True), student, torch.randn(TOKENS, TEACHER_WIDTH), teacher


def naive(form: Divergence) -> tuple[Tensor, list[Tensor]]:
    """Both sides' logits, whole, and torch's `kl_div`; the mixture as TRL's `generalized_jsd_loss` has it."""
    hidden, student, teacher_hidden, teacher = inputs()
    ours, theirs = student(hidden).log_softmax(-1), teacher(teacher_hidden).log_softmax(-1)
    if form.top_k is not None:
        theirs, ids = theirs.topk(form.top_k, dim=-1)
        ours = ours.gather(-1, ids)
        ours, theirs = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (ours, theirs))
    kl = partial(F.kl_div, reduction="none", log_target=True)
    if form.name == "jsd":
        mixture = torch.logsumexp(torch.stack([ours, theirs]), 0) - torch.tensor(2.0).log()
        loss = (0.5 * kl(mixture, theirs) + 0.5 * kl(mixture, ours)).sum()
    elif form.name == "mixed_kl":
        loss = (0.5 * kl(ours, theirs) + 0.5 * kl(theirs, ours)).sum()
    else:
        loss = (kl(ours, theirs) if form.name == "forward_kl" else kl(theirs, ours)).sum()
    return loss.detach() / TOKENS, list(torch.autograd.grad(loss / TOKENS, [hidden, student.weight]))


def chunked(form: Divergence) -> tuple[Tensor, list[Tensor]]:
    """As the engine does it, the teacher's side included."""
    hidden, student, teacher_hidden, teacher = inputs()
    targets = torch.zeros(TOKENS, dtype=torch.long)
    columns = {"teacher/hidden": teacher_hidden}
    if form.top_k is not None:
        with torch.no_grad():
            said = token_outputs(teacher_hidden, targets, teacher, Head(("topk",), k=form.top_k))
        columns = {f"teacher/{name}": value for name, value in said.items()}
    function = TeacherDivergences(form, ("teacher",), {"teacher": lambda states: teacher(states).log_softmax(-1)})
    out = token_outputs(hidden, targets, student, Head(("logprobs",), function=function), None, columns)
    loss = out["teacher/divergence"].sum() / TOKENS
    return loss.detach(), list(torch.autograd.grad(loss, [hidden, student.weight]))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(side: Callable[[Divergence], Any], name: str, connection: Any) -> None:
    torch.set_num_threads(1)
    token_outputs(torch.randn(2, 2), torch.zeros(2, dtype=torch.long), nn.Linear(2, 4), Head())  # what torch loads late
    kept = inputs()
    before = peak_mib()
    del kept
    loss, grads = side(FORMS[name])
    connection.send((peak_mib() - before, float(loss), [grad.numpy() for grad in grads]))


def run(side: Callable[[Divergence], Any], name: str) -> Any:
    context = multiprocessing.get_context("fork")  # this process never holds much
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measured, args=(side, name, theirs))
    process.start()
    found = ours.recv()
    process.join()
    return found


def main() -> None:
    table = Table(title=f"{TOKENS:,} tokens × {VOCABULARY:,}: extra peak memory of forward + backward")
    for heading in ("loss", "whole logits", "surefoot", "ratio", "largest difference of gradients, relative"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for name in sys.argv[1:] or FORMS:
        (most, loss, grads), (ours, own_loss, own_grads) = run(naive, name), run(chunked, name)
        assert abs(loss - own_loss) <= 1e-5 * abs(loss), (loss, own_loss)
        apart = max(abs(a - b).max() / abs(a).max() for a, b in zip(grads, own_grads, strict=True))
        table.add_row(name, f"{most:,.0f} MiB", f"{ours:,.0f} MiB", f"{ours / most:.2f}", f"{apart:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
