"""Damage a checkpoint in one place at a time, everywhere, and collect what goes unseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Damage(NamedTuple):
    path: Path
    what: str


def damages(checkpoint: Path, count: int, seed: int) -> Iterator[Damage]:
    """Damage one file, hand out what was done, and mend it when asked for the next. Every file has its turn; three of
    four damages flip one bit, the others cut off or add bytes."""
    rng = random.Random(seed)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for number in range(count):
        path = files[number % len(files)]
        sound = path.read_bytes()
        broken, what = _damaged(sound, rng)
        path.write_bytes(broken)
        try:
            yield Damage(path, what)
        finally:
            path.write_bytes(sound)


def unseen(checkpoint: Path, count: int, seed: int, is_sound: Callable[[Path], bool]) -> list[Damage]:
    """The damages after which `is_sound` still says yes: there must be none."""
    return [damage for damage in damages(checkpoint, count, seed) if is_sound(checkpoint)]


def _damaged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    kind = rng.randrange(8)
    if not data or kind == 0:
        added = rng.randbytes(rng.randint(1, 64))
        return data + added, f"{len(added)} bytes added"
    if kind == 1:
        keep = rng.randrange(len(data))
        return data[:keep], f"cut from {len(data)} to {keep} bytes"
    bit = rng.randrange(len(data) * 8)
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << (bit % 8)
    return bytes(flipped), f"bit {bit} flipped"
