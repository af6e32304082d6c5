"""The sampler as a whole: exact, shared, asynchronous, and clear when something goes wrong."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from surefoot.errors import DataError, ModelError, NonFiniteError
from surefoot.generation.batch import SlotBatch
from surefoot.generation.torch_sampler import TorchSampler
from surefoot.types import Completion, Sampling
from tests.generation import kit
from tests.generation.kit import PROMPTS, words

MIXED = [
    words(40, temperature=1.3),
    words(25, temperature=0.7, top_p=0.9),
    words(9, temperature=0.0),
    words(33, temperature=2.0, top_k=5, stop_ids=(kit.END,)),
    words(30, min_p=0.05, stop=("w3 w", "w1")),
    words(1, ban_ids=(7,)),
]


@pytest.fixture
def sampler() -> Iterator[TorchSampler]:
    made = kit.sampler()
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


async def one(of: TorchSampler, group: int, index: int, **options: Any) -> Completion:
    prompt, sampling = PROMPTS[group % len(PROMPTS)], MIXED[group % len(MIXED)]
    given = {"seed": 11, "group": f"e0_d{group}", "index": index, "sampling": sampling, "session": None, **options}
    return await of.generate(prompt, **given)


def together(of: TorchSampler, which: list[tuple[int, int]]) -> dict[tuple[int, int], Completion]:
    async def gather() -> list[Completion]:
        return await asyncio.gather(*(one(of, group, index) for group, index in which))

    return dict(zip(which, asyncio.run(gather()), strict=True))


# ------------------------------------------------------------------------------------------------------------ exactness

ALL = [(group, index) for group in range(16) for index in range(4)]


@pytest.mark.parametrize(
    ("name", "num_threads"), [("untied llama", 1), ("tied qwen3", 1), ("gpt2", 1), ("untied llama", 2), ("gpt2", 2)]
)
def test_a_sample_is_the_same_alone_and_among_64(name: str, num_threads: int, threads: None) -> None:
    """Bit for bit, in tokens and log-probs: alone, among 64 in 64 slots, in another order, and through few slots, which
    it joins and leaves at other times."""
    torch.set_num_threads(num_threads)
    sampler = kit.sampler(kit.model(name))
    assert sampler.exact
    expected = together(sampler, ALL)
    shuffled = random.Random(0).sample(ALL, len(ALL))
    assert together(sampler, shuffled) == expected
    for pair in shuffled[:12]:
        assert together(sampler, [pair]) == {pair: expected[pair]}
    some = shuffled[:17]
    assert together(sampler, some) == {pair: expected[pair] for pair in some}
    sampler.close()
    again = kit.sampler(kit.model(name))  # another cache, at another place in memory
    assert together(again, shuffled) == expected
    again.close()
    assert len({done.ids for done in expected.values()}) > 40


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_a_sample_is_the_same_whenever_it_gets_a_slot(slots: int) -> None:
    sampler, some = kit.sampler(slots=slots), random.Random(0).sample(ALL, 2 + 4 * slots)
    expected = together(sampler, some)
    assert together(sampler, some[::-1]) == expected
    sampler.close()


def test_every_row_count_is_checked_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where 8 and 16 rows give other bits than 64, always 24 or more are computed."""
    from surefoot.generation import choice

    found = choice._alike

    def other_bits(forward: Any, cache: Any, count: int) -> torch.Tensor | None:
        logits = found(forward, cache, count)
        return logits if logits is None or count > 16 else logits.nextafter(torch.tensor(9e9))

    monkeypatch.setattr(choice, "_alike", other_bits)
    sampler = kit.sampler()
    assert sampler._batch._cache.row_counts == [*range(24, 65, 8)]  # type: ignore[union-attr]
    computed = count_rows(sampler, monkeypatch)
    together(sampler, [(0, 0)])
    assert set(computed) == {24}
    sampler.close()


