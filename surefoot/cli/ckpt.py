"""`surefoot ckpt`: list, prove, look into, compare, prune and export checkpoints.

A folder may be a run's `run_dir`, its `checkpoints` folder, or one `step_N`. The exit status is 1 when something is
broken or differs, so that scripts can rely on it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.checkpoint import CheckpointInfo, CheckpointManager, Verification
    from surefoot.checkpoint.reader import LocalReader

app = typer.Typer(help="Look at checkpoints, prove them, compare, prune and export them.", no_args_is_help=True)

FOLDER = typer.Argument(help="A run_dir, a folder of checkpoints, or one step_N.")
CHECKPOINT = typer.Argument(help="One step_N.")
AS_JSON = typer.Option(False, "--json", help="Print one JSON value for scripts.")


@app.command("ls")
def list_(folder: Path = FOLDER, as_json: bool = AS_JSON) -> None:
    """List the checkpoints. Reads manifests and file sizes, not contents (`verify` does)."""
    manager = _manager(folder)
    found = manager.list_checkpoints()
    latest, best = manager.get_latest_checkpoint_path(), manager.get_best_checkpoint_path()
    if as_json:
        _print_json([_info_as_json(info) for info in found])
    else:
        shown = ("train:loss", manager.config.metric_name or "val:loss")
        rows = [(*_info_row(info, shown), _marks(info.path, latest, best)) for info in found]
        headings = ("checkpoint", "state", "size", "made (UTC)", "attempt", "metrics", "")
        _print_table(str(manager.checkpoint_dir), headings, rows)
        for info in found:
            if info.reason:
                typer.echo(f"{info.path.name}: {info.state.replace('_', ' ')}: {info.reason}")
    raise typer.Exit(any(info.state == "broken" for info in found))


@app.command()
def verify(folder: Path = FOLDER, as_json: bool = AS_JSON) -> None:
    """Check every byte of every file against the manifest's hashes."""
    from surefoot.checkpoint import verify_checkpoint
    from surefoot.errors import CheckpointError

    paths = [folder] if (folder / "manifest.json").exists() else [i.path for i in _manager(folder).list_checkpoints()]
    if not paths:
        raise CheckpointError(f"{folder} holds no checkpoint to verify")
    checked = [verify_checkpoint(path) for path in paths]
    results = [result for result in checked if result.sound or result.path.exists()]  # else a run pruned it meanwhile
    if as_json:
        _print_json([{**dataclasses.asdict(result), "path": str(result.path)} for result in results])
    else:
        for result in results:
            _print_verification(result)
    raise typer.Exit(not all(result.sound for result in results))


@app.command()
def inspect(checkpoint: Path = CHECKPOINT, as_json: bool = AS_JSON) -> None:
    """Show what a checkpoint holds, what it was made of and what it was resumed from."""
    from surefoot.checkpoint.inspection import describe

    found = describe(checkpoint)
    manifest = found.manifest
    if as_json:
        plain = dataclasses.asdict(manifest) | {"path": str(found.path), "training_info": found.training_info}
        _print_json(plain)
        return
    typer.echo(f"{found.path}: step {manifest.step}, made {manifest.created}, {_size(manifest.num_bytes)}")
    for entry in manifest.lineage:
        origin = "from the start" if entry.checksum is None else f"from step {entry.from_step}"
        typer.echo(f"attempt {entry.attempt}: {origin}{f' ({entry.origin})' if entry.origin else ''}")
    parts = [(name, str(files), _size(size)) for name, (files, size) in found.parts.items()]
    _print_table("parts", ("part", "files", "size"), parts)
    made_of = [(name, value.description, value.hash[:12]) for name, value in manifest.fingerprints.items()]
    _print_table("made of", ("what", "description", "fingerprint"), made_of)
    _print_table("training", ("", ""), [(key, str(value)) for key, value in found.training_info.items()])


@app.command()
def diff(
    first: Path = CHECKPOINT, second: Path = typer.Argument(help="Another step_N."), as_json: bool = AS_JSON
) -> None:
    """Compare two checkpoints file by file, and tensor by tensor where files differ."""
    from surefoot.checkpoint.inspection import diff as differences

    found = differences(first, second)
    if as_json:
        _print_json([dataclasses.asdict(difference) for difference in found])
    elif found:
        _print_table("differences", ("what", "", "detail"), [(d.what, d.kind, d.detail) for d in found])
    else:
        typer.echo("no difference: every file is the same, bit for bit")
    raise typer.Exit(bool(found))


@app.command()
def prune(
    folder: Path = FOLDER,
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would go."),
    as_json: bool = AS_JSON,
) -> None:
    """Delete the checkpoints that no rule of the run's configuration keeps."""
    manager = _manager(folder)
    if dry_run:
        kept, gone = manager.plan_pruning()
    else:
        manager.open(resume=True)
        with manager:
            kept, gone = manager.plan_pruning()
            manager.remove_old_checkpoints()
    if as_json:
        _print_json({"kept": [str(i.path) for i in kept], "pruned": [str(i.path) for i in gone], "dry_run": dry_run})
        return
    verb = "would be pruned" if dry_run else "pruned"
    rows = sorted([(i.step, i.path.name, "kept") for i in kept] + [(i.step, i.path.name, verb) for i in gone])
    _print_table(str(manager.checkpoint_dir), ("checkpoint", ""), [row[1:] for row in rows])


