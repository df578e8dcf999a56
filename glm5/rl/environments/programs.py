"""Descriptions of functions with right solutions, for `coding.py`.

A family is one description with parameters: its text goes on "Write a Python function f(n) that ...".
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from glm5.rl.environments.families import Level

EASY, MEDIUM, HARD = Level(), Level(), Level()

LETTERS = "abcdefghijklmnopqrstuvwxyz"
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
        lines = [f"    {line}" for line in self.body.strip("\n").split("\n")]
        return "\n".join([f"def {self.text[: self.text.index(')') + 1]}:", *lines, ""])


def number(low: int, high: int) -> Arguments:
    return lambda random: [random.randint(low, high)]


def numbers(low: int, high: int, most: int = 12) -> Arguments:
    return lambda random: [[random.randint(low, high) for _ in range(random.randint(0, most))]]


def word(letters: str = LETTERS, most: int = 12) -> Arguments:
    return lambda random: ["".join(random.choices(letters, k=random.randint(0, most)))]


@EASY.family(a=range(2, 60), b=range(1, 60))
def affine(a: int, b: int) -> Program:
    return Program(f"f(n) that returns {a} times n plus {b}.", f"return {a} * n + {b}", number(-99, 99))


@EASY.family(low=range(-60, 0), high=range(1, 60))
def clipped(low: int, high: int) -> Program:
    text = f"f(n) that returns n, but at least {low} and at most {high}."
    return Program(text, f"return max({low}, min({high}, n))", number(-90, 90))


@EASY.family(a=range(2, 50), b=range(50, 99))
def divisible(a: int, b: int) -> Program:
    text = f"f(n) that returns whether n is divisible by {a} or greater than {b}."
    return Program(text, f"return n % {a} == 0 or n > {b}", number(0, 120))


@EASY.family(times=range(2, 10), between="-+*/_.,;:!", last=LETTERS)
def repeated(times: int, between: str, last: str) -> Program:
    text = f"f(s) that returns the string s {times} times with {between!r} between, and {last!r} at the end."
    return Program(text, f"return {between!r}.join([s] * {times}) + {last!r}", word(most=6))


@EASY.family(old=LETTERS[:13], new=LETTERS[13:], length=range(3, 13))
def replaced(old: str, new: str, length: int) -> Program:
    text = f"f(s) that returns the first {length} letters of s, with {new!r} for every {old!r}."
    return Program(text, f"return s.replace({old!r}, {new!r})[:{length}]", word(LETTERS[:13] + old * 5, most=16))


@EASY.family(start=range(10), step=range(2, 10), plus=range(1, 30))
def sliced(start: int, step: int, plus: int) -> Program:
    text = f"f(numbers) that takes every number at index {start}, {start + step}, {start + 2 * step}, ... plus {plus}."
    return Program(text, f"return [n + {plus} for n in numbers[{start}::{step}]]", numbers(-50, 50, most=30))


@EASY.family(low=range(-60, 0), high=range(1, 60))
def sum_between(low: int, high: int) -> Program:
    text = f"f(numbers) that returns the sum of those numbers that are greater than {low} and less than {high}."
    return Program(text, f"return sum(n for n in numbers if {low} < n < {high})", numbers(-90, 90))


@EASY.family(a=range(2, 20), b=range(1, 40), c=range(-20, 21))
def two_pieces(a: int, b: int, c: int) -> Program:
    text = f"f(n) that returns {a} times n if n is less than {c}, else n plus {b}."
    return Program(text, f"return {a} * n if n < {c} else n + {b}", number(c - 20, c + 20))


@MEDIUM.family(a=range(2, 60), b=range(60, 99))
def sum_of_multiples(a: int, b: int) -> Program:
    text = f"f(n) that returns the sum of the integers from 1 to n that are divisible by {a} or by {b}."
    body = f"return sum(k for k in range(1, n + 1) if k % {a} == 0 or k % {b} == 0)"
    return Program(text, body, number(0, 400))


@MEDIUM.family(even=range(1, 26), odd=range(1, 26), is_reversed=(False, True))
def shifted(even: int, odd: int, is_reversed: bool) -> Program:
    text = (
        f"f(s) that shifts the letters a to z of s at even indices by {even} places in the alphabet and those at odd "
        f"indices by {odd}, from z on to a, {'and reverses the result' if is_reversed else 'in the same order'}."
    )
    body = f"""
shifted = [chr((ord(c) - 97 + ({odd} if i % 2 else {even})) % 26 + 97) for i, c in enumerate(s)]
return "".join(shifted){"[::-1]" if is_reversed else ""}
"""
    return Program(text, body, word())


@MEDIUM.family(k=range(1, 41), m=range(2, 41))
def rotated(k: int, m: int) -> Program:
    text = f"f(numbers) that moves the first {k} numbers to the end, one by one, and then leaves out every {m}th."
    body = f"""
