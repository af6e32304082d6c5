"""The generators' contract, kept by the torch sampler; vLLM keeps it in `tests/vllm`, where it is installed. The folder
`surefoot/generation` is listed: a generator that no subclass of `GeneratorContract` starts fails the first test."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import surefoot.generation
from surefoot.generation.torch_sampler import TorchSampler
from surefoot.types import Generator
from tests.contract.generator_contract import GeneratorContract

TESTS = Path(__file__).parents[1]


def classes(files: Iterator[Path]) -> Iterator[ast.ClassDef]:
    """Read, not imported: some need an extra."""
    for file in files:
        yield from (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_generator_keeps_the_contract() -> None:
    needed = {name for name, member in vars(Generator).items() if callable(member) and not name.startswith("_")}
    there = classes(Path(surefoot.generation.__path__[0]).glob("*.py"))
    started = {
        ast.unparse(start.returns)
        for node in classes(TESTS.glob("*/test_*.py"))
        if any(ast.unparse(base) == "GeneratorContract" for base in node.bases)
        for start in [methods(node)["start"]]
        if start.returns is not None
    }
    assert {node.name for node in there if needed <= methods(node).keys()} == started


class TestTorchSampler(GeneratorContract):
    @classmethod
    def start(cls, model: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> TorchSampler:
        return TorchSampler(model, weights, slots=16, **options)


class TestTorchSamplerOfFewSlots(GeneratorContract):
    @classmethod
    def start(cls, model: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> TorchSampler:
        return TorchSampler(model, weights, slots=3, **options)


class TestInexactTorchSampler(GeneratorContract):
    @classmethod
    def start(cls, model: Any, weights: Mapping[str, torch.Tensor], **options: Any) -> TorchSampler:
        return TorchSampler(model, weights, slots=16, exact=False, **options)
