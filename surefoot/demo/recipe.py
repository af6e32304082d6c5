"""The configurations that the demo writes: whole files with comments, so that a reader can run each of them again."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surefoot.demo import task

_TEXT = """\
{about}
#
# All keys there are, and this run again:
#   surefoot config show "{root}/{name}.yaml"
#   surefoot train "{root}/{name}.yaml" run_dir="{root}/again"

algorithm: {algorithm}
run_dir: "{root}/{name}"  # the run's one folder: config.yaml, metrics.jsonl, checkpoints/
seed: {seed}  # every random choice follows from it
max_num_steps: {num_steps}
val_period: {period}  # steps; validation rows are never trained
{section}
policy:
{model}
  train_global_batch_size: {rows}  # rows of one optimizer step
  train_micro_batch_size: {rows}  # rows in memory at once; another number gives the same gradient
  max_total_sequence_length: 16  # tokens; the longest row here has 14
  max_grad_norm: 1.0
  num_threads: 1  # of this process; two runs side by side are fastest with one each
  optimizer: {{ lr: {lr}, beta2: 0.98, weight_decay: 0.1 }}
  scheduler: {{ name: {decay}, warmup_steps: {warmup} }}  # down to zero at the last step

data:
  # {one_line}
  train: {{ path: "{root}/data/{train}.jsonl" }}
  validation:
    heldout: {{ path: "{root}/data/{heldout}.jsonl", max_rows: {val_rows} }}

checkpointing:
  save_period: {period}  # written in the background while training goes on
  keep_top_k: 3  # the best three by metric_name; the newest is always kept
  metric_name: val:{metric}
  higher_is_better: {higher_is_better}

logger: {{ log_period: {period} }}
"""
_RANDOM = """\
# Random weights. To fine-tune a model that you have, put `model_name: <folder>` in place of model_init and leave
# the tokenizer out: the model's own is taken.
model_init:
{model_init}
tokenizer: {{ name: "{root}/{tokenizer}" }}"""
CHAT = 'One chat, which is one row, per line: {"messages": [{"role": …, "content": …}, …]}'
PROMPT = "One chat per line. Its last turn is not trained: it is the column `answer`, which the reward alone reads"
PAIR = 'One pair, which is two rows, per line: {"prompt": [{"role": …, "content": …}], "chosen": […], "rejected": […]}'


@dataclass(frozen=True)
class Recipe:
    """A run of the demo, on the files of its folder.

    Attributes:
        name: of the run's folder and, with `.yaml`, of its configuration.
        about: what it is, and why its settings are what they are: the file's first comment.
        period: steps between validations, and between saves.
        rows: of one optimizer step.
        train, heldout: names of files in `data/`; `heldout` is the validation set, its first `val_rows` lines.
        one_line: what a line of the files is.
        metric: of validation, by which the best checkpoints are kept.
        decay, warmup: of the learning rate; warm-up in optimizer steps.
        section: the algorithm's own, and what else it needs, with comments; `$root` is the demo's folder.
        begins_with: the run whose last weights are the first ones here; default: random weights.
        model_init, tokenizer: of random weights; the tokenizer's is a name of a folder.
    """

    name: str
    about: str
    num_steps: int
    period: int
    rows: int
    lr: str
    train: str
    algorithm: str
    decay: str = "cosine"
    warmup: int = 50
    section: str = ""
    heldout: str = "heldout"
    val_rows: int = 100
    one_line: str = CHAT
    metric: str = "loss"
    higher_is_better: bool = False
    begins_with: Recipe | None = None
    model_init: Mapping[str, Any] = field(default_factory=task.model_init)
    tokenizer: str = "tokenizer"

    def config(self, root: Path) -> Path:
        return root / f"{self.name}.yaml"

    def weights(self, root: Path) -> Path:
        """What the run in its own folder ends with: a Hugging Face folder."""
        return weights(root / self.name, self.num_steps)

    def write(self, root: Path, seed: int) -> None:
        """Write the configuration."""
        values = {key: value for key, value in vars(self).items() if isinstance(value, int | str)}
        values |= {
            "about": textwrap.indent(textwrap.fill(self.about, 118), "# "),
            "root": _quoted(root),
            "seed": seed,
            "section": self.section and f"\n{self.section.replace('$root', _quoted(root))}",
            "model": textwrap.indent(self._model(root), "  "),
            "higher_is_better": str(self.higher_is_better).lower(),
        }
        self.config(root).write_text(_TEXT.format(**values), encoding="utf-8")

    def _model(self, root: Path) -> str:
        if self.begins_with is not None:
            return f'model_name: "{_quoted(self.begins_with.weights(root))}"  # its tokenizer comes with it'
        model_init = textwrap.indent(yaml.safe_dump(dict(self.model_init), sort_keys=False).rstrip(), "  ")
        return _RANDOM.format(model_init=model_init, root=_quoted(root), tokenizer=self.tokenizer)


def weights(run_dir: Path, step: int) -> Path:
    """The Hugging Face folder in the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step_{step}" / "policy" / "weights"


def _quoted(path: Path) -> str:
    """As it stands between YAML's double quotes."""
    return json.dumps(str(path), ensure_ascii=False)[1:-1]
