"""KL estimators: expected gradients against the exact divergences of a small softmax, and values far out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.losses.kl import KINDS, adapted_coefficient, kl_penalty, kl_values

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.2, 1.1, -0.9], dtype=torch.float64).log_softmax(0)
SAMPLED_BY = torch.tensor([0.9, 0.2, -0.6, 0.0, 0.7], dtype=torch.float64).log_softmax(0)  # an older policy


def exact(reverse: bool) -> tuple[Tensor, Tensor]:
    """KL(policy‖reference), or KL(reference‖policy), and its gradient in the policy's logits."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    first, second = (policy, REFERENCE) if reverse else (REFERENCE, policy)
    divergence = (first.exp() * (first - second)).sum()
    return divergence.detach(), torch.autograd.grad(divergence, logits)[0]


def expected(kind: str, old: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Value and gradient of the estimator, in expectation over every token that `old` (default: the policy) may sample:
    an enumeration, no samples."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    old = policy.detach() if old is None else old
    ratio = (policy - old).exp()
    value = (old.exp() * kl_penalty(policy, REFERENCE, ratio, kind)).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_are_those_of_the_reverse_kl(kind: str) -> None:
    """Sampled by the policy itself, and, through the ratio, by an older one."""
    divergence, gradient = exact(reverse=True)
    for old in (None, SAMPLED_BY):
        value, found = expected(kind, old)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14)
        if kind != "k2":  # the one with a biased value
            torch.testing.assert_close(value, divergence, rtol=1e-12, atol=1e-14)


def test_plain_k3_has_the_gradient_of_the_forward_kl() -> None:
    """Its value is KL(policy‖reference), its gradient is not: it pulls along the other divergence."""
    value, found = expected("k3_plain")
    torch.testing.assert_close(value, exact(reverse=True)[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, exact(reverse=False)[1], rtol=1e-12, atol=1e-14)
    assert float((found - exact(reverse=True)[1]).abs().max()) > 0.05


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_factor_is_what_it_takes(kind: str) -> None:
    """The estimators as they are often written, by autograd. k1 alone has no gradient in expectation; times
    exp(l − sg(l)) k1 and k3 have the right one, and k2, right without it, has a wrong one."""

    def gradient(with_factor: bool) -> Tensor:
        logits = LOGITS.clone().requires_grad_()
        policy = logits.log_softmax(0)
        x = policy - REFERENCE
        value = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[kind]
        value = value * (policy - policy.detach()).exp() if with_factor else value
        return torch.autograd.grad((policy.detach().exp() * value).sum(), logits)[0]

    right = exact(reverse=True)[1]
    found = expected(kind)[1]
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    with_factor, without = gradient(True), gradient(False)
    torch.testing.assert_close(without if kind == "k2" else with_factor, found, rtol=1e-12, atol=1e-14)
    assert float(((with_factor if kind == "k2" else without) - right).abs().max()) > 0.02
    if kind == "k1":
        assert float(without.abs().max()) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_far_out(kind: str, dtype: torch.dtype) -> None:
    """F12: finite value and gradient, and the gradient pushes back: a policy below its reference goes up."""
    x = torch.tensor([-1000.0, -100.0, -20.0, 0.0, 20.0, 100.0, 1000.0], dtype=dtype)
    reference = torch.zeros_like(x)
    logprobs = x.clone().requires_grad_()
    value = kl_penalty(logprobs, reference, torch.ones_like(x), kind)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    value = value.detach()
    assert value.isfinite().all() and gradient.isfinite().all()
    assert torch.equal(value, kl_values(x, reference, kind))
    if kind != "k1":
        assert (value >= 0).all()
        assert (value[x != 0] > 0).all()
    assert (gradient[x < 0] < 0).all() and (gradient[x > 0] > 0).all()
    assert float(value[3]) == 0
    assert float(gradient[3]) == (1 if kind == "k1" else 0)  # k1's has mean 0 over samples, not on each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k3_is_never_negative_close_to_zero_either(dtype: torch.dtype) -> None:
    x = torch.linspace(-0.1, 0.1, 4001, dtype=torch.float64).to(dtype)
    for kind in ("k3", "k3_plain"):
        assert (kl_values(x, torch.zeros_like(x), kind) >= 0).all()


def test_clamped_after_exp_the_gradient_is_nan() -> None:
    """What F12 is about, in the form that must not be used."""
    x = torch.tensor([-1000.0], requires_grad=True)
    value = ((-x).exp() - 1 + x).clamp(max=10.0)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert float(value.detach()) == 10 and gradient.isnan().all()


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.02, 0.5),  # on target: as it was
        (0.021, 0.5 * (1 + 0.1 * 0.05)),  # 5 % above
        (0.017, 0.5 * (1 - 0.1 * 0.15)),
        (5.0, 0.5 * (1 + 0.1 * 0.2)),  # never by more than a fifth of the step
        (0.0, 0.5 * (1 - 0.1 * 0.2)),
        (-3.0, 0.5 * (1 - 0.1 * 0.2)),  # as k1 can be
    ],
)
def test_the_adaptive_coefficient(kl: float, expected: float) -> None:
    assert adapted_coefficient(0.5, kl, target=0.02, step=0.1) == pytest.approx(expected, rel=1e-12)
