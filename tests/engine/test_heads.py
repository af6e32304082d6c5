"""Log-probs and their companions, against log_softmax and gather over the model's own logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.engine import heads, models
from surefoot.engine.heads import ModelHead, token_outputs
from surefoot.errors import ModelError
from surefoot.types import Head
from tests.engine import tiny

ALL = Head(("logprobs", "entropy", "log_sum_sq_probs", "topk"), temperature=0.7, k=3)


def plainly(logits: torch.Tensor, targets: torch.Tensor, head: Head) -> dict[str, torch.Tensor]:
    logprobs = (logits / head.temperature).log_softmax(-1)
    out = {"logprobs": logprobs.gather(-1, targets[..., None]).squeeze(-1)}
    out["entropy"] = -(logprobs.exp() * logprobs).sum(-1)
    out["log_sum_sq_probs"] = logprobs.exp().square().sum(-1).log()
    if head.k:
        out["topk_logprobs"], out["topk_ids"] = logprobs.topk(head.k, dim=-1)
        out["topk_rest"] = torch.log1p(-out["topk_logprobs"].exp().sum(-1))
    return out


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens to a chunk, nothing kept: every path that a large vocabulary takes."""
    monkeypatch.setattr(heads, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(heads, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(heads, "KEPT_LOGITS", 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head", [Head(), Head(temperature=1.3), ALL], ids=["logprobs", "temperature", "all"])
def test_chunks_equal_the_plain_way(dtype: torch.dtype, tolerance: float, bias: bool, head: Head) -> None:
    torch.manual_seed(0)
    lm_head = nn.Linear(6, 11, bias=bias).to(dtype)
    hidden, targets = torch.randn(18, 6, dtype=dtype, requires_grad=True), torch.randint(0, 11, (18,))
    leaves = [hidden, *lm_head.parameters()]
    ours = token_outputs(hidden, targets, lm_head, head)
    theirs = plainly(lm_head(hidden), targets, head)
    assert set(ours) == set(head.names)
    weights = {name: torch.randn_like(ours[name]) for name in ours if name != "topk_ids"}
    sums = [sum((out[n] * w).sum() for n, w in weights.items()) for out in (ours, theirs)]
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance)
    for a, b in zip(torch.autograd.grad(sums[0], leaves), torch.autograd.grad(sums[1], leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=4 * tolerance, atol=4 * tolerance)


@dataclass(frozen=True)
class Moments:
    """Of the log-probs, about a column."""

    fields: tuple[str, ...] = ("about",)
    outputs: tuple[str, ...] = ("first", "second")

    def __call__(self, logprobs: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        distance = logprobs - columns["about"]
        return {"first": distance.mean(-1), "second": distance.square().mean(-1)}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_ids", [None, 8])
def test_a_function_of_whole_distributions(num_ids: int | None) -> None:
    """In chunks, with its columns; and of the known ids alone, which then have all the probability."""
    torch.manual_seed(0)
    lm_head, hidden = nn.Linear(6, 11).double(), torch.randn(18, 6, dtype=torch.float64, requires_grad=True)
    targets, about = torch.randint(0, 8, (18,)), torch.randn(18, 11, dtype=torch.float64)[:, :num_ids]
    head = Head(
        ("logprobs", "topk", "hidden"), temperature=0.7, k=2, known_only=num_ids is not None, function=Moments()
    )
    ours = token_outputs(hidden, targets, lm_head, head, num_ids, {"about": about})
    logits = lm_head(hidden)[:, :num_ids]
    logprobs = (logits / 0.7).log_softmax(-1)
    theirs = plainly(logits, targets, Head(temperature=0.7, k=2)) | {"hidden": hidden}
    theirs |= {"first": (logprobs - about).mean(-1), "second": (logprobs - about).square().mean(-1)}
    assert set(ours) == set(head.names)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-12)
    leaves = [hidden, *lm_head.parameters()]
    grads = [
        torch.autograd.grad((out["first"] * 3 + out["second"] * about[:, 0]).sum(), leaves) for out in (ours, theirs)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_whole_vocabulary_has_nothing_outside_it() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    out = token_outputs(logits, torch.zeros(3, dtype=torch.long), None, Head(("topk",), k=5))
    assert torch.equal(out["topk_rest"], torch.full((3,), -1e4))
    (out["topk_rest"].exp() * out["topk_rest"]).sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.usefixtures("small_chunks")
def test_only_what_is_needed_has_a_gradient() -> None:
    lm_head = nn.Linear(6, 11).requires_grad_(False)
    hidden = torch.randn(12, 6, requires_grad=True)
    out = token_outputs(hidden, torch.zeros(12, dtype=torch.long), lm_head, ALL)
    out["entropy"].sum().backward()  # the other outputs are not read
    assert lm_head.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.usefixtures("small_chunks")
def test_chunks_under_autocast_equal_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    lm_head, hidden = nn.Linear(6, 11), torch.randn(18, 6, requires_grad=True)
    targets = torch.randint(0, 11, (18,))

    def run() -> tuple[Any, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = token_outputs(hidden, targets, lm_head, Head())["logprobs"]
        return (value, *torch.autograd.grad(value.sum(), [hidden, lm_head.weight]))

    chunked = run()
    monkeypatch.setattr(heads, "KEPT_LOGITS", 2**20)
    for a, b in zip(chunked, run(), strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(chunked[0], run()[0], rtol=0, atol=0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_outputs_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    """Whatever an architecture does to its logits. Rows of unequal length, so that padding takes part."""
    configuration = tiny.config(tmp_path, name)
    model = models.load(configuration, tokenizer=tiny.TOKENIZER, seed=1).model
    ids, lengths = torch.randint(0, 32, (3, 9)), torch.tensor([9, 4, 1])
    out = ModelHead(model)(ids, lengths, Head((*ALL.outputs, "logits"), k=2))
    for row, length in enumerate(lengths.tolist()):
        logits = model(ids[row : row + 1, :length]).logits[0, :-1].float()
        expected = plainly(logits, ids[row, 1:length], Head(k=2)) | {"logits": logits}
        for key, value in expected.items():
            torch.testing.assert_close(out[key][row, 1:length], value, rtol=1e-5, atol=2e-5)
            assert not out[key][row, 0].any()
            assert not out[key][row, length:].any()


@pytest.mark.parametrize("name", ["capped logits", "scaled logits"])
def test_a_head_that_is_not_the_whole_story_is_noticed(tmp_path: Path, name: str) -> None:
    """Random weights are so small that the cap hardly shows on real tokens: the probe must see it all the same."""
    configuration = tiny.config(tmp_path, name, model_init={**tiny.ARCHITECTURES[name], "initializer_range": 1e-4})
    model = models.load(configuration, tokenizer=tiny.TOKENIZER, seed=1).model
    assert ModelHead(model)._lm_head is None


def test_the_probe_leaves_no_trace(tmp_path: Path) -> None:
    model = models.load(tiny.config(tmp_path), tokenizer=tiny.TOKENIZER, seed=1).model.train()
    state = torch.random.get_rng_state()
    assert ModelHead(model)._lm_head is model.lm_head
    assert model.training
    assert not model.model._forward_hooks
    assert torch.equal(state, torch.random.get_rng_state())


def test_wanted_tokens_alone_are_computed(tmp_path: Path) -> None:
    head = ModelHead(models.load(tiny.config(tmp_path), tokenizer=tiny.TOKENIZER, seed=1).model)
    ids, lengths = torch.randint(0, 32, (2, 6)), torch.tensor([6, 3])
    wanted = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 1, 0, 1, 1, 1]])
    everything, some = head(ids, lengths, Head()), head(ids, lengths, Head(), wanted)
    expected = torch.where(wanted != 0, everything["logprobs"], 0.0)
    hidden = head(ids, lengths, Head(("hidden",)), wanted)["hidden"]
    assert hidden.shape == (2, 6, 16)
    assert not hidden[(wanted == 0) | (torch.arange(6) >= lengths[:, None]) | (torch.arange(6) == 0)].any()
    (at,) = head.logprobs(hidden[:1, 2], Head())
    torch.testing.assert_close(at[ids[0, 2]], everything["logprobs"][0, 2])
    torch.testing.assert_close(some["logprobs"], expected, rtol=0, atol=1e-6)


def test_a_scalar_per_token(tmp_path: Path) -> None:
    configuration = tiny.config(tmp_path)
    model = models.load(configuration, tokenizer=tiny.TOKENIZER, seed=1, kind="scalar").model
    ids, lengths = torch.randint(0, 32, (2, 6)), torch.tensor([6, 3])
    out = ModelHead(model)(ids, lengths, Head(("scalar",)))["scalar"]
    assert out.shape == (2, 6)
    assert not out[1, 3:].any()
    # Transformers reads the score at the last token that is not the padding id.
    model.config.pad_token_id = 0
    own = model(torch.where(ids == 0, 5, ids)[:1]).logits[0, 0]
    again = ModelHead(model)(torch.where(ids == 0, 5, ids), lengths, Head(("scalar",)))["scalar"]
    torch.testing.assert_close(again[0, -1], own)


@pytest.mark.parametrize(
    ("head", "error", "words"),
    [
        (Head(("logprob",)), ValueError, "logprob"),
        (Head(()), ValueError, "expected"),
        (Head(("logprobs", "scalar")), ValueError, "scalar alone"),
        (Head(temperature=0.0), ValueError, "temperature"),
        (Head(("topk",)), ValueError, "k of at least 1"),
        (Head(("scalar",)), ModelError, "no score head"),
    ],
)
def test_what_cannot_be_given_is_refused(tmp_path: Path, head: Head, error: type[Exception], words: str) -> None:
    model_head = ModelHead(models.load(tiny.config(tmp_path), tokenizer=tiny.TOKENIZER, seed=1).model)
    with pytest.raises(error, match=words):
        model_head(torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]), head)
