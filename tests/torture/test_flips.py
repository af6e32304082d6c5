"""Damage anywhere in a checkpoint is seen, by the proof and by whoever reads the file."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint import LocalReader, verify_checkpoint
from surefoot.errors import CorruptCheckpoint
from tests.checkpoint import runs
from tests.torture.flips import damages, unseen


def test_every_damage_is_seen_by_verify(memory_path: Path) -> None:
    checkpoint = runs.save(runs.manager(memory_path, run_config_text="seed: 1\n"), 2)
    assert unseen(checkpoint, 1000, seed=0, is_sound=lambda path: verify_checkpoint(path).sound) == []
    assert verify_checkpoint(checkpoint).sound  # and it was mended each time


def test_every_damage_is_seen_by_the_reader(memory_path: Path) -> None:
    checkpoint = runs.save(runs.manager(memory_path, run_config_text="seed: 1\n"), 2)
    silent = []
    for damage in damages(checkpoint, 300, seed=1):
        try:
            reader = LocalReader.open(checkpoint)
            for name in reader.files():
                reader.bytes(name)
            silent.append(damage)
        except CorruptCheckpoint:
            pass
    assert silent == []
