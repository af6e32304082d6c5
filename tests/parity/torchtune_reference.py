"""torchtune's own GAE and whitening. Needs torchtune 0.6, of which one file is loaded by its path: the package itself
needs torchao to be imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from tests.parity.cases import value_rows

VERSION = "0.6"


def installed() -> bool:
    try:
        return distribution("torchtune").version.startswith(f"{VERSION}.")
    except PackageNotFoundError:
        return False


def _rewards() -> Any:
    path = str(distribution("torchtune").locate_file("torchtune/rlhf/rewards.py"))
    spec = spec_from_file_location("torchtune_rewards", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def estimated(gamma: float, lmbda: float) -> dict[str, Any]:
    """`advantages`, whitened, and `returns`, both [rows, tokens]."""
    theirs, (rewards, values, penalties, mask) = _rewards(), value_rows()
    last = (mask.sum(1) - 1).long()
    # kl_coeff · (logprobs − ref_logprobs) is the penalty.
    at_tokens, _, _ = theirs.get_rewards_ppo(rewards, penalties, 0 * penalties, 1.0, last)
    advantages, returns = theirs.estimate_advantages(values, at_tokens, gamma, lmbda, masks=mask.bool())
    return {"advantages": advantages.tolist(), "returns": (returns * mask).tolist()}


def whitened(shift_mean: bool) -> dict[str, Any]:
    """`values` [rows, tokens], 0 outside the mask."""
    _, values, _, mask = value_rows()
    return {"values": (_rewards().whiten(values, mask.bool(), shift_mean=shift_mean) * mask).tolist()}
