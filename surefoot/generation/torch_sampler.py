"""Sampling in this process with PyTorch: the default generator.

One worker thread runs the model; `generate` only puts a request into its queue, so an event loop stays free.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.generation.choice import batch_for
from surefoot.generation.fit import check_length, check_weights
from surefoot.generation.requests import Request, Texts, make_request
from surefoot.types import Completion, Sampling
from surefoot.weights import fingerprint


class TorchSampler:
    """Samples from a Transformers causal language model in a batch that requests join and leave.

    **Exact** (the default): a sample's tokens and log-probs are, bit for bit, a function of the weights, its prompt,
    (seed, group, index) and its sampling settings, on the same machine, with the same number of threads and of slots;
    not of what else is in flight. For this each step computes all `slots`, so take no more than there are samples at a
    time. Models whose layers do not all attend to all that came before (a window that slides within the longest
    sequence, a state space) are sampled in plain batches through `model.generate`, and those that send tokens to
    experts mix rows: neither is exact, and `exact` says so.

    Args:
        model: from here on the sampler's own, in its own dtype; its parameters may be moved in memory.
        weights: the model's tensors by the names that `assign` gets, as `surefoot.engine.folder.weights_by_name` finds
            them; default: by the modules' names, tied ones once.
        tokenizer: needed for stop texts alone. Ids beyond the tokenizer's are sampled as the model has them, since the
            trainer's log-probs count them, too.
        max_total_sequence_length: tokens of prompt and completion together.
        slots: samples running at a time.
        device: default: where the model is.

    Raises:
        ModelError: the model cannot read `max_total_sequence_length` tokens, or the cache does not fit into memory.
    """

    def __init__(
        self,
        model: Any,
        weights: Mapping[str, Tensor] | None = None,
        *,
        max_total_sequence_length: int,
        tokenizer: Any = None,
        slots: int = 64,
        exact: bool = True,
        device: torch.device | None = None,
    ) -> None:
        check_length(model, max_total_sequence_length)
        model.requires_grad_(False).eval()
        named = weights if weights is not None else _by_module(model)
        places = {parameter.data_ptr(): parameter for parameter in model.parameters()}
        if device is not None:
            model.to(device)
        with torch.no_grad():
            self._batch, self.exact = batch_for(model, slots=slots, length=max_total_sequence_length, exact=exact)
        # Parameters may lie elsewhere now.
        self._weights = {name: _now(tensor, places.get(tensor.data_ptr())) for name, tensor in named.items()}
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._max_length = max_total_sequence_length
        self._texts = Texts(tokenizer)
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._held: deque[Request] = deque()  # came while weights are assigned
        self._assigning = 0
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> int:
        return self._batch.version

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
        """Cancelling the call takes the request out of the batch. `session` is not used: there is one batch.

        Raises:
            DataError: the prompt is empty, too long, or has ids that the model lacks.
            ConfigError: a sampling setting is out of range, or stop texts have no tokenizer to find them with.
            NonFiniteError: the model puts out NaN or infinite log-probs; every request in flight gets this.
        """
        request = self._submit(prompt_ids, seed, group, index, sampling)
        return await asyncio.wrap_future(request.future)

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        sampling: Sampling,
        groups: Sequence[str],
        samples: int = 1,
    ) -> list[list[Completion]]:
        """`samples` completions of each prompt, without an event loop. Waits. Raises what `generate` raises.

        Args:
            groups: the name of each prompt's group.
        """
        requests: list[list[Request]] = []
        try:
            for prompt, group in zip(prompts, groups, strict=True):
                requests.append([])
                for index in range(samples):
                    requests[-1].append(self._submit(prompt, seed, group, index, sampling))
            return [[request.future.result() for request in of_prompt] for of_prompt in requests]
        finally:
            for request in (request for of_prompt in requests for request in of_prompt):
                request.future.cancel()  # without effect on those that are done

    def _submit(self, prompt_ids: Sequence[int], seed: int, group: str, index: int, sampling: Sampling) -> Request:
        request = make_request(
            prompt_ids,
            sampling,
            seed=seed,
            group=group,
            index=index,
            texts=self._texts,
            vocabulary=self._vocabulary,
            max_length=self._max_length,
        )
        with self._changed:
            self._require_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="surefoot-sampler", daemon=True)
                self._thread.start()
            (self._held if self._assigning else self._waiting).append(request)
            self._changed.notify_all()
        return request

    def _work(self) -> None:
        """The worker thread: sleeps until there is something to do, then takes one turn at a time."""
        with torch.inference_mode():
            while self._next_turn():
                try:
                    self._batch.advance(self._waiting)
                except BaseException as error:
                    self._fail(error)

    def _next_turn(self) -> bool:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._waiting or self._batch.active)
            self._busy = not self._closed
            return self._busy

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._batch.fail(error)
            for queue in (self._waiting, self._held):
                while queue:
                    queue.popleft().fail(error)

    # --------------------------------------------------------------------------------------------------------- weights

    def assign(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in. Waits until all requests made before are done; those made meanwhile get the new ones.

        Raises:
            ModelError: a name is missing or extra, or a shape or dtype differs; then nothing was assigned. A sampler in
                bfloat16 takes float32 weights, and rounds them.
        """
        check_weights(self._weights, weights)
        with self._changed:
            self._assigning += 1
            try:
                self._changed.wait_for(lambda: self._closed or not (self._busy or self._waiting or self._batch.active))
                self._require_open()
                with torch.no_grad():
                    for name, tensor in self._weights.items():
                        tensor.copy_(weights[name])
                self._batch.forget_prompts()
                self._batch.version = version
            finally:
                self._assigning -= 1
                self._waiting.extend(self._held)
                self._held.clear()
                self._changed.notify_all()

    def weights_checksum(self) -> str:
        return fingerprint(self._weights)

    # ------------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """End the worker thread, after the turn it is in. Requests in flight fail. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._fail(RuntimeError("the sampler was closed"))

    async def __aenter__(self) -> TorchSampler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampler is closed")


def _by_module(model: Any) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(model.state_dict().items())}
    return {name: tensor for name, tensor in model.state_dict().items() if first[tensor.data_ptr()] == name}


def _now(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """What was a view of the whole parameter, where that is now."""
    return parameter.data if parameter is not None and parameter.shape == tensor.shape else tensor
