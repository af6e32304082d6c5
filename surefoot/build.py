"""From a configuration to a `Run`. The only wiring: every part meets every other one here, and nowhere else.

The order is that of cost: folders, then data, then models. Whatever is wrong shows before anything heavy starts, and a
start that fails leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console

from surefoot import build_rollouts
from surefoot import run_dir as folders
from surefoot.build_engines import EngineBuilder
from surefoot.checkpoint import CheckpointManager, ResumePoint, check_fingerprints
from surefoot.checkpoint.directory import lock_all, scan
from surefoot.checkpoint.storage import write_small_file
from surefoot.config import RunConfig, parse_duration_s
from surefoot.config_file import (
    algorithm_config,
    config_as_yaml,
    config_changes,
    load_algorithm,
    load_config,
    parse_config,
    section_name,
)
from surefoot.data.prepare import Dataset, prepare
from surefoot.data_plane.memory import MemoryPlane
from surefoot.engine import models
from surefoot.errors import CheckpointError, ConfigError, ResumeRefused
from surefoot.fingerprints import fingerprints, judges, warn_of_other_judges
from surefoot.report import RunReport, configure_logging
from surefoot.report.completions import Completions
from surefoot.report.preparing import preparing
from surefoot.report.timeline import Timeline
from surefoot.run import Limits, Run
from surefoot.stop import StopWatch
from surefoot.types import Engine, EngineSpec, Kit, SaveEvent, Source
from surefoot.weight_sync.local import LocalSync

_log = logging.getLogger(__name__)

Listeners: TypeAlias = list[Callable[[SaveEvent], None]]


def start(config: RunConfig, *, overwrite: bool = False, console: Console | None = None) -> Run:
    """A new run in an empty `run_dir`.

    Raises:
        SurefootError: anything that would keep the run from working, before its first step.
    """
    console = _ready(console)
    config = _with_absolute_paths(config)
    manager, listeners = _manager(config)
    run_dir = Path(config.run_dir)
    with _cleared(run_dir, manager.checkpoint_dir, overwrite), _held(manager, run_dir):
        manager.open(resume=False)
        return _assemble(config, manager, listeners, ResumePoint(None), frozenset(), console)


def resume(
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    checkpoint: Path | None = None,
    allow: frozenset[str] = frozenset(),
    console: Console | None = None,
) -> Run:
    """The run in `run_dir`, at its newest checkpoint that verifies, or at `checkpoint`, or at step 0 if it has none.

    Args:
        allow: what may differ from the checkpoint besides what always may: a fingerprint's name (dataset, model …), a
            configuration key, or a section with all keys beneath it.

    Raises:
        ResumeRefused: the configuration, data or model differs from the checkpoint's.
        SurefootError: as for `start`.
    """
    console = _ready(console)
    file = folders.require_run(run_dir)
    named = next((text for text in overrides if text.startswith("run_dir=")), None)
    if named is not None:
        raise ConfigError(
            f"{named}: a run is resumed in its own folder, {run_dir}. To go on elsewhere, copy that folder and resume "
            "the copy; to begin anew there, train with its config.yaml"
        )
    config = _with_absolute_paths(
        load_config(file, [*overrides, f"run_dir={json.dumps(str(run_dir.absolute()), ensure_ascii=False)}"])
    )
    manager, listeners = _manager(config)
    with _held(manager, run_dir):
        manager.open(resume=True)
        point = manager.choose_resume(checkpoint)
        if point.reader is None:
            folders.refuse_lost(run_dir, manager.checkpoint_dir)
        _tell(point, config)
        before = load_config(point.reader.local(folders.CONFIG_FILE) if point.reader else file)
        allow = _check_changes(before, config, allow)
        return _assemble(config, manager, listeners, point, allow, console)


# ---------------------------------------------------------------------------------------------------------- assembling


def _assemble(*args: Any) -> Run:
    """What was opened for a run that does not come to be is closed."""
    with ExitStack() as opened:
        run = _assembled(opened, *args)
        opened.pop_all()  # from here on the loop closes the source, and that closes what it uses
    return run


def _assembled(
    opened: ExitStack,
    config: RunConfig,
    manager: CheckpointManager,
    listeners: Listeners,
    point: ResumePoint,
    allow: frozenset[str],
    console: Console,
) -> Run:
    algorithm = load_algorithm(config.algorithm)(algorithm_config(config))
    build_rollouts.check_backend(config)
    if config.policy.num_threads is not None:
        torch.set_num_threads(config.policy.num_threads)
    specs = algorithm.engines()
    tokenizer = _tokenizer(config, point, specs["policy"])
    plane = MemoryPlane()
    builder = EngineBuilder(specs, config, tokenizer, point, plane)
    builder.check_folders()
    conversations = build_rollouts.conversations(config, tokenizer, opened)
    train_data, validation_data = _datasets(config, tokenizer, console, rows=algorithm.rows, opener=conversations)
    engines: dict[str, Engine] = {}  # filled below: how long the run is, and so its schedule, follows from the source
    rollouts = build_rollouts.rollouts(config, tokenizer, conversations, opened)
    build_rollouts.check_columns(rollouts, (train_data, *validation_data.values()))
    timeline, completions = Timeline(time.perf_counter), Completions(Path(config.run_dir) / "completions")
    data = (tokenizer, train_data, validation_data)
    kit = Kit(config, *data, engines, plane, rollouts, timeline.phase, completions.write, builder.tokenizers)
    source = algorithm.source(kit)
    total_steps = _total_steps(config, source)
    loaded = builder.load()
    made_of = fingerprints(config.algorithm, algorithm_config(config), loaded["policy"], train_data)
    manager.fingerprints = made_of | judges(config)
    if point.reader is not None:
        check_fingerprints(point.reader.manifest, manager.fingerprints, allow)
        warn_of_other_judges(point.reader.manifest.fingerprints, manager.fingerprints)
    generators = build_rollouts.generators(rollouts, config, loaded["policy"])
    known = () if total_steps is None else ((name, algorithm.optimizer_steps(name, total_steps)) for name in loaded)
    engines |= builder.build(loaded, dict(known))
    lent = {name: builder.local[name].model for name, spec in specs.items() if spec.samples}
    build_rollouts.lend(rollouts, config, tokenizer, lent)
    if config.checkpointing.enabled:
        num_bytes = sum(engine.state_bytes for engine in builder.local.values())
        manager.check_space(num_bytes, manager.policy.num_saves(total_steps) if total_steps else None)
        for engine in builder.local.values():
            engine.warm()
    report = _report(config, manager, total_steps, console, timeline=timeline, completions=completions)
    if any(spec.precomputed is not None for spec in specs.values()):  # all that could be wrong has shown by now
        with preparing(console, "log-probs of the frozen model") as progress:
            builder.fill(engines, (train_data, *validation_data.values()), manager.fingerprints, progress)
    stop = _stop(config)
    sync = LocalSync(generators, build_rollouts.checksum(config))
    run = Run(algorithm, kit, source, sync, manager, report, stop, _limits(config))
    _restore(run, point, report)
    listeners.extend((report.save_event, stop.on_save))
    return run


def _manager(config: RunConfig) -> tuple[CheckpointManager, Listeners]:
    """The manager comes first, for it locks the folder; those who listen to it are made later."""
    listeners: Listeners = []

    def tell(event: SaveEvent) -> None:
        for listener in listeners:
            listener(event)

    text = config_as_yaml(config)
    manager = CheckpointManager(config.checkpointing, run_dir=config.run_dir, run_config_text=text, listener=tell)
    if config.checkpointing.rescue_dir is not None:
        folders.check_rescue_dir(Path(config.checkpointing.rescue_dir), Path(config.run_dir), manager.checkpoint_dir)
    return manager, listeners


def _tokenizer(config: RunConfig, point: ResumePoint, policy: EngineSpec) -> Any:
    if point.reader is None:
        models.check_folder(config.policy, policy.kind)
        return models.load_tokenizer(config.policy)
    if config.policy.lora is not None:
        models.check_base(config.policy)
    return models.load_tokenizer_from_checkpoint(point.reader.under("policy"))


def _datasets(config: RunConfig, tokenizer: Any, console: Console, **kind: Any) -> tuple[Dataset, dict[str, Dataset]]:
    prepared = {}
    longest = build_rollouts.longest_row(config)
    for name, dataset in {"": config.data.train, **config.data.validation}.items():
        with preparing(console, f"preparing {name or 'training data'}") as progress:
            prepared[name] = prepare(dataset, config.data, tokenizer, longest, progress, **kind)
        _log.info("%s: %s", f"validation set {name}" if name else "training data", prepared[name].description)
    return prepared.pop(""), prepared


def _total_steps(config: RunConfig, source: Source) -> int | None:
    """Steps that the run is to have at its end."""
    limits = [] if config.max_num_steps is None else [config.max_num_steps]
    if config.max_num_epochs is not None and source.steps_per_epoch is not None:
        limits.append(config.max_num_epochs * source.steps_per_epoch)
    return min(limits, default=None)


def _report(
    config: RunConfig, manager: CheckpointManager, total_steps: int | None, console: Console, **parts: Any
) -> RunReport:
    missed = manager.policy.missed_validations(config.checkpointing.metric_name, config.val_period)
    if missed is not None:
        _log.warning(missed)
    return RunReport(Path(config.run_dir), config.logger, total_steps=total_steps, console=console, **parts)


def _write_config(config: RunConfig) -> None:
    """The run's first file: with it the folder is a run's, to be resumed."""
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_small_file(run_dir / folders.CONFIG_FILE, config_as_yaml(config).encode())
    except OSError as error:
        raise CheckpointError(
            f"{run_dir} cannot be written to: {error.strerror or error}. "
            f"Make room, or make it writable, or name another folder as run_dir."
        ) from error


def _stop(config: RunConfig) -> StopWatch:
    by = config.checkpointing.checkpoint_must_save_by
    return StopWatch(None if by is None else parse_duration_s(by))


def _limits(config: RunConfig) -> Limits:
    return Limits(config.max_num_steps, config.val_period, config.val_at_start, config.val_at_end)


def _restore(run: Run, point: ResumePoint, report: RunReport) -> None:
    """A part may refuse what it is to go on from: only after that does anything on the disk change."""
    for name, part in run.parts.items():
        if point.reader is not None and part is not report:
            part.restore(point.reader.under(name))
    _write_config(run.kit.config)
    run.checkpoints.start_attempt(point)  # on record before anything of the left-behind branch is set aside
    if point.reader is None:
        report.restart()
        return
    report.restore(point.reader.under("report"))
    _log.info("going on from step %d (%s)", point.step, point.path)


# ------------------------------------------------------------------------------------------------- folders and changes


@contextmanager
def _cleared(run_dir: Path, checkpoint_dir: Path, overwrite: bool) -> Iterator[None]:
    """Old runs are aside, and held there, until the new one has come to be. If it does not, they are moved back."""
    moved: list[tuple[Path, Path]] = []
    with ExitStack() as locks:
        try:
            for old in folders.claim(run_dir, checkpoint_dir, overwrite=overwrite):
                locks.enter_context(lock_all([old]))  # a run that is still going on keeps its folder
                moved.append((old, folders.move_aside(old)))
            yield
        except BaseException:
            for old, aside in reversed(moved):
                folders.move_back(aside, old)
            raise


@contextmanager
def _held(manager: CheckpointManager, run_dir: Path) -> Iterator[None]:
    """A start that fails lets go of the folders, and leaves none that it made."""
    try:
        yield
    except BaseException:
        manager.shutdown()
        for folder in (manager.checkpoint_dir, run_dir):
            with suppress(CheckpointError):  # another start may have it by now, or have kept this one out
                if folder.is_dir():
                    with lock_all([folder]):
                        folders.give_back(folder)
        raise


def _tell(point: ResumePoint, config: RunConfig) -> None:
    for note in point.notes:
        _log.warning(note)
    for path, reason in point.skipped:
        _log.warning("SKIPPED %s: %s", path, reason)
    if point.reader is None:
        _log.warning("%s has no checkpoint yet: the run starts again from step 0", config.run_dir)
    rescue_dir = config.checkpointing.rescue_dir
    for info in scan(Path(rescue_dir)) if rescue_dir is not None else ():
        if info.state == "complete" and info.step > point.step:
            _log.warning("a newer state was rescued at %s: to go on from it, resume --from %s", info.path, info.path)


_CHANGE_ROUNDING = ("policy.num_threads", "policy.device")


def _check_changes(before: RunConfig, after: RunConfig, allow: frozenset[str]) -> frozenset[str]:
    """What is allowed of all that a run is made of: the algorithm is its section of the configuration, so to allow keys
    of the one is to allow the other, and the reverse. Raises `ResumeRefused`."""
    changes = [change for change in config_changes(before, after) if change.path != "run_dir"]
    sections = {section_name(config.algorithm) for config in (before, after)}
    keys = allow | (sections if "algorithm" in allow else set())
    refused = [c for c in changes if not c.allowed and not c.is_in(keys)]
    if refused:
        lines = "\n".join(f"  - {c.path}: the checkpoint was made with {c.before!r}, now {c.after!r}" for c in refused)
        raise ResumeRefused(
            f"the configuration differs in what a resumed run may not change:\n{lines}\n"
            f"Put the old value back, start a new run, or allow it by name, which may be a section's: "
            f"--allow {refused[0].path}"
        )
    for change in changes:
        _log.info("changed: %s: %r -> %r", change.path, change.before, change.after)
        if change.path in _CHANGE_ROUNDING:
            _log.warning("with another %s sums are rounded otherwise: the run goes on, not bit for bit", change.path)
    inside = any(change.is_in(sections) and not change.allowed for change in changes)
    return allow | {"algorithm"} if inside else allow


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """A run can be resumed from another working directory. Only what exists here is a path; the rest is a hub name.
    `~` is the home directory, as everywhere."""

    def full(path: str) -> str:
        return str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111 (Path's raises for an unknown user)

    def absolute(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
        paths = {key: section[key] for key in keys if section.get(key) is not None}
        return {**section, **{key: full(p) for key, p in paths.items() if os.path.exists(full(p))}}  # noqa: PTH110

    values = config.model_dump(mode="json")
    values["run_dir"] = full(config.run_dir)
    for name in ("policy", *config.further_models()):
        values[name] = absolute(values[name], "model_name")
    values["policy"]["tokenizer"] = absolute(values["policy"]["tokenizer"], "name")
    section = section_name(config.algorithm)
    places = [key for key in algorithm_config(config).places if values[section][key] is not None]
    values[section] |= {key: full(values[section][key]) for key in places}
    if "teachers" in values[section]:
        values[section]["teachers"] = [absolute(teacher, "model") for teacher in values[section]["teachers"]]
    if "rewards" in values:
        values["rewards"] = [absolute(reward, "model") for reward in values["rewards"]]
    data, checkpointing = values["data"], values["checkpointing"]
    data["train"] = absolute(data["train"], "path")
    data["validation"] = {name: absolute(section, "path") for name, section in data["validation"].items()}
    for key in ("checkpoint_dir", "rescue_dir"):
        if checkpointing[key] is not None:
            checkpointing[key] = full(checkpointing[key])
    return parse_config(values)


def _ready(console: Console | None) -> Console:
    console = console or Console()
    configure_logging(console)
    return console