@app.command()
def export(
    checkpoint: Path = CHECKPOINT,
    target: Path = typer.Argument(help="A new folder."),
    dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16; default: as saved."),
    part: str = typer.Option("policy", help="Whose weights."),
    merge: bool = typer.Option(False, "--merge", help="Add the adapter to its base and write the whole model."),
    base: str | None = typer.Option(None, help="With --merge: where the base is now, if it has moved."),
) -> None:
    """Copy the weights, proven, to a plain Hugging Face folder, in another dtype if asked."""
    from surefoot.checkpoint.export import export_merged, export_weights

    if base is not None and not merge:
        raise typer.BadParameter("--base: only --merge reads the base")
    if merge:
        done = export_merged(checkpoint, target, lambda reader: _merged(reader, part, base), dtype)
    else:
        done = export_weights(checkpoint, target, dtype, part)
    typer.echo(f"exported to {done}")


# ------------------------------------------------------------------------------------------------------------ helpers


def _merged(checkpoint: LocalReader, part: str, base: str | None) -> tuple[Mapping[str, bytes], Mapping[str, Tensor]]:
    """The small files and the weights of the part's base with its adapter added."""
    from surefoot.cli.found_model import on_base
    from surefoot.config import EngineConfig
    from surefoot.config_file import load_config
    from surefoot.engine import models
    from surefoot.engine.folder import weights_by_name
    from surefoot.errors import CheckpointError

    reader = checkpoint.under(part)
    if "weights/adapter_config.json" not in reader.files():
        raise CheckpointError(f"{checkpoint.root} has no adapter in {part}/weights: nothing to merge")
    config = load_config(checkpoint.local("config.yaml"))
    section = getattr(config, part, None)
    if not isinstance(section, EngineConfig):
        raise CheckpointError(f"the configuration of {checkpoint.root} has no section {part} that names the base")
    is_scalar = reader.json("weights/adapter_config.json")["task_type"] == "SEQ_CLS"
    loaded = models.load_from_checkpoint(
        reader,
        on_base(section, base),
        models.load_tokenizer_from_checkpoint(reader),
        seed=config.seed,
        kind="scalar" if is_scalar else "causal_lm",
    )
    whole = models.merged(loaded)
    return whole.files, weights_by_name(whole.model)


def _manager(folder: Path) -> CheckpointManager:
    """A manager of the folder's checkpoints, with the rules of the run that made them."""
    from pydantic import ValidationError

    from surefoot.checkpoint import CheckpointManager
    from surefoot.config import CheckpointingConfig
    from surefoot.config_file import read_yaml
    from surefoot.errors import CheckpointError, ConfigError

    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    config: dict[str, Any] = {}
    for file in (folder / "config.yaml", folder.parent / "config.yaml"):
        if file.is_file():
            section = read_yaml(file).get("checkpointing") or {}
            if not isinstance(section, dict):
                raise ConfigError(f"{file}: checkpointing: expected a mapping of keys to values, found {section!r}")
            config = section
            break
    if (folder / "config.yaml").is_file() and not (folder / "manifest.json").exists():
        folder = Path(config.get("checkpoint_dir") or folder / "checkpoints")
    elif (folder / "manifest.json").exists():
        folder = folder.parent
    known = {key: value for key, value in config.items() if key in CheckpointingConfig.model_fields}
    try:
        return CheckpointManager({**known, "checkpoint_dir": str(folder)})
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{file}: checkpointing: {faults}") from None


def _info_as_json(info: CheckpointInfo) -> dict[str, Any]:
    manifest = info.manifest
    return {
        "path": str(info.path),
        "step": info.step,
        "state": info.state,
        "reason": info.reason,
        "num_bytes": manifest.num_bytes if manifest else None,
        "created": manifest.created if manifest else None,
        "attempt": manifest.attempt.number if manifest else None,
        "training_info": info.training_info,
    }


def _info_row(info: CheckpointInfo, metrics: Sequence[str]) -> tuple[str, ...]:
    manifest = info.manifest
    if manifest is None:
        return (info.path.name, info.state.upper(), "", "", "", "")
    measured = {name: info.training_info.get(name) for name in metrics}
    shown = " ".join(f"{name} {value:.4g}" for name, value in measured.items() if isinstance(value, float))
    state = info.state if info.state == "complete" else info.state.upper().replace("_", " ")
    return (
        info.path.name,
        state,
        _size(manifest.num_bytes),
        manifest.created.removesuffix("+00:00").replace("T", " "),
        str(manifest.attempt.number),
        shown,
    )


def _marks(path: Path, latest: Path | None, best: Path | None) -> str:
    return " ".join(word for word, marked in (("latest", latest), ("best", best)) if path == marked)


def _print_verification(result: Verification) -> None:
    rate = f", {result.num_bytes / result.seconds / 2**30:.1f} GiB/s" if result.sound and result.seconds else ""
    if result.sound:
        typer.echo(f"{result.path}: sound, {result.num_files} files, {_size(result.num_bytes)}{rate}")
    else:
        typer.secho(f"{result.path}: BROKEN", fg="red")
        for problem in result.problems:
            typer.echo(f"  {problem}")
    for note in result.notes:
        typer.echo(f"  note: {note}")


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    typer.echo(title)
    table = Table(box=box.SIMPLE_HEAD, show_header=any(headings), padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")  # narrow terminals and pipes: nothing is cut off
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"
