"""A trainer in bfloat16 beside a generator in float32: the two draw from different distributions, and the weights
exp(o − g) take that back. Shown without samples, on all completions of a small model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.engine import models
from surefoot.engine.heads import ModelHead
from surefoot.losses.policy import PolicyLoss
from surefoot.types import Head
from tests.engine import tiny

_PROMPT, _LONGEST = 3, 2


def rows() -> Tensor:
    """One prompt with every completion of two tokens."""
    prompt = torch.tensor([4, 9, 2])
    return torch.stack([torch.cat([prompt, torch.tensor(pair)]) for pair in itertools.product(range(32), repeat=2)])


def test_the_weights_give_back_the_trainers_own_expected_gradient(tmp_path: Path) -> None:
    """Sequence by sequence exactly; token by token but for what came before the token."""
    model = models.load(tiny.config(tmp_path), tokenizer=tiny.TOKENIZER, seed=1).model.eval()
    for parameter in model.parameters():
        parameter.data *= 3  # what rounds differently shows
    head, ids = ModelHead(model), rows()
    lengths, mask = torch.full((len(ids),), ids.shape[1]), (torch.arange(ids.shape[1]) >= _PROMPT).expand(len(ids), -1)
    advantages = torch.randn(len(ids), 1, generator=torch.Generator().manual_seed(0)).expand(-1, ids.shape[1])

    def logprobs(bfloat16: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            return head(ids, lengths, Head(), mask.long())["logprobs"]

    def expected_gradient(sampled: Tensor, correction: str | None) -> Tensor:
        """Of the trainer's loss, over the completions that a generator with these log-probs draws."""
        loss = PolicyLoss(
            loss_type="reinforce",
            force_on_policy_ratio=True,
            importance_sampling_correction=correction,
            reduction="constant",
            max_response_length=_LONGEST,
        )
        likelihood = sampled.sum(1, keepdim=True).exp()
        columns = {"loss_mask": mask, "advantages": advantages * likelihood, "generator_logprobs": sampled}
        out = logprobs(bfloat16=True)
        norm = loss.counts(columns)
        value, metrics = loss({"logprobs": out, "entropy": torch.zeros_like(out)}, columns, norm=norm)
        if sampled is theirs:
            assert metrics["generator_mismatch/mean"].value > 1e-3
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(value, list(model.parameters()))])

    with torch.no_grad():
        theirs, ours = logprobs(bfloat16=False), logprobs(bfloat16=True)
        assert float(theirs.sum(1).exp().sum()) == pytest.approx(1.0, abs=1e-4)
    exact = expected_gradient(ours, None)
    off = {c: float((expected_gradient(theirs, c) - exact).norm() / exact.norm()) for c in (None, "token", "sequence")}
    assert off[None] > 0.01
    assert off["token"] < off[None] / 2
    assert off["sequence"] < 1e-5
