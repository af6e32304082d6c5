"""A number to be guessed, with hints: the model must use what it was told in earlier turns."""

from __future__ import annotations

import random
from typing import Any

from surefoot.rollout.environments import Environment, Message, Row, Step
from surefoot.rollout.reward_functions import last_number
from surefoot.seeds import derive_seed


class Guessing(Environment):
    """Reward 1 for the number at the first guess, less with each further one, 0 when there are none left.

    Args:
        highest: numbers are from 1 to this.
        max_guesses: what the model has; bisection needs log2(highest) + 1.
    """

    def __init__(self, *, highest: int = 16, max_guesses: int = 5) -> None:
        if highest < 2 or max_guesses < 1:
            raise ValueError(f"expected highest above 1 and max_guesses above 0, found {highest} and {max_guesses}")
        self._highest, self._max_guesses = highest, max_guesses

    def rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        chances = [random.Random(derive_seed(seed, "guessing", i)) for i in range(num_rows)]
        prompt = f"Guess my number from 1 to {self._highest}."
        return [{"prompt": prompt, "secret": chance.randint(1, self._highest)} for chance in chances]

    def reset(self, row: Row) -> list[Message]:
        self._secret, self._num_guesses = int(row["secret"]), 0
        return self.opening(row)

    def step(self, message: Message) -> Step:
        self._num_guesses += 1
        guess = last_number(message["content"])
        if guess == self._secret:
            return Step(reward=1 - (self._num_guesses - 1) / self._max_guesses, done=True)
        if self._num_guesses == self._max_guesses:
            return Step(reward=0.0, done=True)
        hint = "Say a number." if guess is None else "Higher." if guess < self._secret else "Lower."
        return Step(({"role": "user", "content": hint},))
