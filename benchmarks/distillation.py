"""Peak memory of distillation's loss, forward and backward, against the same from whole arrays of logits.

2,048 tokens, a vocabulary of 32,000, float32: each side in a process of its own, whose peak resident memory above what
was there before is what counts. Both give the gradients in the student's hidden states and head; they are compared.
Across tokenizers the teacher has 24,000 tokens, of which 16,000 are the student's too, and a third of the chunks have
two tokens of the student's.
Names of losses on the command line measure these alone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from surefoot.engine.heads import token_outputs
from surefoot.losses.cross_tokenizer import ChunkLoss, CrossTokenizerLoss, Gold, Projection
from surefoot.losses.distill import Divergence, TeacherDivergences
from surefoot.types import Head

_MMAP_THRESHOLD = -3  # of malloc.h
TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 2048, 32_000, 128, 256
OTHER_VOCABULARY, SHARED, K = 24_000, 16_000, 64
Side: TypeAlias = Callable[[], tuple[Tensor, list[Tensor]]]
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


def gold() -> ChunkLoss:
    shared = torch.arange(SHARED).expand(2, -1)
    return Gold.of(shared, (VOCABULARY, OTHER_VOCABULARY), divergence=Divergence("forward_kl"), whole=False)


def projection() -> ChunkLoss:
    """The student's other tokens are two of the teacher's each."""
    rows = torch.cat([torch.arange(SHARED), torch.arange(SHARED, VOCABULARY).repeat_interleave(2)])
    weights = torch.cat([torch.ones(SHARED), torch.full((len(rows) - SHARED,), 0.5)])
    columns = torch.arange(len(rows)) % OTHER_VOCABULARY
    return Projection.of(Divergence("forward_kl"), rows, columns, weights, OTHER_VOCABULARY)


def across(make: Callable[[], ChunkLoss], *, whole: bool) -> tuple[Tensor, list[Tensor]]:
    """Across tokenizers: what the loss reads of all tokens at once, or as the engine does it."""
    hidden, student, *_ = inputs()
    chunk = (torch.arange(TOKENS) % 4 != 0).cumsum(0) + 1
    said = torch.randn(int(chunk.max()), K + 1).sort(1, descending=True).values.log_softmax(-1)[chunk - 1]
    ids = (torch.randint(OTHER_VOCABULARY, (len(said), 1))[chunk - 1] + 301 * torch.arange(K)) % OTHER_VOCABULARY
    columns = {"input_ids": torch.randint(VOCABULARY, (TOKENS,)), "loss_mask": torch.ones(TOKENS)}
    columns |= {"teacher/topk_ids": ids, "teacher/topk_logprobs": said[:, :K], "teacher/topk_rest": said[:, K]}
    loss = CrossTokenizerLoss({"teacher": make()})
    if whole:
        logprobs = student(hidden).log_softmax(-1)
        own = logprobs.gather(1, columns["input_ids"][:, None])[:, 0]
        out = {"logprobs": own} | loss.function(logprobs, columns)
    else:
        head = Head(loss.outputs, function=loss.function)
        out = token_outputs(hidden, columns["input_ids"], student, head, None, columns)
    row = {name: column[None] for name, column in columns.items()}
    row |= {"teacher/chunk": chunk[None], "teacher/weight": torch.ones(1)}
    value, _ = loss({name: values[None] for name, values in out.items()}, row, norm=loss.counts(row))
    return value.detach(), list(torch.autograd.grad(value, [hidden, student.weight]))


SIDES: dict[str, tuple[Side, Side]] = {
    **{name: (partial(naive, form), partial(chunked, form)) for name, form in FORMS.items()},
    "gold, top 64": (partial(across, gold, whole=True), partial(across, gold, whole=False)),
    "projection, top 64": (partial(across, projection, whole=True), partial(across, projection, whole=False)),
}


def give_back() -> None:
    """Have glibc return what is freed. By default it learns to keep large arrays, and a peak depends on the order in
    which they came."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 2**16)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(side: Side, connection: Any) -> None:
    torch.set_num_threads(1)
    token_outputs(torch.randn(2, 2), torch.zeros(2, dtype=torch.long), nn.Linear(2, 4), Head())  # what torch loads late
    kept = inputs()
    give_back()
    before = peak_mib()
    del kept
    loss, grads = side()
    connection.send((peak_mib() - before, float(loss), [grad.numpy() for grad in grads]))


def run(side: Side) -> Any:
    context = multiprocessing.get_context("fork")  # this process never holds much
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measured, args=(side, theirs))
    process.start()
    found = ours.recv()
    process.join()
    return found


def main() -> None:
    table = Table(title=f"{TOKENS:,} tokens × {VOCABULARY:,}: extra peak memory of forward + backward")
    for heading in ("loss", "whole logits", "surefoot", "ratio", "largest difference of gradients, relative"):
        table.add_column(heading, justify="left" if heading == "loss" else "right")
    for name in sys.argv[1:] or SIDES:
        (most, loss, grads), (ours, own_loss, own_grads) = (run(side) for side in SIDES[name])
        assert abs(loss - own_loss) <= 1e-5 * abs(loss), (loss, own_loss)
        apart = max(abs(a - b).max() / abs(a).max() for a, b in zip(grads, own_grads, strict=True))
        table.add_row(name, f"{most:,.0f} MiB", f"{ours:,.0f} MiB", f"{ours / most:.2f}", f"{apart:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