if not numbers:
    return []
cut = {k} % len(numbers)
turned = numbers[cut:] + numbers[:cut]
return [n for i, n in enumerate(turned, 1) if i % {m}]
"""
    return Program(text, body, numbers(0, 99, most=50))


@MEDIUM.family(a=range(10), b=range(1, 10), p=range(1, 6), q=range(1, 6))
def recurrence(a: int, b: int, p: int, q: int) -> Program:
    text = f"f(n) with f(0) = {a}, f(1) = {b}, and from then on {p} times the last value plus {q} times the one before."
    body = f"""
last, value = {a}, {b}
for _ in range(n):
    last, value = value, {p} * value + {q} * last
return last
"""
    return Program(text, body, number(0, 24))


@MEDIUM.family(base=range(2, 17), a=range(2, 20), c=range(1, 20))
def digit_sum(base: int, a: int, c: int) -> Program:
    text = f"f(n) that returns {a} times the sum of the digits of n in base {base}, plus {c}."
    body = f"""
total = 0
while n:
    n, digit = divmod(n, {base})
    total += digit
return {a} * total + {c}
"""
    return Program(text, body, number(0, 99_999))


@MEDIUM.family(m=range(20, 60), r=range(20), c=range(1, 10))
def squares(m: int, r: int, c: int) -> Program:
    text = (
        f"f(numbers) that returns, in ascending order and each once, n * n + {c} for those n in numbers that leave at "
        f"least {r} when divided by {m}."
    )
    body = f"return sorted({{n * n + {c} for n in numbers if n % {m} >= {r}}})"
    return Program(text, body, numbers(0, 200))


@MEDIUM.family(a=range(2, 50), b=range(50, 90))
def nth_not_divisible(a: int, b: int) -> Program:
    text = f"f(n) that returns the n-th positive integer (the first is n = 1) that neither {a} nor {b} divides."
    body = f"""
k = 0
while n:
    k += 1
    n -= k % {a} != 0 and k % {b} != 0
return k
"""
    return Program(text, body, number(1, 300))


@MEDIUM.family(m=range(20, 90), r=range(20))
def pairs(m: int, r: int) -> Program:
    text = (
        f"f(numbers) that counts the pairs of indices i < j whose numbers' sum leaves at most {r} when divided by {m}."
    )
    body = f"""
size = len(numbers)
return sum((numbers[i] + numbers[j]) % {m} <= {r} for i in range(size) for j in range(i + 1, size))
"""
    return Program(text, body, numbers(0, 200, most=20))


@MEDIUM.family(size=range(2, 41), c=range(2, 41))
def chunks(size: int, c: int) -> Program:
    text = (
        f"f(numbers) that splits the numbers into pieces of {size} (or less, the last) and returns {c} times each sum."
    )
    body = f"return [{c} * sum(numbers[i : i + {size}]) for i in range(0, len(numbers), {size})]"
    return Program(text, body, numbers(-20, 20, most=90))


@HARD.family(a=range(1, 8), b=range(8, 20), c=range(20, 50))
def ways_to_pay(a: int, b: int, c: int) -> Program:
    text = f"f(n) that returns in how many ways coins of {a}, {b} and {c} make n, where their order does not matter."
    body = f"""
ways = [1] + [0] * n
for coin in ({a}, {b}, {c}):
    for total in range(coin, n + 1):
        ways[total] += ways[total - coin]
return ways[n]
"""
    return Program(text, body, number(0, 300))


@HARD.family(a=range(2, 10), b=range(10, 25), c=range(25, 50))
def fewest_coins(a: int, b: int, c: int) -> Program:
    text = f"f(n) that returns the fewest coins of {a}, {b} and {c} that make n, or -1 if none do."
    body = f"""
fewest = [0] + [-1] * n
for total in range(1, n + 1):
    before = [fewest[total - coin] for coin in ({a}, {b}, {c}) if coin <= total and fewest[total - coin] >= 0]
    fewest[total] = min(before) + 1 if before else -1
return fewest[n]
"""
    return Program(text, body, number(0, 300), num_inputs=8)


@HARD.family(low=range(1, 41), high=range(41, 90))
def rising(low: int, high: int) -> Program:
    text = (
        "f(numbers) that returns the length of the longest subsequence (not always of neighbours) in which each number "
        f"is by {low} to {high} larger than the one before."
    )
    body = f"""
best = []
for i, n in enumerate(numbers):
    best.append(1 + max([best[j] for j in range(i) if {low} <= n - numbers[j] <= {high}], default=0))
return max(best, default=0)
"""
    return Program(text, body, numbers(0, 300, most=40))


@HARD.family(right=range(1, 5), down=range(1, 5), m=range(97, 400))
def grid_paths(right: int, down: int, m: int) -> Program:
    text = (
        f"f(rows, columns) that counts the ways from the first cell of a grid to the last with moves of 1 to {right} "
        f"cells right or 1 to {down} down, and returns the remainder of their number divided by {m}."
    )
    body = f"""
