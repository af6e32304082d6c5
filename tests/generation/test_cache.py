"""Slots: everyone beside those of like length, and nobody moved without need."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.generation.cache import Decode, KVCache, arrange, bucket
from surefoot.generation.requests import Request
from surefoot.types import Sampling

CPU = torch.device("cpu")


def request(keys: int, slot: int = -1) -> Request:
    return Request((1,), Sampling(1), 1, lambda: 0.5, None, slot=slot, keys=keys)


def test_buckets() -> None:
    edges = sorted({bucket(n) for n in range(1, 1000)})
    assert edges == [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert sorted({bucket(n, 32) for n in range(1, 200)}) == [32, 64, 96, 128, 192, 256]
    assert all(n <= bucket(n) and bucket(n) % 16 == 0 for n in range(1, 3000))


def test_the_longest_come_first_and_most_stay() -> None:
    rows = [request(64, 0), request(64, 1), request(32, 2), request(32, 3), request(32, 4)]
    assert arrange(rows) == []
    rows[2].keys = 64  # the next in line grows: it is where it belongs already
    assert arrange(rows) == []
    rows[4].keys = 64  # the last grows, and changes places with the first of the short ones
    assert sorted(arrange(rows)) == [(3, 4), (4, 3)]
    del rows[0]  # its slot is filled from its own bucket's end, and that from the next one's
    assert sorted(arrange(rows)) == [(3, 0), (4, 3)]


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_moves_carry_everyones_keys_along(rng: random.Random) -> None:
    """Requests come, grow and go; what each has written stays its own."""
    slots = 9
    cache = KVCache(2, slots, 1, 96, 4, torch.float32, CPU)
    active: list[Request] = []
    marks: dict[int, float] = {}
    for turn in range(12):
        active = [row for row in active if rng.random() > 0.2]
        for row in active:
            row.keys = min(96, row.keys * 2) if rng.random() < 0.2 else row.keys
        new = [request(rng.choice([16, 32])) for _ in range(rng.randint(0, slots - len(active)))]
        active += new
        moves = arrange(active)
        active.sort(key=lambda row: row.slot)
        assert [row.slot for row in active] == list(range(len(active)))
        assert sorted(row.keys for row in active)[::-1] == [row.keys for row in active]
        if moves:
            cache.move(moves, max(active[target].keys for _, target in moves))
        for row in new:
            marks[id(row)] = turn + rng.random()
            cache.load(row.slot, torch.full((2, 2, 1, 16, 4), marks[id(row)]))
        for row in active:
            assert bool((cache.data[:, :, row.slot, :, :16] == torch.tensor(marks[id(row)])).all())


def test_attention_is_over_ones_own_tokens() -> None:
    """Against the formula, written out for each row; two buckets, one idle row, two query heads to each key head."""
    generator = torch.Generator().manual_seed(0)

    def random_numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cache = KVCache(1, 8, 2, 64, 8, torch.float32, CPU)
    cache.data.copy_(random_numbers(*cache.data.shape))
    positions = torch.tensor([40, 33, 63, 3, 15, 0, 9, 0])
    q, kv = random_numbers(8, 4, 8), random_numbers(8, 4, 8)
    for counts in ([8], [2, 4, 8]):
        cache.row_counts = counts
        found = Decode(cache, positions, [64, 64, 64, 32, 32, 32, 32])(0, q, kv, 0.3)
        for row, last in enumerate(positions[:7].tolist()):
            for head in range(4):
                keys, values = cache.data[0, :, row, head // 2, : last + 1]
                assert torch.equal(torch.stack((keys[-1], values[-1])), kv[row, [head // 2, 2 + head // 2]])
                weights = (0.3 * keys @ q[row, head]).softmax(0)
                torch.testing.assert_close(found.view(8, 4, 8)[row, head], weights @ values)
        assert not found[7].any()
