"""Each file of a real run's newest checkpoint is damaged in turn: `ckpt verify` says so, and a resume falls back."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from surefoot.cli import app
from tests.helpers import runs
from tests.torture.flips import damages
from tests.torture.real_runs import STEPS, Progress, Reference, Tally, fresh


def flip(
    reference: Reference, folder: Path, count: int, seed: int = 0, progress: Progress = lambda done: None
) -> Tally:
    """`count` single damages: flipped bits, cut ends, bytes added. Each is mended before the next one."""
    tally = Tally("flips")
    run_dir = fresh(folder) / "run"
    shutil.copytree(reference.straight, run_dir)
    newest = run_dir / "checkpoints" / f"step_{STEPS}"
    for damage in damages(newest, count, seed):
        with tally.judging(f"seed {seed}, number {tally.done}, {damage.what} in {damage.path.relative_to(run_dir)}"):
            result = CliRunner().invoke(app, ["ckpt", "verify", str(newest)])
            assert result.exit_code == 1, result.output
            with _small_files_kept(run_dir), _messages() as said:
                run = runs.resumed(run_dir)
                run.checkpoints.shutdown()
                assert run.clock.step == STEPS - 1
                assert any(line.startswith(f"SKIPPED {newest}:") for line in said), said
        tally.done += 1
        progress(tally.done)
    with tally.judging("after the last one was mended"):
        assert CliRunner().invoke(app, ["ckpt", "verify", str(newest)]).exit_code == 0
        assert runs.resumed(run_dir, f"max_num_steps={STEPS + 1}").clock.step == STEPS
    return tally


@contextmanager
def _small_files_kept(run_dir: Path) -> Iterator[None]:
    """A resume begins a new attempt, to which the damaged checkpoint does not belong: take that back."""
    folders = (run_dir, run_dir / "checkpoints")
    before = {path: path.read_bytes() for folder in folders for path in folder.iterdir() if path.is_file()}
    try:
        yield
    finally:
        for path in [path for folder in folders for path in folder.iterdir() if path.is_file()]:
            if path not in before:
                path.unlink()
        for path, data in before.items():
            path.write_bytes(data)


@contextmanager
def _messages() -> Iterator[list[str]]:
    """What the package logs."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("surefoot")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
