"""What every generator must keep. The folder `surefoot/generation` is listed: a class there with the methods of a
`Generator` fails the first test until `CASES` says in one line how to make a tiny one."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot.generation
from surefoot.errors import ConfigError, DataError, ModelError, SurefootError
from surefoot.types import Completion, Generator, Sampling
from tests.generation import kit
from tests.generation.kit import END, LENGTH, PROMPTS, own_logprobs

Make = Callable[[Any], Generator]  # from a Transformers model, which becomes its own; `kit.LENGTH` tokens at most

# Case -> the class, how to make one, and what changes of the model that it samples from.
CASES: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "torch": ("TorchSampler", kit.sampler, {}),
    "torch, tied": ("TorchSampler", kit.sampler, {"tie_word_embeddings": True}),
    "torch, few slots": ("TorchSampler", lambda of: kit.sampler(of, slots=3), {}),
    "torch, inexact": ("TorchSampler", lambda of: kit.sampler(of, exact=False), {}),
    "torch, plain batches": ("TorchSampler", kit.sampler, {"model_type": "mistral", "sliding_window": 8}),
}
CLOSE = 1e-4  # log-probs of another forward, in float32


def test_every_generator_has_a_case() -> None:
    needed = {name for name, member in vars(Generator).items() if callable(member) and not name.startswith("_")}
    found = set()
    for file in Path(surefoot.generation.__path__[0]).glob("*.py"):  # read, not imported: some need an extra
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                found |= {node.name} if needed <= methods else set()
    assert found == {name for name, _, _ in CASES.values()}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model(case: str) -> Any:
    return kit.model("untied llama", **CASES[case][2])


@pytest.fixture
def made(case: str) -> Iterator[Generator]:
    generator = CASES[case][1](model(case))
    yield generator
    generator.close()


def sampled(
    of: Generator, sampling: Sampling, *, samples: int = 1, seed: int = 1, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[Completion]:
    """The samples of each prompt in a row, all asked for together."""

    async def gather() -> list[Completion]:
        calls = (
            of.generate(prompt, seed=seed, group=f"e0_d{i}", index=index, sampling=sampling, session=None)
            for i, prompt in enumerate(prompts)
            for index in range(samples)
        )
        return await asyncio.gather(*calls)

    return asyncio.run(gather())


def after(of: Any, seen: Sequence[int]) -> torch.Tensor:
    """Log-probs [vocabulary] of what comes next, by Transformers alone."""
    with torch.no_grad():
        logits: torch.Tensor = of(input_ids=torch.tensor([list(seen)]), use_cache=False).logits[0, -1]
    return logits.log_softmax(-1)


# ---------------------------------------------------------------------------------------------------- what it samples


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_log_probs_are_those_of_the_distribution_sampled_from(made: Generator, case: str, temperature: float) -> None:
    """Of Transformers' own forward over prompt and completion, at the temperature."""
    of = model(case)
    for prompt, done in zip(PROMPTS, sampled(made, Sampling(12, temperature=temperature)), strict=True):
        assert len(done.ids) == len(done.logprobs) == 12
        assert done.logprobs == pytest.approx(own_logprobs(of, prompt, done.ids, temperature).tolist(), abs=CLOSE)
        assert (done.finish_reason, done.version) == ("length", 0)


def test_tokens_come_as_often_as_they_are_likely(made: Generator, case: str) -> None:
    first = [done.ids[0] for done in sampled(made, Sampling(1), samples=600, prompts=[[7, 8, 9]])]
    likely = after(model(case), [7, 8, 9]).exp()
    found = torch.bincount(torch.tensor(first), minlength=len(likely)) / 600
    assert float((found - likely).abs().sum() / 2) < 0.12  # 0.04 to 0.09 by chance


def test_top_k_and_top_p_renormalise(made: Generator, case: str) -> None:
    of = model(case)
    for prompt, done in zip(PROMPTS, sampled(made, Sampling(4, top_k=3)), strict=True):
        for place, (token, logprob) in enumerate(zip(done.ids, done.logprobs, strict=True)):
            likely = after(of, [*prompt, *done.ids[:place]])
            best = likely.topk(3)
            assert token in best.indices.tolist()
            assert logprob == pytest.approx(float(likely[token] - best.values.logsumexp(0)), abs=CLOSE)
    assert [c.ids for c in sampled(made, Sampling(6, top_p=1e-9))] == [
        c.ids for c in sampled(made, Sampling(6, temperature=0))
    ]


def test_greedy_takes_the_likeliest_and_says_how_likely_it_was(made: Generator, case: str) -> None:
    of = model(case)
    for prompt, done in zip(PROMPTS, sampled(made, Sampling(5, temperature=0)), strict=True):
        for place, token in enumerate(done.ids):
            assert int(after(of, [*prompt, *done.ids[:place]]).argmax()) == token
        assert done.logprobs == pytest.approx(own_logprobs(of, prompt, done.ids).tolist(), abs=CLOSE)


