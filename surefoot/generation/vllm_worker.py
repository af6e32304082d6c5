"""What Surefoot adds to vLLM's worker; vLLM imports it by name, in the process of its engine."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from safetensors.torch import load_file

from surefoot.weights import fingerprint

_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h


class WeightUpdates:
    """Mixed into vLLM's worker class, which has `model_runner` and `reload_weights`."""

    model_runner: Any

    def surefoot_stay_with(self, parent: int) -> None:
        """The engine ends with the run's process, however that ends, and leaves Ctrl-C in the terminal to it."""
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before it could be asked for
            os._exit(1)

    def surefoot_load_weights(self, path: str) -> str:
        """Load the file into the live model. Returns the checksum of what came.

        vLLM loads a tied matrix once, into the embedding, and leaves what it has made of it for the head (on a CPU, a
        packed copy) as it was; so that is made anew.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        weights = load_file(path)
        self.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        return fingerprint(weights)
