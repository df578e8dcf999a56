"""Questions that take tools, in three levels: one call; several, whose results are computed with; a program.

lookup(item, field)        what a table says, which nothing else tells
calculator(expression)     exact arithmetic
python(code)               runs in a sandbox; at the last level only
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt
from random import Random
from typing import Any

from glm5.rl.environments.answers import is_short, spelled
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.calculator import calculate
from glm5.rl.environments.families import Level, scored
from glm5.rl.environments.protocol import Environment, Reply, Task
from glm5.rl.environments.tool_use import LazyBox, ToolEpisode, call, function_tool

EASY, MEDIUM, HARD = Level(), Level(), Level()
SECONDS = 5.0
NUM_TURNS = 8
LOOKUP = function_tool("lookup", "Look up a field of an item.", item="its code", field="the name of the field")
CALCULATOR = function_tool("calculator", "Compute.", expression="numbers, + - * / // % ** and ( )")
PYTHON = function_tool("python", "Run a program; you get what it prints.", code="Python 3")
FIELDS = ("price", "weight", "stock")
ITEMS = tuple(f"{a}{b}{c}" for a in "BDFGK" for b in "AEIOU" for c in "LMNPRST")


@dataclass(frozen=True)
class Problem:
    """A question, its answer, the table that `lookup` reads, and the calls that lead to the answer."""

    text: str
    answer: Fraction | int
    calls: Sequence[dict[str, Any]]
    table: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])


class Tools(Environment):
    """`boxes`: where programs of the last level run."""

    name, num_turns, levels, sandbox_levels, is_quick = "tools", NUM_TURNS, 3, (2,), True

    def __init__(self, boxes: Boxes = NO_BOXES) -> None:
        self._boxes = boxes

    def task(self, seed: int, level: int) -> Task:
        problem: Problem = (EASY, MEDIUM, HARD)[level].made(seed)
        answer = Fraction(problem.answer)
        how = "" if is_short(answer) else " Give a fraction, or 4 significant digits or more."
        data = {"answer": str(answer), "unit": "", "table": problem.table, "calls": list(problem.calls)}
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


def _row(item: str, *seed: Any) -> dict[str, int]:
    """An item's fields. They differ from task to task, so that none can be learnt by heart."""
    random = Random(f"table {item} {seed}")
    return {"price": random.randint(11, 999), "weight": random.randint(11, 999), "stock": random.randint(11, 999)}


def _table(rows: dict[str, dict[str, int]]) -> dict[str, dict[str, str]]:
    return {item: {name: str(number) for name, number in row.items()} for item, row in rows.items()}


@EASY.family(item=ITEMS, shop=range(1, 100), name=FIELDS)
def one_field(item: str, shop: int, name: str) -> Problem:
    rows = {item: _row(item, shop, name)}
    text = f"Shop {shop}: what is the {name} of {item}?"
    return Problem(text, rows[item][name], [call("lookup", item=item, field=name)], _table(rows))


@EASY.family(a=range(123, 9999, 4), b=range(1001, 9999, 7))
def large_product(a: int, b: int) -> Problem:
    return Problem(f"What is {a} * {b}?", a * b, [call("calculator", expression=f"{a} * {b}")])


@EASY.family(a=range(1234, 9999, 3), b=range(11, 99), c=range(101, 999, 7))
def large_sum(a: int, b: int, c: int) -> Problem:
    return Problem(f"What is {a} + {b} * {c}?", a + b * c, [call("calculator", expression=f"{a} + {b} * {c}")])


@MEDIUM.family(first=ITEMS[::2], second=ITEMS[1::2], n=range(2, 13), m=range(2, 13))
def two_prices(first: str, second: str, n: int, m: int) -> Problem:
    rows = {item: _row(item, first, second, n, m) for item in (first, second)}
    a, b = rows[first]["price"], rows[second]["price"]
    calls = [call("lookup", item=item, field="price") for item in rows]
    calls.append(call("calculator", expression=f"{n} * {a} + {m} * {b}"))
    return Problem(f"What do {n} {first} and {m} {second} cost together?", n * a + m * b, calls, _table(rows))


