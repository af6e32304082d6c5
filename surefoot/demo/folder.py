"""The demo's folder: an earlier demo is moved aside, then data, a tokenizer and a configuration are put there."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from surefoot.checkpoint.commit import set_aside
from surefoot.checkpoint.directory import LOCK, DirectoryLock
from surefoot.demo import task
from surefoot.errors import SurefootError

MARKER = ".surefoot_demo"
NUM_STEPS = 1200
SAVE_PERIOD = 100

_CONFIG = """\
# Supervised fine-tuning of a small Llama, from random weights, on sums such as 47+85=132. All keys there are, and this
# run again:
#   surefoot config show "{root}/sft.yaml"
#   surefoot train "{root}/sft.yaml" run_dir="{root}/again"

algorithm: sft
run_dir: "{root}/run"    # the run's one folder: config.yaml, metrics.jsonl, checkpoints/
seed: {seed}                           # every random choice follows from it
max_num_steps: {steps}
val_period: {period}                    # steps; validation rows are never trained

policy:
  # Random weights. To fine-tune a model that you have, put `model_name: <folder>` in place of model_init and leave
  # the tokenizer out: the model's own is taken.
  model_init:
{model_init}
  tokenizer: {{ name: "{root}/tokenizer" }}
  train_global_batch_size: 32      # rows of one step
  train_micro_batch_size: 32       # rows in memory at once; another number gives the same gradient
  max_total_sequence_length: 64    # tokens; the longest row here has 14
  max_grad_norm: 1.0
  num_threads: 1                   # of this process; two runs side by side are fastest with one each
  optimizer: {{ lr: 1.5e-3, beta2: 0.98, weight_decay: 0.1 }}
  scheduler: {{ name: cosine, warmup_steps: 50 }}    # down to zero at the last step

data:
  # One chat per line: {{"messages": [{{"role": …, "content": …}}, …]}}
  train: {{ path: "{root}/data/train.jsonl" }}
  validation:
    heldout: {{ path: "{root}/data/heldout.jsonl", max_rows: 100 }}

checkpointing:
  save_period: {period}                 # written in the background while training goes on
  keep_top_k: 3                    # the best three by metric_name; the newest is always kept
  metric_name: val:loss

logger: {{ log_period: {period} }}
"""


class DemoFolder:
    """Where things lie. `moved_to`: where an earlier demo went, if there was one."""

    def __init__(self, root: Path, moved_to: Path | None = None) -> None:
        self.root, self.moved_to = root, moved_to
        self.train = root / "data" / "train.jsonl"
        self.heldout = root / "data" / "heldout.jsonl"
        self.tokenizer = root / "tokenizer"
        self.config = root / "sft.yaml"

    def fill(self, seed: int) -> None:
        """Write the data, train the tokenizer on it, write the configuration."""
        task.write_dataset(self.train, self.heldout, seed)
        task.train_tokenizer(task.read_rows(self.train), self.tokenizer)
        model_init = textwrap.indent(yaml.safe_dump(task.model_init(), sort_keys=False).rstrip(), " " * 4)
        root = json.dumps(str(self.root), ensure_ascii=False)[1:-1]  # as it stands between YAML's double quotes
        text = _CONFIG.format(root=root, seed=seed, steps=NUM_STEPS, period=SAVE_PERIOD, model_init=model_init)
        self.config.write_text(text, encoding="utf-8")


@contextmanager
def claimed(root: Path) -> Iterator[DemoFolder]:
    """The folder, new and locked while the demo runs. An earlier demo is moved to `<root>.bak_1` ….

    Raises:
        SurefootError: something that is no demo's is there, another demo is running there, or it cannot be made.
    """
    root = root if root.name else root.absolute()  # "." would go with the folder that is moved
    found = sorted(path.name for path in root.glob("*") if path.name != LOCK)
    if root.is_symlink() or root.is_file() or (found and MARKER not in found):
        what = f"holds files that are not a demo's ({', '.join(found[:5])})" if found else "is a link or a file"
        raise SurefootError(f"{root} {what}. Name a new folder with --dir")
    moved_to = None
    with ExitStack() as locks:
        try:
            locks.callback(_locked(root).release)
            if found:
                moved_to = set_aside(root, root.name)
                locks.callback(_locked(root).release)
        except OSError as error:
            raise SurefootError(f"{root} cannot be used: {error.strerror}. Name another with --dir") from error
        yield DemoFolder(root, moved_to)


def _locked(root: Path) -> DirectoryLock:
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()
    return DirectoryLock(root)
