"""Arithmetic that is hard in the head and easy with a tool."""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import Any

from surefoot.rollout.environments import Message, Row, Step
from surefoot.rollout.environments.arithmetic import Arithmetic
from surefoot.rollout.environments.tools import Tools
from surefoot.rollout.reward_functions import last_number

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_CHARACTERS = 200


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % and parentheses, such as 12 * (3 + 4).
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {_MAX_CHARACTERS} characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError:
        raise ValueError("this is no expression") from None


def _value(node: ast.expr) -> int | float:
    """Powers are left out: with them a short text asks for more digits than there is memory."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result: int | float = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError("only numbers, + - * / // % and parentheses can be worked out")


class Calculator(Tools):
    """Reward 1 where the last number of the final answer is the right one; 0 as long as there is no answer.

    Args:
        operators, num_terms, num_digits: of the questions, as in `arithmetic`.
    """

    def __init__(
        self,
        *,
        operators: str = "+-*",
        num_terms: int = 2,
        num_digits: int = 3,
        call_start: str = "<tool_call>",
        call_end: str = "</tool_call>",
    ) -> None:
        super().__init__(tools=[calculate], call_start=call_start, call_end=call_end)
        self._questions = Arithmetic(operators=operators, num_terms=num_terms, num_digits=num_digits)

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        return self._questions.rows(num_rows, seed)

    def reset(self, row: Row) -> list[Message]:
        self._answer = last_number(str(row["answer"]))
        return super().reset(row)

    def step(self, message: Message) -> Step:
        step = super().step(message)
        return step if step.done else replace(step, reward=0.0)

    def judge(self, answer: str) -> float:
        return float(last_number(answer) == self._answer)
