"""Who may import whom, and how light the outermost imports are. The rules are in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "surefoot"
SERVICES = {"data", "data_plane", "engine", "generation", "weight_sync", "checkpoint", "report"}
EVERYONE = {"errors", "seeds"}
RECORDS = {"types"} | EVERYONE
PARSED = {"config"} | RECORDS

# Part of the package -> the parts it may import besides itself. A part that is missing here fails the test.
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "seeds": set(),
    "metrics": set(),
    "weights": set(),
    "types": {"errors", "metrics"},
    "config": EVERYONE,
    "config_file": PARSED,
    "run": {"types", "checkpoint"},  # the manager by name, for annotations
    "loop": {"run", "types", "errors"},
    "stop": RECORDS,
    "run_dir": EVERYONE,
    "losses": RECORDS,
    "advantages": {"types", "errors"},
    "alignment": {"types", "errors"},
    **dict.fromkeys(SERVICES, {"weights"} | PARSED),
    "rollout": {"data", "advantages"} | PARSED,
    "algorithms": {"losses", "advantages", "alignment", *SERVICES, "rollout"} | PARSED,
}
ANYTHING = {"build", "build_engines", "build_rollouts", "fingerprints", "cli", "demo", "__main__"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def internal_imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide what is imported"
            names = [node.module or ""]
            if node.module == "surefoot":
                names = [f"surefoot.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "surefoot":
                yield name.split(".")[1] if "." in name else "__init__", node.lineno


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_keep_the_rules(path: Path) -> None:
    part = part_of(path)
    if part in ANYTHING:
        return
    assert part in ALLOWED, f"{part} has no import rule: add one here and in CONTRIBUTING.md"
    for imported, line in internal_imports(path):
        assert imported in ALLOWED[part] | {part}, f"{path}:{line}: {part} may not import {imported}"


def modules_loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import surefoot", "import surefoot.types, surefoot.config", "import surefoot.cli"])
def test_outer_imports_are_light(code: str) -> None:
    heavy = {"torch", "transformers", "datasets", "numpy", "pyarrow", "tensorboard"}
    assert not heavy & modules_loaded_by(code)


def test_ray_and_transfer_queue_stay_in_their_adapters() -> None:
    adapters = {PACKAGE / "engine" / "ray.py", PACKAGE / "data_plane" / "transfer_queue.py"}
    for path in set(PACKAGE.rglob("*.py")) - adapters:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.partition(".")[0] for n in names} & {"ray", "transfer_queue"}, path


def test_only_the_loop_looks_for_a_failed_save() -> None:
    uses = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "raise_if_finalization_failed"
    ]
    assert uses == ["loop.py"]


def test_nothing_unpickles_evaluates_or_starts_a_shell() -> None:
    forbidden = {"pickle", "cPickle", "dill", "marshal", "shelve"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {n.partition(".")[0] for n in names}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load", "torch.save", "os.system"}, f"{path}:{node.lineno}"
                assert not any(k.arg == "shell" for k in node.keywords), f"{path}:{node.lineno}"


def test_no_file_is_over_600_lines_and_no_function_over_60() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}:{node.lineno} {node.name}"
