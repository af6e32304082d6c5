"""Write what TRL and torchtune compute to the JSON files of this folder, for machines without them.

    python -m tests.parity.make_reference

Needs trl==1.16.* (`pip install 'trl==1.16.0'`) and torchtune==0.6.* (`pip install --no-deps 'torchtune==0.6.1'`). Where
the two are installed the parity tests use them, and then also check that these files are what they compute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.parity import torchtune_reference, trl_reference
from tests.parity.cases import CASES, DISTILL_CASES, GAE_CASES, GOLD_CASES, POLICY_CASES, REWARD_CASES

FOLDER = Path(__file__).parent


def main() -> None:
    for name, reference in (("trl", trl_reference), ("torchtune", torchtune_reference)):
        if not reference.installed():
            sys.exit(f"{name} {reference.VERSION} is not installed: see this file's header")
    write("trl_preference", {name: trl_reference.preference(case) for name, case in CASES.items()})
    write("trl_reward", {name: trl_reference.reward(*case) for name, case in REWARD_CASES.items()})
    write("trl_policy", {name: trl_reference.policy(case) for name, case in POLICY_CASES.items()})
    write("trl_gold", {name: trl_reference.gold(case) for name, case in GOLD_CASES.items()})
    write("trl_distillation", {name: trl_reference.distillation(case) for name, case in DISTILL_CASES.items()})
    write("torchtune", torchtune())


def torchtune() -> dict[str, Any]:
    estimated = {name: torchtune_reference.estimated(*case) for name, case in GAE_CASES.items()}
    return estimated | {f"whiten, {shift}": torchtune_reference.whitened(shift) for shift in (True, False)}


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