def test_a_draw_follows_from_seed_group_and_index(made: Generator) -> None:
    """Whatever else is in flight; its tokens here, for what is exact in the last bit is each generator's own."""
    sampling = Sampling(16)
    expected = sampled(made, sampling, samples=8)
    ids = [done.ids for done in expected]
    assert [done.ids for done in sampled(made, sampling, samples=8)] == ids
    assert [done.ids for done in sampled(made, sampling)] == ids[::8]
    assert all(a != b for a, b in zip(ids, [d.ids for d in sampled(made, sampling, samples=8, seed=2)], strict=True))
    assert len(set(ids)) == len(ids)


# ------------------------------------------------------------------------------------------------------- when it ends


def test_a_stop_id_is_the_last_token(made: Generator) -> None:
    stops = (END, 9, 14, 20)
    ended = 0
    for done in sampled(made, Sampling(24, stop_ids=stops), samples=4):
        assert not set(done.ids[:-1]) & set(stops)
        assert done.finish_reason == ("stop" if done.ids[-1] in stops else "length")
        ended += done.finish_reason == "stop"
    assert ended > 12


def test_a_stop_text_ends_it_and_bans_are_kept(made: Generator) -> None:
    free = sampled(made, Sampling(24), samples=4)
    for done, before in zip(sampled(made, Sampling(24, stop=("w5", "w17 w")), samples=4), free, strict=True):
        assert before.ids[: len(done.ids)] == done.ids
        text = kit.tiny.TOKENIZER.decode(done.ids)
        assert ("w5" in text or "w17 w" in text) == (done.finish_reason == "stop")
    assert not any(set(done.ids) & {5, 6, 7} for done in sampled(made, Sampling(24, ban_ids=(5, 6, 7)), samples=4))


def test_the_longest_sequence_ends_it(made: Generator) -> None:
    (done,) = sampled(made, Sampling(1000), prompts=[[5] * (LENGTH - 3)])
    assert (len(done.ids), done.finish_reason) == (3, "length")


# ------------------------------------------------------------------------------------------------------------- weights


def test_new_weights_are_sampled_with(made: Generator, case: str) -> None:
    of, before = model(case), made.weights_checksum()
    first = [done.ids for done in sampled(made, Sampling(10), samples=2)]
    old = {name: weight.detach().clone() for name, weight in of.named_parameters()}
    with torch.no_grad():
        for weight in of.parameters():
            weight.mul_(1.5)
    made.assign({name: weight.detach() for name, weight in of.named_parameters()}, 3)
    assert made.version == 3 and made.weights_checksum() != before
    for prompt, done in zip(PROMPTS, sampled(made, Sampling(10)), strict=True):
        assert done.version == 3
        assert done.logprobs == pytest.approx(own_logprobs(of, prompt, done.ids).tolist(), abs=CLOSE)
    made.assign(old, 4)
    assert made.weights_checksum() == before
    assert [done.ids for done in sampled(made, Sampling(10), samples=2)] == first


def test_weights_that_do_not_fit_are_refused(made: Generator, case: str) -> None:
    weights = {name: weight.detach() * 2 for name, weight in model(case).named_parameters()}
    name, before = next(iter(weights)), made.weights_checksum()
    for wrong in (
        {key: value for key, value in weights.items() if key != name},
        {**weights, "another": weights[name]},
        {**weights, name: weights[name][:-1]},
    ):
        with pytest.raises(ModelError, match=rf"do not fit.*({name}|another)"):
            made.assign(wrong, 1)
    assert (made.version, made.weights_checksum()) == (0, before)


# ------------------------------------------------------------------------------------------------ what is refused, end


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind"),
    [
        ([], Sampling(4), DataError),
        ([5] * LENGTH, Sampling(4), DataError),
        ([5, 1000], Sampling(4), DataError),
        ([5], Sampling(0), ConfigError),
        ([5], Sampling(4, temperature=-1.0), ConfigError),
        ([5], Sampling(4, top_p=0.0), ConfigError),
        ([5], Sampling(4, stop_ids=(1000,)), ConfigError),
        ([5], Sampling(4, stop=("",)), ConfigError),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_the_next_goes_on(
    made: Generator, prompt: list[int], sampling: Sampling, kind: type[SurefootError]
) -> None:
    with pytest.raises(kind):
        sampled(made, sampling, prompts=[prompt])
    assert len(sampled(made, Sampling(2), prompts=[[5]])[0].ids) == 2


def test_it_closes_twice(made: Generator) -> None:
    sampled(made, Sampling(2))
    made.close()
    made.close()
