"""Questions that take tools, in three levels: one call; several, whose results are computed with; a program.

lookup(item, field)        what a table says, which nothing else tells
calculator(expression)     exact arithmetic
python(code)               runs in a sandbox; at the last level only
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import isqrt
from random import Random
from typing import Any

from glm5.rl.environments.answers import is_short, spelled
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.calculator import calculate
from glm5.rl.environments.families import Level, read_levels, scored
from glm5.rl.environments.protocol import Environment, Reply, Task
from glm5.rl.environments.tool_use import LazyBox, ToolEpisode, call, function_tool

SECONDS = 5.0
NUM_TURNS = 8
LOOKUP = function_tool("lookup", "Look up a field of an item.", item="its code", field="the name of the field")
CALCULATOR = function_tool("calculator", "Compute.", expression="numbers, + - * / // % ** and ( )")
PYTHON = function_tool("python", "Run a program; you get what it prints.", code="Python 3")


@dataclass(frozen=True)
class Problem:
    """A question, its answer, what `lookup` knows (`rows`), and the calls that lead to the answer: lookups, then the
    calculator or a program."""

    text: str
    answer: Fraction | int
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    lookups: Sequence[tuple[str, str]] = ()
    expression: str = ""
    code: str = ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        calls = [call("lookup", item=item, field=name) for item, name in self.lookups]
        calls += [call("calculator", expression=self.expression)] if self.expression else []
        return calls + ([call("python", code=self.code)] if self.code else [])


class Tools(Environment):
    """`boxes`: where programs of the last level run."""

    name, num_turns, levels, sandbox_levels, is_quick, begins_quickly = "tools", NUM_TURNS, 3, (2,), True, True

    def __init__(self, boxes: Boxes = NO_BOXES) -> None:
        self._boxes = boxes

    def task(self, seed: int, level: int) -> Task:
        problem: Problem = _levels()[level].made(seed)
        answer = Fraction(problem.answer)
        how = "" if is_short(answer) else " Give a fraction, or 4 significant digits or more."
        table = {item: {name: str(value) for name, value in row.items()} for item, row in problem.rows.items()}
        data = {"answer": str(answer), "unit": "", "table": table, "calls": problem.calls}
        tools = (LOOKUP, CALCULATOR, PYTHON) if level in self.sandbox_levels else (LOOKUP, CALCULATOR)
        return Task(self.name, seed, level, ({"role": "user", "content": problem.text + how},), data, tools)

    def reset(self, task: Task) -> ToolEpisode:
        box, table = LazyBox(self._boxes), task.data["table"]
        tools = {
            "lookup": lambda given: _looked_up(table, given["item"], given["field"]),
            "calculator": lambda given: calculate(given["expression"]),
            "python": lambda given: box.run_python(given["code"], SECONDS),
        }
        offered = {tool["function"]["name"]: tools[tool["function"]["name"]] for tool in task.tools}
        return ToolEpisode(task, offered, lambda reply: scored(reply, task), NUM_TURNS, box)

    def oracle(self, task: Task) -> Sequence[Reply]:
        answer = Reply(spelled(Fraction(task.data["answer"])))
        return [*(Reply("", tool_calls=[each]) for each in task.data["calls"]), answer]


def _looked_up(table: dict[str, dict[str, str]], item: str, name: str) -> str:
    if item not in table:
        raise ValueError(f"no item {item!r:.40}")
    if name not in table[item]:
        raise ValueError(f"no field {name!r:.40}; there are {', '.join(table[item])}")
    return table[item][name]


@cache
def _levels() -> list[Level]:
    return read_levels(
        "tools", Problem, Fraction, items, row_of, list_of, sum_of_primes, num_pairs, digit_sum, far_term
    )


def items() -> list[str]:
    return [f"{a}{b}{c}" for a in "BDFGK" for b in "AEIOU" for c in "LMNPRST"]


def row_of(item: str, *seed: Any) -> dict[str, int]:
    """An item's fields. They differ from task to task, so that none can be learnt by heart."""
    random = Random(f"table {item} {seed}")
    return {"price": random.randint(11, 999), "weight": random.randint(11, 999), "stock": random.randint(11, 999)}


def list_of(item: str, m: int, length: int) -> list[int]:
    random = Random(f"list {item} {m} {length}")
    return [random.randint(1, 999) for _ in range(length)]


def sum_of_primes(low: int, high: int) -> int:
    return sum(n for n in range(low, high + 1) if all(n % d for d in range(2, isqrt(n) + 1)))


def num_pairs(numbers: Sequence[int], m: int) -> int:
    """Those whose sum m divides."""
    return sum((a + b) % m == 0 for i, a in enumerate(numbers) for b in numbers[:i])


def digit_sum(n: int) -> int:
    return sum(map(int, str(n)))


def far_term(value: int, a: int, m: int, n: int) -> int:
    """x(n), where x(1) is the value and x(n + 1) the remainder of x(n)^2 + a divided by m."""
    for _ in range(n - 1):
        value = (value * value + a) % m
    return value
