"""The real vLLM, on a CPU: `make test-vllm` makes the environment that this needs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see `make test-vllm`", allow_module_level=True)

from surefoot import loop
from surefoot.engine.folder import weights_by_name
from surefoot.errors import ConfigError, ModelError, RolloutError
from surefoot.generation.vllm import VLLMSampler
from surefoot.types import Sampling
from surefoot.weights import fingerprint
from tests.contract.generator_contract import PROMPTS, GeneratorContract, Pair, call, sample
from tests.generation import kit
from tests.helpers import runs
from tests.helpers.memory_path import memory_path

__all__ = ["memory_path"]


def model(name: str = "untied llama", **settings: Any) -> Any:
    return kit.model(name, **{"n_embd" if name == "gpt2" else "hidden_size": 64, "initializer_range": 0.15, **settings})


def sampler(of: Any = None, **options: Any) -> VLLMSampler:
    of = model() if of is None else of
    options = {"max_total_sequence_length": kit.LENGTH, "slots": 8, "kv_cache_gib": 0.05, **options}
    return VLLMSampler(of, weights_by_name(of), **options)


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True) if "resource_tracker" not in _command(each)}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class TestVLLMSampler(GeneratorContract):
    @classmethod
    def start(cls, model: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> VLLMSampler:
        return VLLMSampler(model, weights, slots=16, kv_cache_gib=0.1, **options)

    def test_settings_that_vllm_would_change_are_refused(self, pair: Pair) -> None:
        for sampling, named in [
            (Sampling(1, temperature=0.001), "from 0.01 to 2, or at 0, found 0.001"),
            (Sampling(1, temperature=2.5), "from 0.01 to 2, or at 0, found 2.5"),
            (Sampling(1, top_p=0.9, min_p=0.1), "min_p before top_p"),
        ]:
            with pytest.raises(ConfigError, match=named):
                asyncio.run(call(pair.generator, [5], sampling))

    def test_a_sample_is_the_same_alone_but_for_rounding(self, pair: Pair) -> None:
        """Which changes no draw of so few tokens."""
        together = sample(pair.generator, Sampling(20))
        for i, (prompt, done) in enumerate(zip(PROMPTS, together, strict=True)):
            alone = asyncio.run(call(pair.generator, prompt, Sampling(20), group=f"e0_d{i}"))
            assert alone.ids == done.ids
            assert alone.logprobs == pytest.approx(done.logprobs, abs=1e-5)


def test_nothing_is_left_behind() -> None:
    """No process, and no setting of vLLM's for the processes that come later."""
    before, environment = children(), dict(os.environ)
    made = sampler()
    (engine,) = children() - before
    assert os.getpgid(engine) == engine  # Ctrl-C in the terminal is not for it
    assert dict(os.environ) == environment
    made.close()
    assert children() == before


def test_a_model_that_vllm_cannot_run_is_an_error_and_leaves_nothing() -> None:
    before = children()
    with pytest.raises(ModelError, match="vLLM cannot run a LlamaForCausalLM"):
        sampler(kv_cache_gib=1e-6)
    assert children() == before


def test_the_engine_ends_with_a_killed_run(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from tests.vllm import test_vllm\n"
        "if __name__ == '__main__':\n"
        "    made = test_vllm.sampler()\n"
        "    print(*test_vllm.children(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        engines = [int(pid) for pid in run.stdout.readline().split()]
        run.send_signal(signal.SIGKILL)
        assert len(engines) == 1
    while any(psutil.pid_exists(pid) for pid in engines):
        time.sleep(0.05)


def test_an_engine_that_dies_is_an_error() -> None:
    made = sampler()

    async def work() -> None:
        task = asyncio.create_task(call(made, [5], Sampling(60)))
        await asyncio.sleep(0)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        await task
        await call(made, [5], Sampling(60))

    with pytest.raises(RolloutError, match="vLLM did not complete a prompt of 1 tokens: EngineDeadError"):
        asyncio.run(work())
    made.close()


def test_bfloat16_rounds_the_weights_it_gets() -> None:
    made = sampler(model().bfloat16(), max_total_sequence_length=kit.LENGTH)
    weights = {name: tensor * 2 for name, tensor in weights_by_name(model()).items()}
    made.assign(weights, 1)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert made.weights_checksum() == fingerprint(rounded)
    of = model()
    with torch.no_grad():
        for name, tensor in weights_by_name(of).items():
            tensor.copy_(rounded[name])
    done = asyncio.run(call(made, [7, 8, 9], Sampling(40)))
    made.close()
    difference = (torch.tensor(done.logprobs) - kit.own_logprobs(of, [7, 8, 9], done.ids)).abs()
    assert 1e-4 < float(difference.mean()) < 0.1  # real, and small beside the log-probs


@pytest.mark.parametrize("name", ["tied qwen3", "gpt2"])
def test_other_models_follow_their_updates(name: str) -> None:
    of = model(name)
    made = sampler(of)
    for version in range(1, 3):
        with torch.no_grad():
            for parameter in of.parameters():
                parameter.mul_(1.1)
        made.assign(weights_by_name(of), version)
        done = asyncio.run(call(made, [7, 8, 9], Sampling(40)))
        found = kit.own_logprobs(of, [7, 8, 9], done.ids)
        torch.testing.assert_close(torch.tensor(done.logprobs), found, atol=2e-5, rtol=0)
    made.close()


def test_grpo_trains_on_what_it_samples(memory_path: Path) -> None:
    """The whole run: weights published each step, checksums compared, and the sampler is the trainer to rounding."""
    before = children()
    options = ("generation.backend=vllm", "generation.exact=false", "generation.kv_cache_gib=0.05")
    options += ("policy.model_init.hidden_size=128",)  # heads of 32
    run = runs.started(runs.write_project(memory_path, case="grpo"), *options, "max_num_steps=4", "val_period=2")
    loop.train(run)
    lines = [line for line in runs.metric_lines(memory_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["generator_mismatch/max"] < 1e-4 for line in lines), json.dumps(lines)
    assert children() <= before
