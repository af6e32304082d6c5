"""`surefoot score`: what a reward model makes of the answers in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.config import DatasetConfig
    from surefoot.data.prepare import Dataset, Progress
    from surefoot.engine.local import LocalEngine
    from surefoot.types import DataPlane, Rows

_WINDOW = 16  # micro-batches that are sorted by length together
_SIDES = ("chosen", "rejected")


def score(
    model: Path = typer.Argument(help="A reward model's folder, or a checkpoint step_N of one."),
    file: str = typer.Argument(help="A .jsonl, .json or .parquet file, a folder `datasets` saved, or a hub name."),
    base: str | None = typer.Option(None, help="Where the base of the checkpoint's adapter is now, if it has moved."),
    out: Path | None = typer.Option(None, help="Write one JSON line per row, or pair, with its scores."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Let --out replace a file."),
    pairs: bool | None = typer.Option(
        None, "--pairs/--no-pairs", help="Whether the rows are preferences; default: as the first one looks."
    ),
    columns: list[str] = typer.Option([], help="ours=theirs, such as prompt=question; may be given several times."),
    split: str | None = None,
    max_rows: int | None = typer.Option(None, min=1, help="The first rows only."),
    skip_bad_rows: bool = typer.Option(
        False, "--skip-bad-rows", help="Count rows that cannot be used instead of stopping."
    ),
    ranking: Literal["best_worst", "all_pairs"] | None = typer.Option(None, help="Which ranked answers to compare."),
    prompt_format: Literal["auto", "chat", "plain"] | None = typer.Option(None, help="data.prompt_format"),
    system_prompt: str | None = typer.Option(None, help="data.system_prompt"),
    fold_system: bool | None = typer.Option(None, help="data.fold_system"),
    chat_template: str | None = typer.Option(None, help="A Jinja file or Jinja text; default: the model's own."),
    max_length: int | None = typer.Option(None, min=1, help="policy.max_total_sequence_length"),
    batch_size: int = typer.Option(8, min=1, help="Rows computed at a time."),
    device: Literal["auto", "cpu", "cuda", "mps"] = typer.Option("auto", help="policy.device"),
    precision: Literal["float32", "bfloat16"] | None = typer.Option(None, help="policy.precision"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead."),
) -> None:
    """Score answers with a reward model; of preferences, say how often the better one wins.

    Rows, lengths and precision are, unless said otherwise, as in the run of the checkpoint.

    With a plain folder they are as by default, and rows may be as long as the model can read.
    """
    from surefoot.cli.data import columns_mapping
    from surefoot.cli.output import as_text, check_target, given
    from surefoot.config import DatasetConfig

    if out is not None:
        check_target(out, file, overwrite)
    source = DatasetConfig(
        path=file,
        split=split,
        columns=columns_mapping(columns),
        max_rows=max_rows,
        on_bad_row="skip" if skip_bad_rows else "error",
    )
    data = given(ranking=ranking, prompt_format=prompt_format, system_prompt=system_prompt, fold_system=fold_system)
    policy = given(model_name=base, max_total_sequence_length=max_length, precision=precision)
    policy |= {"device": device, "train_micro_batch_size": batch_size, "train_global_batch_size": batch_size}
    dataset, scores = score_file(model, source, policy, data, chat_template, pairs)
    summary = {"model": str(model), "file": file, **summarize(dataset, scores)}
    if out is not None:
        _write(out, dataset, scores)
    typer.echo(json.dumps(summary, indent=2) if as_json else as_text(summary))


def score_file(
    model: Path,
    source: DatasetConfig,
    policy: dict[str, Any],
    data: dict[str, Any],
    chat_template: str | None,
    pairs: bool | None,
) -> tuple[Dataset, Tensor]:
    """The rows, and float32 [sequences]: the score at the last token of each.

    Args:
        policy, data: what is asked for in these sections, whatever the model's run says.
        pairs: whether the rows are preferences; `None`: as the first one looks.

    Raises:
        ModelError, CheckpointError: there is no sound reward model.
        DataError: the file cannot be read, rows are bad, or none can be scored.
        NonFiniteError: a score is NaN or infinite; names the row.
    """
    from rich.console import Console

    from surefoot.cli import found_model
    from surefoot.data.pairs import looks_like_pairs
    from surefoot.data.prepare import prepare
    from surefoot.data_plane.memory import MemoryPlane
    from surefoot.report.preparing import preparing

    found = found_model.find(model, source, policy, data, "scalar")
    tokenizer = found.tokenizer(chat_template)
    pairs = looks_like_pairs(source) if pairs is None else pairs
    rows = found.data if pairs else found.data.model_copy(update={"train_on": "last_assistant"})
    console, plane = Console(stderr=True), MemoryPlane()
    with preparing(console, f"preparing {source.path}") as progress:
        longest = found.policy.max_total_sequence_length
        kind: Rows = "pairs" if pairs else "sequences"
        dataset = prepare(source, rows, tokenizer, longest, progress, rows=kind)
    engine = found.engine(tokenizer, plane)
    with preparing(console, f"scoring {source.path}") as progress:
        rows_per_batch = found.policy.train_micro_batch_size * dataset.group_size * _WINDOW
        return dataset, _scores(engine, plane, dataset, rows_per_batch, progress)


def _scores(engine: LocalEngine, plane: DataPlane, dataset: Dataset, rows_per_batch: int, progress: Progress) -> Tensor:
    import torch

    from surefoot.data.source import iterate
    from surefoot.errors import NonFiniteError
    from surefoot.types import Head

    scores: list[float] = []
    for batch in iterate(dataset, plane, rows_per_batch):
        ref = engine.infer(batch, Head(("scalar",)), {"scalar": "scalar"})
        scores += [float(values[-1]) for values in plane.get(ref, ["scalar"])["scalar"]]
        progress(len(scores), len(dataset))
    for i, value in enumerate(scores):
        if not math.isfinite(value):
            side = f", {_SIDES[i % 2]}" if dataset.group_size == 2 else ""
            raise NonFiniteError(
                f"{dataset.name}: the score of row {int(dataset.row_index[i])}{side} (rows counted from 0) is {value}. "
                "Nothing was written. Look at that row, or score in float32"
            )
    return torch.tensor(scores)


def summarize(dataset: Dataset, scores: Tensor) -> dict[str, Any]:
    """Of pairs the names are those of a reward model's validation. "longer_wins" is how often the longer side is the
    better one, sides of one length counting half; "ties": pairs whose sides score the same, which count as lost."""
    values, counts = scores.double(), dataset.counts
    found: dict[str, Any]
    if dataset.group_size == 1:
        low, high = (float(value) for value in values.aminmax())
        found = {"rows": len(values), "score/mean": float(values.mean()), "score/min": low, "score/max": high}
    else:
        chosen, rejected = values.view(-1, 2).T
        better, worse = dataset.lengths.view(-1, 2).T
        found = {
            "pairs": len(chosen),
            "accuracy": float((chosen > rejected).double().mean()),
            "longer_wins": float(((better > worse).double() + 0.5 * (better == worse)).mean()),
            "same_length": int((better == worse).sum()),
            "ties": int((chosen == rejected).sum()),
            "margin": float((chosen - rejected).mean()),
            "scores/chosen": float(chosen.mean()),
            "scores/rejected": float(rejected.mean()),
        }
    return found | {"truncated": counts.truncated, "dropped": counts.dropped, "skipped": counts.skipped}


def _write(out: Path, dataset: Dataset, scores: Tensor) -> None:
    """The file appears, or is replaced, when it is whole. Rows are named by their place in the scored file, from 0."""
    from surefoot.checkpoint.storage import write_small_file

    names = _SIDES if dataset.group_size == 2 else ("score",)
    rows = zip(dataset.row_index[:: len(names)].tolist(), scores.view(-1, len(names)).tolist(), strict=True)
    lines = (json.dumps({"row": row, **dict(zip(names, values, strict=True))}) + "\n" for row, values in rows)
    write_small_file(out, "".join(lines).encode())
