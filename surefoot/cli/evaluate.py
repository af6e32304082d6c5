"""`surefoot eval`: how well a model answers prompts that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import typer


def evaluate(
    model: Path = typer.Argument(help="A checkpoint step_N, or a model's folder."),
    task: str = typer.Argument(help="A file of prompts, an environment that makes rows, or a task of reasoning-gym."),
    base: str | None = typer.Option(None, help="Where the base of the checkpoint's adapter is now, if it has moved."),
    samples: int | None = typer.Option(None, min=1, help="Completions of each prompt; default: the run's, else 1."),
    k: list[int] = typer.Option([], "--k", min=1, help="Estimate pass@k for this k; may be given several times."),
    greedy: bool = typer.Option(False, "--greedy", help="The likeliest completion of each prompt."),
    temperature: float | None = typer.Option(None, min=0, help="evaluation.temperature"),
    top_p: float | None = typer.Option(None, help="generation.top_p"),
    max_new_tokens: int | None = typer.Option(None, min=1, help="generation.max_new_tokens"),
    seed: int | None = typer.Option(None, min=0, help="Of all that is drawn; default: the run's, else 0."),
    reward: list[str] = typer.Option(
        [], help="A built-in one, a dotted path, or '{name: regex, pattern: …}'; default: the run's own."
    ),
    pass_reward: str | None = typer.Option(None, help="evaluation.pass_reward"),
    pass_threshold: float | None = typer.Option(None, help="evaluation.pass_threshold"),
    out: Path | None = typer.Option(None, help="Write each completion to a .jsonl or .parquet file."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Let --out replace a file."),
    columns: list[str] = typer.Option([], help="ours=theirs, such as answer=solution; may be given several times."),
    split: str | None = None,
    max_rows: int | None = typer.Option(None, min=1, help="The first rows only; of rows to make how many: 100."),
    skip_bad_rows: bool = typer.Option(False, "--skip-bad-rows", help="Count what cannot be used instead of stopping."),
    prompt_format: Literal["auto", "chat", "plain"] | None = typer.Option(None, help="data.prompt_format"),
    system_prompt: str | None = typer.Option(None, help="data.system_prompt"),
    fold_system: bool | None = typer.Option(None, help="data.fold_system"),
    chat_template: str | None = typer.Option(None, help="A Jinja file or Jinja text; default: the model's own."),
    max_length: int | None = typer.Option(None, min=1, help="policy.max_total_sequence_length"),
    batch_size: int | None = typer.Option(None, min=1, help="evaluation.num_prompts_per_batch"),
    device: Literal["auto", "cpu", "cuda", "mps"] = typer.Option("auto", help="policy.device"),
    precision: Literal["float32", "bfloat16"] | None = typer.Option(None, help="policy.precision"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead."),
) -> None:
    """Sample answers to prompts and judge them: mean reward, pass@k, the majority's answer.

    What is not said is as in the run of the checkpoint, and so is the result, where the run validates on these rows.
    """
    from surefoot.cli import evaluation_run
    from surefoot.cli.output import as_text, check_target, given

    if out is not None:
        check_target(out, task, overwrite, ("jsonl", "parquet"))
    if greedy:
        temperature, samples = _no_other(temperature), samples or 1
    n = samples or max(k, default=None)
    drawn = {} if n is None else {"num_generations_per_prompt": n, "pass_at_k": k or None}
    judging = given(pass_reward=pass_reward, pass_threshold=pass_threshold, num_prompts_per_batch=batch_size)
    rows = given(prompt_format=prompt_format, system_prompt=system_prompt, fold_system=fold_system)
    asked = {
        "generation": given(max_new_tokens=max_new_tokens, top_p=top_p),
        "evaluation": drawn | judging | given(temperature=temperature),
    }
    policy = given(model_name=base, max_total_sequence_length=max_length, precision=precision, device=device)
    source = evaluation_run.source_of(task, columns, split, max_rows, skip_bad_rows)
    found = evaluation_run.evaluate(model, source, (policy, rows), asked, reward, seed, chat_template)
    if out is not None:
        evaluation_run.write(out, found)
    summary = {"model": str(model), "task": task, **found.summary}
    typer.echo(json.dumps(summary, indent=2) if as_json else as_text(summary))


def _no_other(temperature: float | None) -> float:
    """What --greedy stands for. Raises `ConfigError` when another temperature is asked for as well."""
    from surefoot.errors import ConfigError

    if temperature:
        raise ConfigError(
            f"--greedy takes the likeliest token, --temperature {temperature:g} draws: expected one of them"
        )
    return 0.0
