"""Descriptions of functions with right solutions (programs.toml), for `coding.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_lowercase
from typing import Any

from glm5.rl.environments.families import Level, read_levels

Arguments = Callable[[Random], list[Any]]


@dataclass(frozen=True)
class Program:
    """`text`: signature and what it returns. `body`: lines of a right solution. `arguments`: draws one input."""

    text: str
    body: str
    arguments: Arguments
    num_inputs: int = 16

    @property
    def source(self) -> str:
        lines = [f"    {line}" for line in self.body.split("\n")]
        return "\n".join([f"def {self.text[: self.text.index(')') + 1]}:", *lines, ""])


@cache
def program_levels() -> list[Level]:
    return read_levels("programs", Program, repr, number, numbers, word, two, weighed, intervals, postfix)


def number(low: int, high: int) -> Arguments:
    return lambda random: [random.randint(low, high)]


def numbers(low: int, high: int, most: int = 12) -> Arguments:
    return lambda random: [[random.randint(low, high) for _ in range(random.randint(0, most))]]


def word(letters: str = ascii_lowercase, most: int = 12) -> Arguments:
    return lambda random: ["".join(random.choices(letters, k=random.randint(0, most)))]


def two(one: Arguments) -> Arguments:
    return lambda random: one(random) + one(random)


def weighed(random: Random) -> list[Any]:
    """Pairs of weight and value."""
    return [[[random.randint(1, 25), random.randint(1, 50)] for _ in range(random.randint(0, 8))]]


def intervals(random: Random) -> list[Any]:
    starts = [random.randint(0, 400) for _ in range(random.randint(0, 8))]
    return [[[start, start + random.randint(1, 60)] for start in starts]]


def postfix(random: Random) -> list[Any]:
    """Tokens of an expression in postfix notation."""
    tokens, depth = [str(random.randint(0, 99))], 1
    while depth > 1 or len(tokens) < 9:
        is_operator = depth > 1 and (random.random() < 0.5 or len(tokens) > 12)
        tokens.append(random.choice("+-*") if is_operator else str(random.randint(0, 99)))
        depth += -1 if is_operator else 1
    return [tokens]
