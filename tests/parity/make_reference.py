"""Write what TRL computes to trl_preference.json and trl_reward.json, for machines without TRL.

    python -m tests.parity.make_reference

Needs trl==1.16.* (`pip install 'trl==1.16.0'`). The parity tests use TRL itself where it is installed, and then also
check that these files are what it computes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.parity import trl_reference
from tests.parity.cases import CASES, REWARD_CASES

FOLDER = Path(__file__).parent


def main() -> None:
    if not trl_reference.installed():
        sys.exit(f"trl {trl_reference.VERSION} is not installed: pip install 'trl=={trl_reference.VERSION}.0'")
    write("trl_preference", {name: trl_reference.preference(case) for name, case in CASES.items()})
    write("trl_reward", {name: trl_reference.reward(*case) for name, case in REWARD_CASES.items()})


def write(name: str, values: dict[str, Any]) -> None:
    """One line per case; nine digits are all that float32 has."""
    lines = (f"{json.dumps(case)}: {json.dumps(_short(found))}" for case, found in values.items())
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return values


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return float(f"{value:.9g}")


if __name__ == "__main__":
    main()
