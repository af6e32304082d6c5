"""The running batch: requests take a slot when one is free, get a token each turn, and leave when they are done."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.generation.cache import Decode, KVCache, Prefill, arrange, bucket
from surefoot.generation.drawing import Settings, draw, settings_of
from surefoot.generation.forward import Forward
from surefoot.generation.requests import Request

_SMALLEST_KEYS = 32


@dataclass(frozen=True)
class Prompt:
    """A prompt's keys and values, [layers, 2, heads, tokens, head_dim], and the logits after it, [vocabulary]."""

    kv: Tensor
    logits: Tensor


class SlotBatch:
    """Continuous batching over a key-value cache of fixed size. A prompt that several requests share is computed once.

    Args:
        prefill_tokens: short prompts go together up to so many.
        exact: as many go together always, if need be with empty ones.
    """

    def __init__(self, forward: Forward, cache: KVCache, *, prefill_tokens: int, exact: bool) -> None:
        self._forward, self._cache = forward, cache
        self._prefill_tokens, self._exact = prefill_tokens, exact
        self._device = cache.data.device
        self._prompts: OrderedDict[tuple[int, ...], Prompt] = OrderedDict()
        self._settings: Settings | None = None  # of who is active; none where that has changed
        self.version = 0
        self.active: list[Request] = []  # in the order of their slots

    def advance(self, waiting: deque[Request]) -> None:
        """Let in whom there is room for, then give every running request one more token."""
        if any(request.cancelled for request in self.active):
            self._keep([request for request in self.active if not request.cancelled])
        while waiting and len(self.active) < self._cache.slots:
            self._begin(waiting)
        if self.active:
            self._rearrange()
            self._step()

    def forget_prompts(self) -> None:
        """The weights are others now."""
        self._prompts.clear()

    def fail(self, error: BaseException) -> None:
        """Hand the error to every running request and forget what may be broken."""
        for request in self.active:
            request.fail(error)
        self.active.clear()
        self.forget_prompts()
        self._cache.data.zero_()

    # ----------------------------------------------------------------------------------------------- a request's start

    def _begin(self, waiting: deque[Request]) -> None:
        """Take as many requests as there are free slots and draw their first tokens."""
        running, room = self.active, self._cache.slots - len(self.active)
        taken = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        taken = [request for request in taken if not request.cancelled]
        if not taken:
            return
        self._keep(running + taken)  # an error must reach them
        prompts = self._computed([request.prompt for request in taken], waiting)
        for request in taken:
            request.start = prompts[request.prompt].kv
        logits = torch.stack([prompts[request.prompt].logits for request in taken])
        settings = settings_of([request.sampling for request in taken], self._device)
        self._keep(running + self._draw(taken, logits, settings))

    def _computed(self, wanted: Sequence[tuple[int, ...]], waiting: deque[Request]) -> dict[tuple[int, ...], Prompt]:
        """These prompts' keys and logits. Room in a prefill goes to prompts that will be wanted next."""
        found = {prompt: self._prompts[prompt] for prompt in wanted if prompt in self._prompts}
        missing = list(dict.fromkeys(prompt for prompt in wanted if prompt not in found))
        soon = [request.prompt for request in list(waiting)[: 2 * self._cache.slots]] if missing else []
        queue = dict.fromkeys(prompt for prompt in missing + soon if prompt not in self._prompts)
        for prompt in missing:
            if prompt in found:
                continue
            tokens = min(bucket(len(prompt)), self._cache.length)
            rows = max(1, self._prefill_tokens // tokens)
            alike = [other for other in queue if other not in found and bucket(len(other)) == bucket(len(prompt))]
            for other, made in zip(alike[:rows], self._prefill(alike[:rows], rows, tokens), strict=True):
                found[other] = self._prompts[other] = made
        while len(self._prompts) > max(8, self._cache.slots // 4):
            self._prompts.popitem(last=False)
        return found

    def _prefill(self, prompts: Sequence[tuple[int, ...]], rows: int, tokens: int) -> list[Prompt]:
        count = rows if self._exact else len(prompts)
        ids = torch.zeros(count, tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        last = torch.zeros(count, dtype=torch.long)
        last[: len(prompts)] = torch.tensor([len(prompt) - 1 for prompt in prompts])
        positions = torch.arange(tokens).clamp(max=self._cache.limit - 1).expand(count, -1)
        attention = Prefill(count, tokens)
        logits = self._forward(ids.to(self._device), positions.to(self._device), attention, last.to(self._device))
        return [Prompt(attention.kv(row, len(prompt)), logits[row]) for row, prompt in enumerate(prompts)]

    # ----------------------------------------------------------------------------------------------- everyone's step

    def _rearrange(self) -> None:
        """Give everyone a slot beside those of like length, and put new prompts in."""
        long = [request for request in self.active if request.length > request.keys]
        if self._settings is not None and not long:
            return
        for request in long:
            request.keys = min(bucket(request.length, _SMALLEST_KEYS), self._cache.length)
        moves = arrange(self.active)
        self.active.sort(key=lambda request: request.slot)
        if moves:
            self._cache.move(moves, max(self.active[target].keys for _, target in moves))
        for request in self.active:
            if request.start is not None:
                self._cache.load(request.slot, request.start)
                request.start = None
        self._settings = settings_of([request.sampling for request in self.active], self._device)

    def _step(self) -> None:
        assert self._settings is not None
        count = len(self.active)
        idle = [0] * (self._cache.rows_for(count) - count)
        ids = torch.tensor([request.ids[-1] for request in self.active] + idle, device=self._device)
        positions = torch.tensor([request.length - 1 for request in self.active] + idle, device=self._device)
        attention = Decode(self._cache, positions, [request.keys for request in self.active])
        logits = self._forward(ids[:, None], positions[:, None], attention, torch.zeros_like(ids))
        self._keep(self._draw(self.active, logits[:count], self._settings))

    def _keep(self, requests: list[Request]) -> None:
        if len(requests) != len(self.active):
            self._settings = None
        self.active = requests

    def _draw(self, requests: list[Request], logits: Tensor, settings: Settings) -> list[Request]:
        """One token for each. Returns those that need more."""
        uniforms = torch.tensor([request.uniform() for request in requests], dtype=torch.float64, device=self._device)
        ids, logprobs = draw(logits, settings, uniforms)
        drawn = zip(requests, ids.tolist(), logprobs.tolist(), strict=True)
        return [request for request, token, logprob in drawn if not request.add(token, logprob, self.version)]
