"""Families of questions with parameters, so that no two questions are equal and each has an answer by construction.

A family is a table of TOML with Jinja in it (`read_levels`):

    [[easy]]
    grid = { "a b" = "range(10, 1000)" }
    text = "What is {{ a }} + {{ b }}?"
    answer = "a + b"

Question number i of a family takes point permutation(i) of the grid of its parameters: all points once, in an order
that looks random, and only then the first again. A level takes its families in turn.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import StrictUndefined

from glm5.rl.environments.answers import is_right, is_short, spelled
from glm5.rl.environments.protocol import Environment, Reply, Task, Turn
from glm5.rl.environments.single_turn import SingleTurn

_EXPRESSIONS = ("answer", "arguments", "num_inputs", "rows", "lookups")


@dataclass(frozen=True)
class Question:
    """A text, its answer, and the unit in which the answer is asked for."""

    text: str
    answer: Fraction | int
    unit: str = ""


@dataclass(frozen=True)
class Family:
    """What makes one kind of a thing, of every point of a grid."""

    make: Callable[..., Any]
    grid: dict[str, Sequence[Any]]

    @property
    def size(self) -> int:
        return prod(map(len, self.grid.values()))

    def point(self, number: int) -> dict[str, Any]:
        """The parameters of a number."""
        place, chosen = shuffled(number, self.size), dict[str, Any]()
        for name, values in self.grid.items():
            place, index = divmod(place, len(values))
            chosen[name] = values[index]
        return chosen


@dataclass(frozen=True)
class Level:
    """The families of a level."""

    families: Sequence[Family]

    def made(self, seed: int) -> Any:
        """What seed 0, 1, ... makes."""
        number, family = divmod(seed, len(self.families))
        return self.families[family].make(**self.families[family].point(number))


def read_levels(name: str, make: Callable[..., Any], *calls: Callable[..., Any]) -> list[Level]:
    """The levels of name.toml beside this file, of whose families each has

        grid      for each parameter a list of choices, or an expression; names that share them are in one key
        let       more names, each for an expression (optional)
        others    arguments of `make`: templates, or expressions where _EXPRESSIONS has the key

    Expressions know `calls` by their names, and the lists of the table [choices].
    """
    tables = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    jinja = Jinja(undefined=StrictUndefined)
    jinja.globals |= {one.__name__: one for one in calls} | tables.pop("choices", {})

    def expression(text: str) -> Callable[..., Any]:
        return jinja.compile_expression(text, undefined_to_none=False)

    def family(grid: dict[str, Any], let: Mapping[str, str] = {}, **parts: Any) -> Family:
        computed = {key: expression(text) for key, text in let.items()}
        parts = {
            key: expression(part) if key in _EXPRESSIONS else jinja.from_string(part).render
            for key, part in parts.items()
        }

        def made(**point: Any) -> Any:
            point |= {key: compute(point) for key, compute in computed.items()}
            return make(**{key: part(point) for key, part in parts.items()})

        choices = {key: expression(one)() if isinstance(one, str) else one for key, one in grid.items()}
        return Family(made, {key: choices[keys] for keys in choices for key in keys.split()})

    return [Level([family(**one) for one in level]) for level in tables.values()]


def shuffled(number: int, size: int) -> int:
    """A fixed permutation of range(size): a Feistel network over the next even number of bits, walked until it is back
    in the range. Numbers from `size` on begin anew."""
    half = ((size - 1).bit_length() + 1) // 2 or 1
    mask, value = 2**half - 1, number % size
    while True:
        left, right = value >> half, value & mask
        for key in range(4):
            mixed = (right + key * 0x9E3779B9 + 1) * 0x9E3779B97F4A7C15 % 2**64
            left, right = right, left ^ ((mixed >> 29) & mask)
        value = left << half | right
        if value < size:
            return value


class Questions(Environment):
    """An environment of questions that a number answers, reward 1 or 0."""

    is_quick = True

    def __init__(self, name: str, levels: Sequence[Level]) -> None:
        self.name, self.levels, self._levels = name, len(levels), levels

    def task(self, seed: int, level: int) -> Task:
        question: Question = self._levels[level].made(seed)
        answer = Fraction(question.answer)
        how = "" if is_short(answer) else " Give a fraction, or 4 significant digits or more."
        asked = {"role": "user", "content": question.text + how}
        return Task(self.name, seed, level, (asked,), {"answer": str(answer), "unit": question.unit})

    def reset(self, task: Task) -> SingleTurn:
        return SingleTurn(task, lambda reply: scored(reply, task))

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(f"{spelled(Fraction(task.data['answer']))} {task.data['unit']}".strip())]


def scored(reply: Reply, task: Task) -> Turn:
    """The end of an episode whose last reply is a number."""
    right = is_right(reply.content, Fraction(task.data["answer"]), task.data["unit"])
    return Turn(is_done=True, rewards={"right": float(right)})
