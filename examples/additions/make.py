"""Writes the data of the examples anew: all sums below 100 of a two-digit and a one-digit number, a hundred of them
held out; each once with its answer, and once as a preference of that answer over a number that is wrong in both digits.

    python examples/additions/make.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_HELDOUT = 100


def files(seed: int = 0) -> dict[str, str]:
    """Each file's name and text."""
    rng = random.Random(seed)
    sums = [(a, b) for a in range(10, 100) for b in range(1, 10) if a + b < 100]
    rng.shuffle(sums)
    texts = {}
    for names, part in (
        (("heldout.jsonl", "preferences_heldout.jsonl"), sums[:NUM_HELDOUT]),
        (("train.jsonl", "preferences.jsonl"), sums[NUM_HELDOUT:]),
    ):
        rows, preferences = [], []
        for a, b in part:
            prompt, answer = f"{a}+{b}=", str(a + b)
            wrong = rng.choice([text for text in map(str, range(10, 100)) if all(map(str.__ne__, text, answer))])
            rows.append({"prompt": prompt, "completion": answer})
            preferences.append({"prompt": prompt, "chosen": answer, "rejected": wrong})
        texts |= zip(names, (_lines(rows), _lines(preferences)), strict=True)
    return texts


def _lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    for name, text in files().items():
        (Path(__file__).parent / name).write_text(text)
