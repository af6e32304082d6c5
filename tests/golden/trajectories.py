"""The committed trajectories: what the tiny run of each case measured at each step.

`python -m tests.golden.trajectories [CASE…]` writes them anew, all of them or those named. Do so only when a change of
the numbers is meant, and say why in the commit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers import runs

FOLDER = Path(__file__).parent


def measure(case: str, folder: Path) -> list[dict[str, Any]]:
    file = runs.write_project(folder, case=case)
    runs.trained(file, "max_num_steps=8", "checkpointing.enabled=false")
    return runs.metric_lines(folder / "run")


def main() -> None:
    for case in sys.argv[1:] or runs.CASES:
        with tempfile.TemporaryDirectory() as folder:
            lines = measure(case, Path(folder))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (FOLDER / f"{case}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