def count_rows(sampler: TorchSampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    batch, rows = sampler._batch, []
    assert isinstance(batch, SlotBatch)
    forward = batch._forward

    def counting(ids: torch.Tensor, *args: Any) -> torch.Tensor:
        if ids.shape[1] == 1:
            rows.append(len(ids))
        return forward(ids, *args)

    monkeypatch.setattr(batch, "_forward", counting)
    return rows


def test_a_machine_that_mixes_rows_is_said_to_be_inexact(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from surefoot.generation import choice

    monkeypatch.setattr(choice, "_alike", lambda *_: None)
    sampler = kit.sampler()
    assert not sampler.exact
    assert "not sampled exactly: on this machine" in caplog.text


def test_the_free_way_gives_the_same_tokens_here(sampler: TorchSampler) -> None:
    """It may differ in the last bits, and with these few tokens that changes no draw."""
    free = kit.sampler(exact=False)
    assert not free.exact
    expected, found = together(sampler, ALL), together(free, ALL)
    for pair, done in found.items():
        assert done.ids == expected[pair].ids
        assert done.logprobs == pytest.approx(expected[pair].logprobs, abs=1e-5)
    free.close()


# --------------------------------------------------------------------------------------------------- groups, the batch


def test_the_prompt_of_a_group_is_computed_once(sampler: TorchSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, ...]] = []
    prefill = SlotBatch._prefill

    def counting(self: SlotBatch, prompts: Any, *args: Any) -> Any:
        computed.extend(prompts)
        return prefill(self, prompts, *args)

    monkeypatch.setattr(SlotBatch, "_prefill", counting)
    made = sampler.generate_many(PROMPTS, seed=0, groups=list("abcdef"), sampling=words(12), samples=20)
    assert sorted(computed) == sorted(tuple(prompt) for prompt in PROMPTS)
    for of_prompt in made:
        assert len({done.ids for done in of_prompt}) == 20  # each its own


def test_requests_join_while_others_run(sampler: TorchSampler) -> None:
    async def late() -> tuple[Completion, Completion, bool]:
        long = asyncio.create_task(sampler.generate([5], seed=1, group="a", index=0, sampling=words(60)))
        while not sampler._batch.active:
            await asyncio.sleep(0)
        short = await sampler.generate([6, 7], seed=1, group="b", index=0, sampling=words(2))
        running = not long.done()
        return await long, short, running

    long, short, running = asyncio.run(late())
    assert (len(long.ids), len(short.ids), running) == (60, 2, True)


def test_the_loop_is_free_while_tokens_are_made(sampler: TorchSampler) -> None:
    async def count() -> int:
        ticks = 0
        work = asyncio.gather(*(one(sampler, group, 0) for group in range(12)))
        while not work.done():
            ticks += 1
            await asyncio.sleep(0)
        await work
        return ticks

    assert asyncio.run(count()) > 20


def test_completions_end_at_the_longest_sequence(sampler: TorchSampler) -> None:
    prompt = list(range(4, 31)) * 2
    (done,) = sampler.generate_many([prompt], seed=0, groups=["a"], sampling=words(1000, ban_ids=(kit.END,)))[0]
    assert (len(done.ids), done.finish_reason) == (kit.LENGTH - len(prompt), "length")
    assert len(done.logprobs) == len(done.ids)


@pytest.mark.parametrize("limit", [17, 40])
def test_any_longest_sequence_will_do(limit: int) -> None:
    """Of a model that has not one position more, in buckets that are longer."""
    sampler = kit.sampler(kit.model("gpt2", n_positions=limit), max_total_sequence_length=limit)
    prompt = [9] * (limit - 1)
    made = sampler.generate_many([prompt, [9]], seed=0, groups=["a", "b"], sampling=words(99))
    assert [len(done.ids) for (done,) in made] == [1, limit - 1]
    found = kit.own_logprobs(kit.model("gpt2", n_positions=limit), [9], made[1][0].ids)
    torch.testing.assert_close(torch.tensor(made[1][0].logprobs), found, atol=1e-5, rtol=0)
    sampler.close()


def test_greedy_takes_the_likeliest(sampler: TorchSampler) -> None:
    of = kit.model()
    for prompt, (done,) in zip(
        PROMPTS,
        sampler.generate_many(PROMPTS, seed=0, groups=list("abcdef"), sampling=words(20, temperature=0.0)),
        strict=True,
    ):
        whole = torch.tensor([[*prompt, *done.ids]])
        with torch.no_grad():
            logits = of(input_ids=whole).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(done.ids)
        torch.testing.assert_close(
            torch.tensor(done.logprobs), kit.own_logprobs(of, prompt, done.ids), atol=1e-5, rtol=0
        )


# ------------------------------------------------------------------------------------------------------------- weights


def doubled(of: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() * 2 for name, parameter in of.named_parameters()}


def test_new_weights_are_taken_whole(sampler: TorchSampler) -> None:
    """Joined inside, they are still assigned one by one; and prompts computed with the old ones are forgotten."""
    of = kit.model()
    before = together(sampler, ALL)
    checksum, weights = sampler.weights_checksum(), doubled(of)
    sampler.assign(weights, 5)
    assert sampler.version == 5
    assert sampler.weights_checksum() != checksum
    with torch.no_grad():
        for name, parameter in of.named_parameters():
            parameter.copy_(weights[name])
    fresh = kit.sampler(of)
    assert fresh.weights_checksum() == sampler.weights_checksum()
    after, expected = together(sampler, ALL), together(fresh, ALL)
    fresh.close()
    assert after != before
    assert {pair: (done.ids, done.logprobs) for pair, done in after.items()} == {
        pair: (done.ids, done.logprobs) for pair, done in expected.items()
    }
    assert {done.version for done in after.values()} == {5}


def test_weights_that_do_not_fit_are_refused_whole(sampler: TorchSampler) -> None:
    weights, checksum = doubled(kit.model()), sampler.weights_checksum()
    name, other = "model.norm.weight", "lm_head.weight"
    for bad, named in [
        ({k: v for k, v in weights.items() if k != name}, f"{name} is missing"),
        ({**weights, "more": weights[name]}, "more is not in this model"),
        ({**weights, name: torch.ones(3)}, rf"{name} is torch.float32 \[3\], not torch.float32 \[16\]"),
        ({**weights, other: weights[other].double()}, f"{other} is torch.float64"),
    ]:
        with pytest.raises(ModelError, match=named):
            sampler.assign(bad, 1)
    assert (sampler.weights_checksum(), sampler.version) == (checksum, 0)


def test_assigning_waits_for_what_was_asked_before_and_holds_what_comes_after(sampler: TorchSampler) -> None:
    """No sample is made with both."""
    weights = doubled(kit.model())
    expected = together(sampler, ALL)

    async def work() -> tuple[list[Completion], list[Completion]]:
        first = asyncio.gather(*(one(sampler, *pair) for pair in ALL))
        await asyncio.sleep(0)
        assigning = asyncio.create_task(asyncio.to_thread(sampler.assign, weights, 1))
        while not sampler._assigning:
            await asyncio.sleep(0)
        second = asyncio.gather(*(one(sampler, *pair) for pair in ALL))
        await assigning
        return list(await first), list(await second)

    first, second = asyncio.run(work())
    assert dict(zip(ALL, first, strict=True)) == expected
    assert {done.version for done in second} == {1}
    assert second == list(together(sampler, ALL).values())


def test_bfloat16_rounds_the_weights_it_gets() -> None:
    sampler = kit.sampler(kit.model().bfloat16())
    assert sampler.exact
    sampler.assign(doubled(kit.model()), 1)
    rounded = kit.model()
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_((parameter * 2).bfloat16())
    found = together(sampler, ALL)
    assert together(sampler, ALL[::-1]) == found
    sampler.close()
    differences = [
        (torch.tensor(done.logprobs) - kit.own_logprobs(rounded, PROMPTS[group % len(PROMPTS)], done.ids, 1.3)).abs()
        for (group, _), done in found.items()
        if MIXED[group % len(MIXED)] is MIXED[0]
    ]
    assert 1e-4 < float(torch.cat(differences).mean()) < 0.1  # real, and small beside the log-probs


# --------------------------------------------------------------------------------------------- mistakes, failures, ends


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "is empty"),
        ([5] * kit.LENGTH, "has 64 tokens"),
        ([5, 999], "has the token 999; the model has only 0 to 31"),
        ([-1], "has the token -1"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(sampler: TorchSampler, prompt: list[int], named: str) -> None:
    with pytest.raises(DataError, match=f"e0_d7.*{named}"):
        sampler.generate_many([prompt], seed=0, groups=["e0_d7"], sampling=words(1))
    assert together(sampler, [(0, 0)])


def test_a_model_that_reads_less_is_refused() -> None:
    with pytest.raises(
        ModelError, match="max_total_sequence_length is 65, but LlamaForCausalLM reads at most 64 tokens"
    ):
        kit.sampler(max_total_sequence_length=65)


def test_a_cache_larger_than_memory_is_refused() -> None:
    with pytest.raises(ModelError, match=r"sequences of 64 tokens needs .* GiB, more than there is"):
        kit.sampler(slots=10**11)


def test_a_failure_reaches_everyone_and_the_next_start_afresh(sampler: TorchSampler) -> None:
    good = doubled(kit.model())
    expected = together(sampler, ALL)
    bad = {**good, "model.norm.weight": torch.full((16,), torch.nan)}
    sampler.assign(bad, 1)

    async def gather() -> list[Any]:
        return await asyncio.gather(*(one(sampler, *pair) for pair in ALL), return_exceptions=True)

    found = asyncio.run(gather())
    assert {type(each) for each in found} == {NonFiniteError}
    sampler.assign({name: tensor / 2 for name, tensor in good.items()}, 0)
    assert together(sampler, ALL) == expected


def test_a_failure_in_mid_batch_reaches_running_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = kit.sampler(slots=4)
    batch, calls = sampler._batch, []
    assert isinstance(batch, SlotBatch)
    forward = batch._forward

    def failing(*args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("the fifth")
        return forward(*args)

    monkeypatch.setattr(batch, "_forward", failing)

    async def gather() -> list[Any]:
        return await asyncio.gather(*(one(sampler, 0, index) for index in range(12)), return_exceptions=True)

    assert [str(each) for each in asyncio.run(gather())] == ["the fifth"] * 12
    assert together(sampler, [(0, 0)])
    sampler.close()


def test_cancelled_requests_leave(sampler: TorchSampler) -> None:
    async def work() -> list[Completion]:
        tasks = [asyncio.create_task(one(sampler, 0, index)) for index in range(8)]
        while not sampler._batch.active:
            await asyncio.sleep(0)
        for task in tasks[:7]:
            task.cancel()
        await asyncio.gather(*tasks[:7], return_exceptions=True)
        return [await tasks[7]]

    expected = together(sampler, [(0, 7)])
    assert asyncio.run(work()) == list(expected.values())
    sampler.close()
    assert not sampler._batch.active


def test_closing_ends_thread_and_waiters() -> None:
    before = set(threading.enumerate())

    async def work() -> Any:
        async with kit.sampler() as sampler:
            task = asyncio.create_task(one(sampler, 0, 0))
            while not sampler._batch.active:
                await asyncio.sleep(0)
            started = time.perf_counter()
        return await asyncio.gather(task, return_exceptions=True), sampler, started

    (found,), sampler, _ = asyncio.run(work())
    assert isinstance(found, RuntimeError | Completion)  # unless it was done first
    assert not {thread for thread in set(threading.enumerate()) - before if thread.name == "surefoot-sampler"}
    sampler.close()
    with pytest.raises(RuntimeError, match="the sampler is closed"):
        sampler.generate_many([[5]], seed=0, groups=["a"], sampling=Sampling(1))
    with pytest.raises(RuntimeError, match="the sampler is closed"):
        sampler.assign(doubled(kit.model()), 1)


def test_a_sampler_that_is_not_used_starts_nothing() -> None:
    before = threading.active_count()
    sampler = kit.sampler()
    assert threading.active_count() == before
    sampler.close()
