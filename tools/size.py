"""Print the package's size, its longest file and its longest function."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "surefoot"


def main() -> None:
    files = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {path: len(text.splitlines()) for path, text in files.items()}
    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    longest_file = max(lines, key=lambda path: lines[path])
    length, where = max(functions)
    print(f"package            {sum(lines.values())} lines in {len(files)} files (limit 10000)")
    print(f"longest file       {lines[longest_file]} lines: {longest_file.relative_to(PACKAGE)} (limit 600)")
    print(f"longest function   {length} lines: {where} (limit 60)")


if __name__ == "__main__":
    main()
