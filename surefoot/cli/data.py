"""`surefoot data`: see what a run would train on, without a model or a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from surefoot.data.prepare import Dataset

app = typer.Typer(help="Look at training data as a run would see it.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `inspect` a command of its own while it is the only one."""


@app.command()
def inspect(
    file: str = typer.Argument(help="A .jsonl, .json or .parquet file, a folder `datasets` saved, or a hub name."),
    model: str = typer.Option(..., help="Folder or hub name; only its tokenizer is loaded."),
    rows: int = typer.Option(3, min=1, help="How many rows, or pairs, to show."),
    pairs: bool | None = typer.Option(
        None, "--pairs/--no-pairs", help="Whether the rows are preferences; default: as the first one looks."
    ),
    prompts: bool = typer.Option(False, "--prompts", help="The rows are prompts, which a run samples answers to."),
    ranking: Literal["best_worst", "all_pairs"] = typer.Option("best_worst", help="Which ranked answers to compare."),
    max_length: int | None = typer.Option(
        None, min=1, help="policy.max_total_sequence_length; default: a run's, or what the model reads if that is less."
    ),
    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant",
    prompt_format: Literal["auto", "chat", "plain"] = "auto",
    columns: list[str] = typer.Option([], help="ours=theirs, such as prompt=question; may be given several times."),
    split: str | None = None,
    chat_template: str | None = typer.Option(None, help="A Jinja file or Jinja text; default: the tokenizer's own."),
    system_prompt: str | None = None,
    fold_system: bool = typer.Option(False, help="Put the system turn's text into the first user turn."),
    skip_bad_rows: bool = typer.Option(False, help="Count rows that cannot be used instead of stopping."),
    num_workers: int = typer.Option(0, min=0, help="Tokenizing processes; 0: this one."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead."),
) -> None:
    """Show the tokens of a data set, and which of them a run would train.

    Exit status 1, with the reasons, when a row cannot be used or nothing can be trained.
    """
    from surefoot.config import DataConfig, DatasetConfig, EngineConfig, TokenizerConfig
    from surefoot.data.pairs import looks_like_pairs
    from surefoot.data.prepare import prepare
    from surefoot.engine.models import load_tokenizer, longest_row

    source = DatasetConfig(
        path=file, split=split, columns=columns_mapping(columns), on_bad_row="skip" if skip_bad_rows else "error"
    )
    data = DataConfig(
        train=source,
        train_on=train_on,
        prompt_format=prompt_format,
        system_prompt=system_prompt,
        fold_system=fold_system,
        ranking=ranking,
        num_workers=num_workers,
    )
    policy = EngineConfig(model_name=model, tokenizer=TokenizerConfig(chat_template=chat_template))
    tokenizer, reads = load_tokenizer(policy), longest_row(policy)
    length = max_length or min(policy.max_total_sequence_length, reads or policy.max_total_sequence_length)
    if prompts and pairs:
        raise typer.BadParameter("--prompts: rows that are --pairs have their answers")
    if not prompts and pairs is None:
        pairs = looks_like_pairs(source)
    dataset = prepare(source, data, tokenizer, length, rows="prompts" if prompts else "pairs" if pairs else "sequences")
    if as_json:
        found = {"max_length": length, "model_reads": reads, **_as_json(dataset, tokenizer, rows)}
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        cut = f"no longer than {length} tokens" if prompts else f"cut at {length} tokens: {dataset.counts.truncated}"
        _show(dataset, tokenizer, rows, cut + ("" if reads is None else f" (the model reads at most {reads})"))


def columns_mapping(columns: list[str]) -> dict[str, str]:
    mapping = dict(text.partition("=")[::2] for text in columns)
    for ours, theirs in mapping.items():
        if not ours or not theirs:
            raise typer.BadParameter(f"--columns: expected ours=theirs, such as prompt=question, found {ours!r}")
    return mapping


def _lengths(dataset: Dataset) -> dict[str, int]:
    ordered = sorted(dataset.lengths.tolist())
    at = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
    return {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in at.items()}


def _as_json(dataset: Dataset, tokenizer: Any, rows: int) -> dict[str, Any]:
    from dataclasses import asdict

    def side(i: int) -> dict[str, Any]:
        ids, mask = dataset.ids(i), dataset.loss_mask(i)
        return {"text": tokenizer.decode(ids), "ids": ids.tolist(), "loss_mask": mask.int().tolist()}

    shown: list[dict[str, Any]] = []
    for group in range(min(rows, dataset.num_groups)):
        first = group * dataset.group_size
        entry: dict[str, Any] = {"row_index": int(dataset.row_index[first])}
        if dataset.margins is not None:
            entry["margin"] = float(dataset.margins[first])
        sides = {"chosen": side(first), "rejected": side(first + 1)} if dataset.group_size == 2 else side(first)
        shown.append(entry | sides)
    kept = {"kept": dataset.num_groups, "tokens": len(dataset.tokens), "trained_tokens": int(dataset.trained.sum())}
    return {
        "name": dataset.name,
        "fingerprint": dataset.fingerprint,
        "counts": kept | asdict(dataset.counts),
        "lengths": _lengths(dataset),
        "pairs" if dataset.group_size == 2 else "rows": shown,
    }


def _show(dataset: Dataset, tokenizer: Any, rows: int, cut: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    counts, shown = dataset.counts, range(min(rows, dataset.num_groups) * dataset.group_size)
    console.print(Text.assemble("tokens: ", ("trained", "bold green"), (" context ", "dim"), ("padding", "red")))
    width = max(int(dataset.lengths[i]) for i in shown)
    for i in shown:
        line = Text(f"row {int(dataset.row_index[i])}{_side(dataset, i)}: ", style="bold")
        for token, trained in zip(dataset.ids(i).tolist(), dataset.loss_mask(i).tolist(), strict=True):
            line.append(tokenizer.decode([token]).replace("\n", "↵\n"), style="bold green" if trained else "dim")
            line.append("|", style="bright_black")
        if padding := width - int(dataset.lengths[i]):
            line.append(f" + {padding} padding", style="red")
        console.print(line)
    for i in range(dataset.group_size):
        console.print(Text(f"first example, as text{_side(dataset, i)}:", style="bold"))
        console.print(Text(tokenizer.decode(dataset.ids(i))))
    if dataset.prompts:
        console.print(Text(f"columns for rewards: {', '.join(dataset.prompts[0].columns) or 'none'}"))
    lengths = ", ".join(f"{name} {value}" for name, value in _lengths(dataset).items())
    console.print(Text(f"lengths in tokens: {lengths}; longest before cutting: {counts.longest}"))
    console.print(Text(cut))
    for name, reasons in (("dropped", counts.dropped), ("skipped", counts.skipped)):
        for reason, number in reasons.items():
            console.print(Text(f"{name}: {number} × {reason}", style="yellow"))
    console.print(Text(f"{dataset.description}\nfingerprint {dataset.fingerprint}"))


def _side(dataset: Dataset, i: int) -> str:
    if dataset.group_size == 1:
        return ""
    margin = "" if dataset.margins is None else f" (margin {float(dataset.margins[i]):g})"
    return f", {'rejected' if i % 2 else 'chosen'}{margin}"
