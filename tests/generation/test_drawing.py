"""From logits to tokens: the distribution is the one promised, and a row depends on nothing but itself."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.errors import ConfigError
from surefoot.generation.drawing import check_sampling, draw, settings_of
from surefoot.types import Sampling

CPU = torch.device("cpu")
PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def drawn(logits: torch.Tensor, samplings: list[Sampling], uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(logits.clone(), settings_of(samplings, CPU), uniforms)


def grid(count: int) -> torch.Tensor:
    """Uniform numbers that fall evenly: what is drawn with them has the very probabilities, to 1 / count."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def frequencies(logits: torch.Tensor, sampling: Sampling, count: int = 10_000) -> torch.Tensor:
    rows = logits.expand(count, -1)
    ids, logprobs = drawn(rows, [sampling] * count, grid(count))
    shares = torch.bincount(ids, minlength=logits.shape[-1]) / count
    # The log-prob returned is that of the distribution drawn from.
    for token in ids.unique():
        assert shares[token] == pytest.approx(float(logprobs[ids == token][0].exp()), abs=2 / count)
    return shares


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0025]),  # squared, and renormalised below
        ({"top_k": 2}, [0.4, 0.3, 0, 0, 0]),
        ({"top_p": 0.7}, [0.4, 0.3, 0, 0, 0]),  # 0.4 + 0.3 reaches it
        ({"top_p": 0.71}, [0.4, 0.3, 0.15, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.3}, [0.4, 0.3, 0.15, 0, 0]),  # at least 0.12
        ({"top_k": 4, "top_p": 0.8}, [0.4, 0.3, 0.15, 0, 0]),  # of 0.95: 0.42, 0.74, 0.89
        ({"top_k": 99}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"ban_ids": (0, 3)}, [0, 0.3, 0.15, 0, 0.05]),
        ({"ban_ids": (0,), "top_k": 1}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.0}, None),
    ],
)
def test_the_distribution_is_the_one_asked_for(options: dict[str, object], expected: list[float] | None) -> None:
    sampling = Sampling(max_new_tokens=1, **options)  # type: ignore[arg-type]
    if expected is None:  # greedy: not drawn; the log-prob is the model's at temperature 1
        ids, logprobs = drawn(PROBS.log().expand(50, -1), [sampling] * 50, grid(50))
        assert ids.tolist() == [0] * 50
        assert logprobs.exp().tolist() == pytest.approx([0.4] * 50)
        return
    wanted = torch.tensor(expected) / sum(expected)
    # top_p 0.7 stands on the very edge of 0.4 + 0.3, which float rounds: nudge it off.
    logits = torch.tensor([0.4001, 0.2999, 0.15, 0.1, 0.05]).log() if options.get("top_p") == 0.7 else PROBS.log()
    torch.testing.assert_close(frequencies(logits, sampling), wanted, atol=3e-4, rtol=0)


def test_equal_logits_are_cut_at_exactly_k() -> None:
    logits = torch.zeros(6)
    torch.testing.assert_close(
        frequencies(logits, Sampling(max_new_tokens=1, top_k=4), 1000), torch.tensor([0.25] * 4 + [0.0, 0.0])
    )


def test_a_wide_vocabulary_is_drawn_from_as_a_narrow_one() -> None:
    """Summed in blocks, the last of them not full."""
    logits = torch.randn(3001, generator=torch.Generator().manual_seed(0)) * 2
    logits[700:1500] = -math.inf
    found = frequencies(logits, Sampling(max_new_tokens=1), 5000)
    torch.testing.assert_close(found, logits.softmax(-1), atol=4e-4, rtol=0)


@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_what_is_impossible_is_never_drawn(vocabulary: int) -> None:
    logits = torch.full((4, vocabulary), -math.inf)
    possible = [0, 2, vocabulary // 2, vocabulary - 2]
    logits[:, possible] = torch.tensor([0.0, -3.0, -30.0, 1.0])
    uniforms = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    ids, logprobs = drawn(logits, [Sampling(max_new_tokens=1)] * 4, uniforms)
    assert set(ids.tolist()) <= set(possible)
    assert bool(logprobs.isfinite().all())
    assert (int(ids[0]), int(ids[-1])) == (possible[0], possible[-1])


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(32, 1500, generator=generator) * 3
    uniforms = torch.rand(32, dtype=torch.float64, generator=generator)
    kinds = [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"temperature": 0.0},
        {"top_k": 9, "min_p": 0.01},
        {"ban_ids": (7,)},
    ]
    samplings = [Sampling(max_new_tokens=1, **kinds[i % len(kinds)]) for i in range(32)]  # type: ignore[arg-type]
    ids, logprobs = drawn(logits, samplings, uniforms)
    for row in range(32):
        one = slice(row, row + 1)
        alone = drawn(logits[one], samplings[one], uniforms[one])
        assert (alone[0].item(), alone[1].item()) == (ids[row].item(), logprobs[row].item())


@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_a_row_without_a_distribution_says_so(vocabulary: int) -> None:
    logits = torch.zeros(3, vocabulary)
    logits[0, 1] = math.nan
    logits[1] = -math.inf
    _, logprobs = drawn(logits, [Sampling(max_new_tokens=1)] * 3, torch.full((3,), 0.5, dtype=torch.float64))
    assert logprobs.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"stop": ("a", "")}, "an empty text"),
        ({"stop_ids": (10,)}, "stop_ids: the model has no token 10, only 0 to 9"),
        ({"ban_ids": (-1,)}, "ban_ids: the model has no token -1"),
        ({"ban_ids": tuple(range(10))}, "every token"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_sampling(Sampling(**{"max_new_tokens": 1, **options}), 10)  # type: ignore[arg-type]
