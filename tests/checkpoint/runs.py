"""What the checkpoint tests share: managers on a temporary directory, and parts whose content tells their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint import CheckpointManager, LocalReader
from surefoot.types import Sink, Writer


def manager(directory: Path, **settings: Any) -> CheckpointManager:
    """`listener`, `fingerprints` and `run_config_text` go to the manager, the rest to its configuration."""
    mine = {k: settings.pop(k) for k in ("listener", "fingerprints", "run_config_text") if k in settings}
    return CheckpointManager({"checkpoint_dir": str(directory), "save_period": 2, **settings}, **mine)


def weights(step: int, version: int = 0) -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((5, 7), float(step)),
        "version": torch.tensor(version),
        "half": torch.full((3,), 0.5 + step).bfloat16(),
    }


def writers(step: int, version: int = 0) -> dict[str, Writer]:
    tensors = weights(step, version)

    def policy(sink: Sink) -> None:
        sink.tensors("weights/model.safetensors", tensors)
        sink.json("weights/config.json", {"hidden_size": 7})
        sink.json("optimizer/optimizer.json", {"steps": step})

    return {"policy": policy, "clock": lambda sink: sink.json("clock.json", {"step": step})}


def save(of: CheckpointManager, step: int, version: int = 0, **info: Any) -> Path:
    """Save and wait. Returns the checkpoint's path."""
    of.save(step, {"step": step, **info}, writers(step, version))
    of.shutdown()
    return of.checkpoint_dir / f"step_{step}"


def version_of(checkpoint: Path) -> tuple[int, int]:
    """Step and version that the tensors of a checkpoint tell."""
    tensors = LocalReader.open(checkpoint).tensors("policy/weights/model.safetensors")
    assert tensors["w"].unique().numel() == 1
    return int(tensors["w"][0, 0]), int(tensors["version"])


def steps(of: CheckpointManager) -> list[int]:
    return [info.step for info in of.list_checkpoints() if info.state == "complete"]
