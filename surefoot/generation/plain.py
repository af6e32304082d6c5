"""Plain batching through `model.generate`, for models whose state is no plain key-value cache: sliding windows, state
spaces. A batch runs until its last request is done; what a request gets depends in the last bits on its neighbours."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from surefoot.generation.drawing import Settings, draw, settings_of
from surefoot.generation.requests import Request


class PlainBatch:
    """The same calls as `SlotBatch`. `generate` runs the model; the tokens are drawn here, and forced upon it."""

    def __init__(self, model: Any, slots: int) -> None:
        self._model, self._slots = model, slots
        model.generation_config = GenerationConfig()  # its folder's own settings would change the logits
        self.version = 0
        self.active: list[Request] = []

    def advance(self, waiting: deque[Request]) -> None:
        """Run a whole batch to its end."""
        taken = [waiting.popleft() for _ in range(min(self._slots, len(waiting)))]
        self.active = [request for request in taken if not request.cancelled]
        if not self.active:
            return
        run = _Run(self.active, self.version, self._model.device)
        width = max(len(request.prompt) for request in self.active)
        ids, mask = torch.zeros(2, len(self.active), width, dtype=torch.long)
        for row, request in enumerate(self.active):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max(request.limit for request in self.active), pad_token_id=0
            ),
            logits_processor=[run.force],
            stopping_criteria=[run.done],
        )
        self.active = []

    def forget_prompts(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        for request in self.active:
            request.fail(error)
        self.active = []


class _Run:
    def __init__(self, requests: list[Request], version: int, device: torch.device) -> None:
        self._requests, self._version, self._device = requests, version, device
        self._settings: Settings = settings_of([request.sampling for request in requests], device)
        self._over = [False] * len(requests)

    def force(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Draw, and leave of the logits only the token drawn."""
        uniforms = torch.tensor(
            [0.0 if over else request.uniform() for request, over in zip(self._requests, self._over, strict=True)],
            dtype=torch.float64,
            device=self._device,
        )
        ids, logprobs = draw(logits, self._settings, uniforms)
        for row, (token, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True)):
            request = self._requests[row]
            if not self._over[row]:
                self._over[row] = request.add(token, logprob, self._version) or request.cancelled
        return torch.zeros_like(logits).scatter_(1, ids[:, None], 1.0)

    def done(self, input_ids: Tensor, scores: Any) -> Tensor:
        return torch.tensor(self._over, device=self._device)