ways = [[0] * columns for _ in range(rows)]
ways[0][0] = 1
for y in range(rows):
    for x in range(columns):
        ways[y][x] += sum(ways[y][x - k] for k in range(1, {right} + 1) if k <= x)
        ways[y][x] += sum(ways[y - k][x] for k in range(1, {down} + 1) if k <= y)
return ways[-1][-1] % {m}
"""
    return Program(text, body, lambda random: [random.randint(1, 12), random.randint(1, 12)])


@HARD.family(insert=range(1, 13), delete=range(1, 13), replace=range(1, 13))
def edit_cost(insert: int, delete: int, replace: int) -> Program:
    text = (
        f"f(a, b) that returns the least cost of turning string a into b, where inserting a letter costs {insert}, "
        f"deleting one {delete} and replacing one {replace}."
    )
    body = f"""
row = [{insert} * j for j in range(len(b) + 1)]
for i, c in enumerate(a):
    last, row = row, [row[0] + {delete}]
    for j, d in enumerate(b):
        kept = last[j] + (0 if c == d else {replace})
        row.append(min(kept, last[j + 1] + {delete}, row[j] + {insert}))
return row[-1]
"""
    return Program(text, body, lambda random: word("abc", 10)(random) + word("abc", 10)(random))


@HARD.family(p=range(1, 10), q=range(1, 10), m=range(100, 400))
def far_recurrence(p: int, q: int, m: int) -> Program:
    text = (
        f"f(n) that returns the remainder divided by {m} of x(n), where x(0) = 0, x(1) = 1 and x(n) = {p} x(n - 1) + "
        f"{q} x(n - 2), for n up to 10 ** 15."
    )
    body = f"""
def times(a, b):
    return [[sum(a[i][k] * b[k][j] for k in (0, 1)) % {m} for j in (0, 1)] for i in (0, 1)]

power, step = [[1, 0], [0, 1]], [[{p}, {q}], [1, 0]]
while n:
    power = times(power, step) if n % 2 else power
    step, n = times(step, step), n // 2
return power[1][0] % {m}
"""
    return Program(text, body, number(0, 10**15), num_inputs=6)


@HARD.family(capacity=range(10, 61), most=range(2, 31))
def knapsack(capacity: int, most: int) -> Program:
    text = (
        f"f(items) that takes pairs [weight, value] and returns the greatest sum of values of at most {most} items "
        f"whose weights sum to at most {capacity}."
    )
    body = f"""
best = [[0] * ({capacity} + 1) for _ in range({most} + 1)]
for weight, value in items:
    for count in range({most}, 0, -1):
        for room in range({capacity}, weight - 1, -1):
            best[count][room] = max(best[count][room], best[count - 1][room - weight] + value)
return best[-1][-1]
"""

    def arguments(random: Random) -> list[Any]:
        return [[[random.randint(1, 25), random.randint(1, 50)] for _ in range(random.randint(0, 8))]]

    return Program(text, body, arguments, num_inputs=5)


@HARD.family(gap=range(1, 41), least=range(2, 41))
def merged(gap: int, least: int) -> Program:
    text = (
        f"f(intervals) that takes pairs [start, end], merges those that overlap or are at most {gap} apart, and "
        f"returns the merged ones of length {least} or more, in order."
    )
    body = f"""
merged = []
for start, end in sorted(intervals):
    if merged and start - merged[-1][1] <= {gap}:
        merged[-1][1] = max(merged[-1][1], end)
    else:
        merged.append([start, end])
return [pair for pair in merged if pair[1] - pair[0] >= {least}]
"""

    def arguments(random: Random) -> list[Any]:
        starts = [random.randint(0, 400) for _ in range(random.randint(0, 8))]
        return [[[start, start + random.randint(1, 60)] for start in starts]]

    return Program(text, body, arguments)


@HARD.family(m=range(100, 2000))
def postfix(m: int) -> Program:
    text = (
        "f(tokens) that evaluates a list of tokens in postfix notation (integers as strings, and '+', '-', '*') and "
        f"returns the remainder of the result divided by {m}."
    )
    body = f"""
stack = []
for token in tokens:
    if token in "+-*":
        b, a = stack.pop(), stack.pop()
        stack.append(a + b if token == "+" else a - b if token == "-" else a * b)
    else:
        stack.append(int(token))
return stack[-1] % {m}
"""

    def arguments(random: Random) -> list[Any]:
        tokens, depth = [str(random.randint(0, 99))], 1
        while depth > 1 or len(tokens) < 9:
            is_operator = depth > 1 and (random.random() < 0.5 or len(tokens) > 12)
            tokens.append(random.choice("+-*") if is_operator else str(random.randint(0, 99)))
            depth += -1 if is_operator else 1
        return [tokens]

    return Program(text, body, arguments)
