"""The demo's folder: an earlier demo is moved aside, then data, a tokenizer and a configuration are put there."""

from __future__ import annotations

import fcntl
import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml

from surefoot.checkpoint.commit import set_aside
from surefoot.demo import task
from surefoot.errors import SurefootError

MARKER = ".surefoot_demo"
NUM_STEPS = 1200
SAVE_PERIOD = 100

_CONFIG = """\
# Supervised fine-tuning of a small Llama, from random weights, on sums such as 47+85=132.
#
#   surefoot config check {config}
#   surefoot train {config} run_dir={again}
#   surefoot train {config} run_dir={again} seed=1 policy.optimizer.lr=3e-3
#
# `surefoot config show {config}` prints every key there is, with its value.

algorithm: sft
run_dir: {run_dir}               # the run's one folder: config.yaml, metrics.jsonl, checkpoints/
seed: {seed}                           # every random choice follows from it
max_num_steps: {num_steps}
val_period: {save_period}                    # steps; validation rows are never trained

policy:
  # Random weights. To fine-tune a model that you have, put `model_name: <folder>` in place of model_init and leave
  # the tokenizer out: the model's own is taken.
  model_init:
{model_init}
  tokenizer:
    name: {tokenizer}
  train_global_batch_size: 32      # rows of one step
  train_micro_batch_size: 32       # rows in memory at once; another number gives the same gradient
  max_total_sequence_length: 64    # tokens; the longest row here has 14
  max_grad_norm: 1.0
  num_threads: 1                   # of this process; two runs side by side are fastest with one each
  optimizer:
    lr: 1.5e-3
    beta2: 0.98
    weight_decay: 0.1
  scheduler:
    name: cosine                   # down to zero at the last step
    warmup_steps: 50

data:
  train:
    path: {train}    # one chat per line: {{"messages": [{{"role": …, "content": …}}, …]}}
  validation:
    heldout:
      path: {heldout}
      max_rows: 100

checkpointing:
  save_period: {save_period}                 # written in the background while training goes on
  keep_top_k: 3                    # the best three by metric_name; the newest is always kept
  metric_name: val:loss

logger:
  log_period: {save_period}
"""


@dataclass(frozen=True)
class DemoFolder:
    """Where things lie. `moved_to`: where an earlier demo went, if there was one."""

    root: Path
    moved_to: Path | None = None

    @property
    def train(self) -> Path:
        return self.root / "data" / "train.jsonl"

    @property
    def heldout(self) -> Path:
        return self.root / "data" / "heldout.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def config(self) -> Path:
        return self.root / "sft.yaml"

    def fill(self, seed: int) -> None:
        """Write the data, train the tokenizer on it, write the configuration."""
        task.write_dataset(self.train, self.heldout, seed)
        task.train_tokenizer(task.read_rows(self.train), self.tokenizer)
        self.config.write_text(self._config_text(seed), encoding="utf-8")

    def _config_text(self, seed: int) -> str:
        places = {"run_dir": self.root / "run", "tokenizer": self.tokenizer, "train": self.train}
        return _CONFIG.format(
            **{name: json.dumps(str(path)) for name, path in {**places, "heldout": self.heldout}.items()},
            config=self.config,
            again=self.root / "again",
            seed=seed,
            num_steps=NUM_STEPS,
            save_period=SAVE_PERIOD,
            model_init=textwrap.indent(yaml.safe_dump(task.model_init(), sort_keys=False).rstrip(), " " * 4),
        )


@contextmanager
def claimed(root: Path) -> Iterator[DemoFolder]:
    """The folder, new and empty, and locked while the demo runs. An earlier demo is moved to `<root>.bak_1` ….

    Raises:
        SurefootError: something that is no demo's is there, another demo is running there, or it cannot be made.
    """
    try:
        moved_to = _make_way(root)
        root.mkdir(parents=True, exist_ok=True)
        marker = (root / MARKER).open("a")
    except OSError as error:
        raise SurefootError(f"the folder {root} cannot be made: {error.strerror}. Name another with --dir") from error
    with marker:
        _lock(marker, root)
        marker.write("Made by `surefoot demo`, which moves a folder with this file aside when it is run again.\n")
        marker.flush()
        yield DemoFolder(root, moved_to)


def _make_way(root: Path) -> Path | None:
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise SurefootError(f"{root} is a link or a file; the demo needs a folder of its own. Name another with --dir")
    found = sorted(path.name for path in root.iterdir()) if root.exists() else []
    if not found:
        return None
    if MARKER not in found:
        shown = ", ".join(found[:5]) + (" …" if len(found) > 5 else "")
        raise SurefootError(f"{root} holds files that are not a demo's ({shown}). Name a new folder with --dir")
    with (root / MARKER).open("a") as marker:
        _lock(marker, root)
        return set_aside(root, root.name)


def _lock(marker: IO[str], root: Path) -> None:
    """The kernel lets go of it when the process ends, however it ends."""
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SurefootError(f"another demo is running in {root}. Wait for it, or name another with --dir") from None
