"""What every generator must keep, whatever computes its tokens. A subclass says in `start` how one is made; pytest then
runs all of this on it, with an untied and a tied model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine.folder import weights_by_name
from surefoot.engine.local import LocalEngine
from surefoot.errors import ConfigError, DataError, ModelError, NonFiniteError
from surefoot.types import Completion, Generator, Sampling
from surefoot.weights import fingerprint
from tests.engine import tiny
from tests.generation import kit

LENGTH = 320
# The longest fills more than one block of any prefix cache.
PROMPTS = [[5], [7, 8, 9], list(range(4, 20)), [30, 6, 11] * 90, list(range(31, 4, -1))]
# Heads of 32, the smallest that vLLM has on a CPU.
SIZES = {"hidden_size": 64, "initializer_range": 0.15, "max_position_embeddings": LENGTH}
MODELS = {"untied": "untied llama", "tied": "tied llama"}


@dataclass
class Pair:
    """A generator, the engine whose weights it got at first, and these weights."""

    generator: Generator
    trained: LocalEngine
    plane: MemoryPlane
    first: dict[str, torch.Tensor]


class GeneratorContract:
    @classmethod
    def start(cls, model: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> Generator:
        """A generator with `weights`, for sequences of `options["max_total_sequence_length"]` tokens, which finds stop
        texts with `options["tokenizer"]`."""
        raise NotImplementedError

    @classmethod
    def made(cls, folder: Path, name: str) -> Pair:
        init = {**tiny.ARCHITECTURES[MODELS[name]], **SIZES}
        trained, plane = tiny.engine(tiny.config(folder, model_init=init, max_total_sequence_length=LENGTH))
        first = {key: tensor.clone() for key, tensor in trained.weights().items()}
        own, _ = tiny.engine(tiny.config(folder, model_init=init, max_total_sequence_length=LENGTH))
        weights = weights_by_name(own.model)
        made = cls.start(own.model, weights, max_total_sequence_length=LENGTH, tokenizer=tiny.TOKENIZER)
        return Pair(made, trained, plane, first)

    @pytest.fixture(scope="class", params=MODELS)
    @classmethod
    def one(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        pair = cls.made(tmp_path_factory.mktemp("generator"), request.param)
        yield pair
        pair.generator.close()

    @pytest.fixture
    def pair(self, one: Pair) -> Pair:
        """With its first weights, whatever the test before has left."""
        with torch.no_grad():
            for name, tensor in one.trained.weights().items():
                tensor.copy_(one.first[name])
        one.generator.assign(one.first, 0)
        return one

    # --------------------------------------------------------------------------------------------- log-probs, weights

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
    def test_logprobs_are_the_trainers_after_each_update(self, pair: Pair, temperature: float) -> None:
        """Also those after a long prompt that was computed with the weights before."""
        sampling, seen = Sampling(24, temperature=temperature), []
        for version in range(4):
            if version:
                step(pair)
                pair.generator.assign(pair.trained.weights(), version)
            assert pair.generator.version == version
            assert pair.generator.weights_checksum() == fingerprint(pair.trained.weights())
            found = sample(pair.generator, sampling)
            assert {done.version for done in found} == {version}
            check_logprobs(pair, found, temperature)
            seen.append(found[3].logprobs)
        assert len(set(seen)) == 4

    def test_weights_that_do_not_fit_are_refused_whole(self, pair: Pair) -> None:
        weights, checksum = dict(pair.trained.weights()), pair.generator.weights_checksum()
        name = "model.norm.weight"
        for bad, named in [
            ({k: v for k, v in weights.items() if k != name}, f"{name} is missing"),
            ({**weights, "more": weights[name]}, "more is not in this model"),
            ({**weights, name: torch.ones(3)}, rf"{name} is torch.float32 \[3\], not torch.float32 \[64\]"),
            ({**weights, name: weights[name].double()}, f"{name} is torch.float64"),
        ]:
            with pytest.raises(ModelError, match=named):
                pair.generator.assign(bad, 1)
        assert (pair.generator.weights_checksum(), pair.generator.version) == (checksum, 0)
        check_logprobs(pair, sample(pair.generator, Sampling(8)), 1.0)

    def test_no_sample_is_made_with_two_weights(self, pair: Pair) -> None:
        """An update waits for those in flight; what is asked for meanwhile gets the new weights."""
        new = {name: tensor * 1.5 for name, tensor in pair.first.items()}

        async def work() -> tuple[list[Completion], list[Completion]]:
            first = [asyncio.create_task(each) for each in calls(pair.generator, Sampling(200))]
            await asyncio.sleep(0.01)
            update = asyncio.create_task(asyncio.to_thread(pair.generator.assign, new, 1))
            await asyncio.sleep(0.01)
            second = [asyncio.create_task(each) for each in calls(pair.generator, Sampling(8))]
            await update
            return list(await asyncio.gather(*first)), list(await asyncio.gather(*second))

        first, second = asyncio.run(work())
        check_logprobs(pair, first, 1.0)
        assert {done.version for done in first} == {0}
        by_version = {version: [d if d.version == version else None for d in second] for version in (0, 1)}
        check_logprobs(pair, by_version[0], 1.0)  # asked for before the update was
        with torch.no_grad():
            for name, tensor in pair.trained.weights().items():
                tensor.copy_(new[name])
        check_logprobs(pair, by_version[1], 1.0)
        check_logprobs(pair, sample(pair.generator, Sampling(8)), 1.0)

    def test_weights_that_are_no_numbers_are_named_and_forgotten(self, pair: Pair) -> None:
        bad = {**pair.first, "model.norm.weight": torch.full((64,), torch.nan)}
        pair.generator.assign(bad, 1)
        with pytest.raises(NonFiniteError, match="the log-prob of the token drawn is nan"):
            sample(pair.generator, Sampling(4))
        pair.generator.assign(pair.first, 2)
        check_logprobs(pair, sample(pair.generator, Sampling(8)), 1.0)

    # -------------------------------------------------------------------------------------------------------- drawing

    def test_samples_follow_from_seed_group_and_index(self, pair: Pair) -> None:
        def ids(**changed: Any) -> list[tuple[int, ...]]:
            return [done.ids for done in sample(pair.generator, Sampling(16, temperature=1.5), **changed)]

        assert ids() == ids()
        different = [ids(), ids(seed=2), ids(group="x"), ids(index=1)]
        for place in range(len(PROMPTS)):
            assert len({each[place] for each in different}) == 4

    def test_samples_are_drawn_from_the_distribution(self, pair: Pair) -> None:
        """χ² of 600 first tokens against the probabilities, over the tokens that are expected 5 times."""
        probs = next_probs(pair, [7, 8, 9], 1.0)
        sampling = Sampling(1)

        async def draw() -> list[Completion]:
            return list(await asyncio.gather(*(call(pair.generator, [7, 8, 9], sampling, index=i) for i in range(600))))

        counts = torch.zeros(len(probs))
        for done in asyncio.run(draw()):
            counts[done.ids[0]] += 1
        likely = probs * 600 >= 5
        expected = torch.cat([probs[likely], probs[~likely].sum()[None]]) * 600
        found = torch.cat([counts[likely], counts[~likely].sum()[None]])
        chi2 = float(((found - expected) ** 2 / expected.clamp(min=1e-9)).sum())
        degrees = int(likely.sum())
        assert chi2 < degrees + 4 * (2 * degrees) ** 0.5

    @pytest.mark.parametrize(
        "settings", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}], ids=str
    )
    def test_truncated_logprobs_are_renormalised(self, pair: Pair, settings: dict[str, Any]) -> None:
        for prompt, done in zip(PROMPTS, sample(pair.generator, Sampling(6, temperature=1.3, **settings)), strict=True):
            for place, token in enumerate(done.ids):
                probs = truncated(next_probs(pair, [*prompt, *done.ids[:place]], 1.3), **settings)
                assert done.logprobs[place] == pytest.approx(float(probs[token].log()), abs=1e-4)

    def test_banned_tokens_never_come(self, pair: Pair) -> None:
        banned = tuple(range(3, 30))
        for done in sample(pair.generator, Sampling(30, ban_ids=banned)):
            assert not set(done.ids) & set(banned)
            assert len(done.ids) == 30

    def test_greedy_takes_the_likeliest(self, pair: Pair) -> None:
        """With others beside it that are drawn; its log-prob is that of temperature 1."""

        async def work() -> list[Completion]:
            greedy, drawn = Sampling(12, temperature=0.0), Sampling(12, temperature=1.5, top_p=0.9)
            both = [call(pair.generator, PROMPTS[1], greedy), *calls(pair.generator, drawn)]
            return list(await asyncio.gather(*both))

        done = asyncio.run(work())[0]
        for place, token in enumerate(done.ids):
            probs = next_probs(pair, [*PROMPTS[1], *done.ids[:place]], 1.0)
            assert token == int(probs.argmax())
            assert done.logprobs[place] == pytest.approx(float(probs[token].log()), abs=1e-5)

    # ----------------------------------------------------------------------------------------------------------- ends

    def test_stop_ids_and_lengths_end_a_completion(self, pair: Pair) -> None:
        stop = tuple(range(4, 12))
        found = sample(pair.generator, Sampling(20, stop_ids=stop))
        for done in found:
            assert not set(done.ids[:-1]) & set(stop)
            assert done.finish_reason == ("stop" if done.ids[-1] in stop else "length")
            assert done.finish_reason == "stop" or len(done.ids) == 20
            assert len(done.ids) == len(done.logprobs)
        assert "stop" in {done.finish_reason for done in found}
        longest = asyncio.run(call(pair.generator, [9] * (LENGTH - 3), Sampling(50)))
        assert (len(longest.ids), longest.finish_reason) == (3, "length")

    def test_the_models_own_end_does_not_end_it(self, pair: Pair) -> None:
        found = [done for index in range(12) for done in sample(pair.generator, Sampling(40), index=index)]
        assert any(kit.END in done.ids[:-1] for done in found)
        assert {len(done.ids) for done in found} == {40}

    def test_stop_texts_end_it_after_the_token_that_completes_one(self, pair: Pair) -> None:
        free = sample(pair.generator, Sampling(30))
        texts = ("w3 w", "w1")
        for done, plain in zip(sample(pair.generator, Sampling(30, stop=texts)), free, strict=True):
            ends = [
                place + 1
                for place in range(30)
                if any(text in tiny.TOKENIZER.decode(plain.ids[: place + 1]) for text in texts)
            ]
            expected = plain.ids[: ends[0]] if ends else plain.ids
            assert done.ids == expected
            assert done.finish_reason == ("stop" if ends else "length")
            assert done.logprobs == pytest.approx(plain.logprobs[: len(expected)], abs=1e-5)

    # ------------------------------------------------------------------------------------------------ mistakes, leaving

    @pytest.mark.parametrize(
        ("prompt", "named"),
        [
            ([], "is empty"),
            ([5] * LENGTH, f"has {LENGTH} tokens"),
            ([5, 999], "has the token 999; the model has only 0 to 31"),
            ([-1], "has the token -1"),
        ],
        ids=["empty", "long", "unknown", "negative"],
    )
    def test_prompts_that_cannot_be_read_are_named(self, pair: Pair, prompt: list[int], named: str) -> None:
        with pytest.raises(DataError, match=f"e0_d7.*{named}"):
            asyncio.run(call(pair.generator, prompt, Sampling(1), group="e0_d7"))

    def test_settings_out_of_range_are_named(self, pair: Pair) -> None:
        for sampling, named in [
            (Sampling(0), "max_new_tokens 0"),
            (Sampling(1, temperature=-1.0), "temperature -1.0"),
            (Sampling(1, stop_ids=(99,)), "the model has no token 99"),
        ]:
            with pytest.raises(ConfigError, match=named):
                asyncio.run(call(pair.generator, [5], sampling))

    def test_cancelled_calls_leave_and_hurt_nobody(self, pair: Pair) -> None:
        async def work() -> Completion:
            tasks = [asyncio.create_task(each) for each in calls(pair.generator, Sampling(200))]
            await asyncio.sleep(0.02)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            return await tasks[0]

        done = asyncio.run(work())
        assert len(done.ids) == 200
        check_logprobs(pair, [done, *[None] * (len(PROMPTS) - 1)], 1.0)
        pair.generator.assign(pair.first, 1)  # waits for nobody

    def test_after_closing_it_says_so(self, tmp_path: Path) -> None:
        pair = self.made(tmp_path, "untied")

        async def work() -> list[Any]:
            tasks = [asyncio.create_task(each) for each in calls(pair.generator, Sampling(250))]
            await asyncio.sleep(0.02)
            await asyncio.to_thread(pair.generator.close)
            return await asyncio.gather(*tasks, return_exceptions=True)

        for found in asyncio.run(work()):
            assert isinstance(found, RuntimeError | Completion)  # unless it was done first
        pair.generator.close()
        with pytest.raises(RuntimeError, match="the sampler is closed"):
            sample(pair.generator, Sampling(1))
        with pytest.raises(RuntimeError, match="the sampler is closed"):
            pair.generator.assign(pair.first, 1)


# ------------------------------------------------------------------------------------------------------------- helpers


async def call(of: Generator, prompt: Sequence[int], sampling: Sampling, **changed: Any) -> Completion:
    given: dict[str, Any] = {"seed": 1, "group": "e0_d0", "index": 0, "session": None, **changed}
    return await of.generate(prompt, sampling=sampling, **given)


def calls(of: Generator, sampling: Sampling, **changed: Any) -> list[Any]:
    """One for each prompt."""
    name = changed.pop("group", "e0_d")
    return [call(of, prompt, sampling, group=f"{name}{i}", **changed) for i, prompt in enumerate(PROMPTS)]


def sample(of: Generator, sampling: Sampling, **changed: Any) -> list[Completion]:
    async def gather() -> list[Completion]:
        found = await asyncio.gather(*calls(of, sampling, **changed), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return list(found)  # type: ignore[arg-type]

    return asyncio.run(gather())


def step(pair: Pair) -> None:
    """One optimizer step on random rows."""
    ref = tiny.rows(pair.plane, [12] * 8)
    pair.trained.train(ref, tiny.NLL_OBJECTIVE)
    pair.plane.drop(ref)


def check_logprobs(pair: Pair, found: Sequence[Completion | None], temperature: float) -> None:
    """Against the engine's own, those that are there."""
    there = [(prompt, done) for prompt, done in zip(PROMPTS, found, strict=True) if done is not None]
    if not there:
        return
    prompts, completions = [prompt for prompt, _ in there], [done for _, done in there]
    expected = kit.engine_logprobs(pair.trained, pair.plane, prompts, completions, temperature)
    for done, row in zip(completions, expected, strict=True):
        torch.testing.assert_close(torch.tensor(done.logprobs), row, atol=2e-5, rtol=0)


def next_probs(pair: Pair, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Of the token after these, [vocabulary], by the trained model itself."""
    model = pair.trained.model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, -1]
    return (logits.float() / temperature).softmax(-1)


def truncated(probs: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """By its definition, token by token from the likeliest on."""
    order = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    order = order[:top_k] if top_k else order
    mass, kept, total = 0.0, [], float(sum(probs[token] for token in order))
    for token in order:
        if mass >= top_p or float(probs[token]) < min_p * float(probs[order[0]]):
            break
        kept.append(token)
        mass += float(probs[token]) / total
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()
