"""One question of arithmetic, one answer."""

from __future__ import annotations

import random
from typing import Any

from surefoot.rollout.environments import Environment, Message, Row, Step
from surefoot.rollout.reward_functions import last_number
from surefoot.seeds import derive_seed


class Arithmetic(Environment):
    """Reward 1 where the last number said is the right one.

    Args:
        operators: those that are asked for.
        num_terms: numbers in a question.
        num_digits: the most that a number has.
    """

    reply_role = None

    def __init__(self, *, operators: str = "+-", num_terms: int = 2, num_digits: int = 2) -> None:
        if not operators or set(operators) - set("+-*") or num_terms < 2 or num_digits < 1:
            raise ValueError(
                "expected operators out of +-*, num_terms of at least 2 and num_digits of at least 1, found "
                f"{operators!r}, {num_terms} and {num_digits}"
            )
        self._operators, self._num_terms, self._num_digits = operators, num_terms, num_digits

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        return [self._row(random.Random(derive_seed(seed, "arithmetic", i))) for i in range(num_rows)]

    def _row(self, chance: random.Random) -> dict[str, Any]:
        numbers = [chance.randrange(10**self._num_digits) for _ in range(self._num_terms)]
        text, total, product = str(numbers[0]), 0, numbers[0]
        for number in numbers[1:]:
            operator = chance.choice(self._operators)
            text += f"{operator}{number}"
            if operator == "*":
                product *= number
            else:
                total, product = total + product, number if operator == "+" else -number
        return {"prompt": f"{text}=", "answer": str(total + product)}

    def reset(self, row: Row) -> list[Message]:
        self._answer = last_number(str(row["answer"]))
        return self.opening(row)

    def step(self, message: Message) -> Step:
        return Step(reward=float(last_number(message["content"]) == self._answer), done=True)
