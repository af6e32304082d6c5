"""The committed trajectories: what a tiny run of each algorithm measured at each step.

`python -m tests.golden.trajectories` writes them anew. Do so only when a change of the numbers is meant, and say why in
the commit.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from surefoot.config_file import algorithm_names
from tests.helpers import runs

FOLDER = Path(__file__).parent


def measure(algorithm: str, folder: Path) -> list[dict[str, Any]]:
    file = runs.write_project(folder, algorithm=algorithm)
    runs.trained(file, "max_num_steps=8", "checkpointing.enabled=false")
    return runs.metric_lines(folder / "run")


def main() -> None:
    for algorithm in algorithm_names():
        with tempfile.TemporaryDirectory() as folder:
            lines = measure(algorithm, Path(folder))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (FOLDER / f"{algorithm}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