@MEDIUM.family(first=ITEMS[::2], second=ITEMS[1::2], name=FIELDS)
def difference(first: str, second: str, name: str) -> Problem:
    rows = {item: _row(item, first, second, name) for item in (first, second)}
    a, b = rows[first][name], rows[second][name]
    calls = [call("lookup", item=item, field=name) for item in rows]
    calls.append(call("calculator", expression=f"{a} - {b}"))
    return Problem(f"What is the {name} of {first} less the {name} of {second}?", a - b, calls, _table(rows))


@MEDIUM.family(item=ITEMS, discount=range(1, 100), n=range(1, 13))
def discounted(item: str, discount: int, n: int) -> Problem:
    rows = {item: _row(item, discount, n)}
    price = rows[item]["price"]
    calls = [call("lookup", item=item, field="price")]
    calls.append(call("calculator", expression=f"{n} * {price} * (100 - {discount}) / 100"))
    text = f"What do {n} {item} cost with {discount} % off?"
    return Problem(text, Fraction(n * price * (100 - discount), 100), calls, _table(rows))


@MEDIUM.family(item=ITEMS[::2], other=ITEMS[1::2], name=("price", "weight"))
def whole_stock(item: str, other: str, name: str) -> Problem:
    rows = {each: _row(each, item, other, name) for each in (item, other)}
    numbers = [int(rows[each][key]) for each in (item, other) for key in (name, "stock")]
    calls = [call("lookup", item=each, field=key) for each in (item, other) for key in (name, "stock")]
    calls.append(call("calculator", expression="{} * {} + {} * {}".format(*numbers)))
    total = numbers[0] * numbers[1] + numbers[2] * numbers[3]
    return Problem(f"What is the {name} of all {item} and all {other} in stock together?", total, calls, _table(rows))


@HARD.family(low=range(100, 2000, 3), length=range(100, 1000, 7))
def sum_of_primes(low: int, length: int) -> Problem:
    high = low + length
    code = f"print(sum(n for n in range({low}, {high} + 1) if all(n % d for d in range(2, int(n**0.5) + 1))))"
    total = sum(n for n in range(low, high + 1) if all(n % d for d in range(2, isqrt(n) + 1)))
    return Problem(f"What is the sum of all primes from {low} to {high}?", total, [call("python", code=code)])


@HARD.family(item=ITEMS, m=range(7, 60), length=range(20, 60))
def pairs_of_a_list(item: str, m: int, length: int) -> Problem:
    random = Random(f"list {item} {m} {length}")
    numbers = [random.randint(1, 999) for _ in range(length)]
    text = ", ".join(map(str, numbers))
    pairs = sum((a + b) % m == 0 for i, a in enumerate(numbers) for b in numbers[:i])
    code = f"x = [{text}]\nprint(sum((a + b) % {m} == 0 for i, a in enumerate(x) for b in x[:i]))"
    calls = [call("lookup", item=item, field="list"), call("python", code=code)]
    asked = f"How many pairs in the list of {item} have a sum that {m} divides? It has {length} numbers."
    return Problem(asked, pairs, calls, {item: {"list": text}})


@HARD.family(a=range(2, 60), b=range(100, 400))
def digits_of_a_power(a: int, b: int) -> Problem:
    code = f"print(sum(map(int, str({a} ** {b}))))"
    return Problem(f"What is the sum of the digits of {a}^{b}?", sum(map(int, str(a**b))), [call("python", code=code)])


@HARD.family(first=range(1, 50), a=range(2, 30), m=range(1000, 1100), n=range(200, 900, 7))
def far_term(first: int, a: int, m: int, n: int) -> Problem:
    value = first
    for _ in range(n - 1):
        value = (value * value + a) % m
    code = f"x = {first}\nfor _ in range({n} - 1):\n    x = (x * x + {a}) % {m}\nprint(x)"
    text = f"x(1) = {first}, and x(n + 1) is the remainder of x(n)^2 + {a} divided by {m}. What is x({n})?"
    return Problem(text, value, [call("python", code=code)])
