"""Mathematics in three levels: arithmetic and first equations; fractions, algebra, counting, geometry; number theory,
systems, recurrences and combinatorics that take several steps. Every answer is one rational number."""

from fractions import Fraction
from math import comb, gcd, isqrt, lcm

from glm5.rl.environments.families import Level, Question, Questions

EASY, MEDIUM, HARD = Level(), Level(), Level()
PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47)
LARGER_PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 97)


def mathematics() -> Questions:
    """The environment."""
    return Questions("math", (EASY, MEDIUM, HARD))


def _term(factor: int, name: str) -> str:
    return f"{'-' if factor < 0 else '+'} {abs(factor)}{name}"


@EASY.family(a=range(10, 1000), b=range(10, 1000), op="+-")
def two_numbers(a: int, b: int, op: str) -> Question:
    return Question(f"What is {a} {op} {b}?", a + b if op == "+" else a - b)


@EASY.family(a=range(2, 100), b=range(11, 200))
def product(a: int, b: int) -> Question:
    return Question(f"What is {a} * {b}?", a * b)


@EASY.family(a=range(2, 100), b=range(2, 20), c=range(2, 20), op="+-")
def precedence(a: int, b: int, c: int, op: str) -> Question:
    return Question(f"What is {a} {op} {b} * {c}?", a + b * c if op == "+" else a - b * c)


@EASY.family(a=range(2, 20), b=range(1, 50), x=range(-20, 21))
def linear_equation(a: int, b: int, x: int) -> Question:
    return Question(f"Solve {a}x + {b} = {a * x + b} for x.", x)


@EASY.family(n=range(100, 10_000), d=range(3, 30))
def remainder(n: int, d: int) -> Question:
    return Question(f"What is the remainder of {n} divided by {d}?", n % d)


@EASY.family(p=range(5, 100, 5), n=range(20, 20_000, 20))
def percent(p: int, n: int) -> Question:
    return Question(f"What is {p}% of {n}?", Fraction(p * n, 100))


@EASY.family(a=range(24, 900, 6), b=range(30, 900, 10))
def greatest_common_divisor(a: int, b: int) -> Question:
    return Question(f"What is the greatest common divisor of {a} and {b}?", gcd(a, b))


@EASY.family(a=range(1, 60), b=range(1, 60), c=range(1, 60))
def mean(a: int, b: int, c: int) -> Question:
    return Question(f"What is the mean of {a}, {b} and {c}?", Fraction(a + b + c, 3))


@EASY.family(a=range(2, 200), b=range(2, 200), what=("area", "perimeter"))
def rectangle(a: int, b: int, what: str) -> Question:
    return Question(f"A rectangle has sides {a} and {b}. What is its {what}?", a * b if what == "area" else 2 * (a + b))


@MEDIUM.family(a=range(1, 12), b=range(2, 13), c=range(1, 12), d=range(2, 13), op="+-*")
def fractions(a: int, b: int, c: int, d: int, op: str) -> Question:
    x, y = Fraction(a, b), Fraction(c, d)
    return Question(f"What is {a}/{b} {op} {c}/{d}?", {"+": x + y, "-": x - y, "*": x * y}[op])


@MEDIUM.family(a=range(1, 10), b=range(1, 10), c=range(1, 10), d=range(1, 10), x=range(-9, 10), y=range(-9, 10))
def two_equations(a: int, b: int, c: int, d: int, x: int, y: int) -> Question:
    text = f"Solve {a}x + {b}y = {a * x + b * y} and {c}x - {d}y = {c * x - d * y}. What is x?"
    return Question(text, x)


@MEDIUM.family(root=range(-20, 21), gap=range(1, 41), which=("smaller", "larger"))
def quadratic_equation(root: int, gap: int, which: str) -> Question:
    other = root + gap
    text = f"What is the {which} solution of x^2 {_term(-(root + other), 'x')} {_term(root * other, '')} = 0?"
    return Question(text, root if which == "smaller" else other)


@MEDIUM.family(first=range(-30, 31), step=range(2, 20), n=range(5, 41))
def arithmetic_series(first: int, step: int, n: int) -> Question:
    text = f"What is the sum of the first {n} terms of {first}, {first + step}, {first + 2 * step}, ...?"
    return Question(text, n * (2 * first + (n - 1) * step) // 2)


@MEDIUM.family(a=range(12, 400, 6), b=range(10, 400, 4))
def least_common_multiple(a: int, b: int) -> Question:
    return Question(f"What is the least common multiple of {a} and {b}?", lcm(a, b))


@MEDIUM.family(n=range(6, 26), k=range(2, 6), m=range(2, 41))
def committees(n: int, k: int, m: int) -> Question:
    text = f"In how many ways can {k} of {n} women and one of {m} men be chosen?"
    return Question(text, comb(n, k) * m)


@MEDIUM.family(a=range(1, 21), b=range(1, 21), c=range(1, 21), d=range(1, 21))
def triangle(a: int, b: int, c: int, d: int) -> Question:
    text = f"What is the area of the triangle with the corners (0, 0), ({a}, {b}) and ({-c}, {d})?"
    return Question(text, Fraction(abs(a * d + b * c), 2))


@MEDIUM.family(n=range(4, 24), m=range(4, 24), s=range(3, 21))
def dice(n: int, m: int, s: int) -> Question:
    ways = sum(1 <= s - first <= m for first in range(1, n + 1))
    text = f"Two fair dice have {n} and {m} sides. What is the probability that they show {s} together?"
    return Question(text, Fraction(ways, n * m))


def _divisors_up_to_root(n: int) -> list[int]:
    return [d for d in range(1, isqrt(n) + 1) if n % d == 0]


@MEDIUM.family(n=range(100, 20_000))
def divisors(n: int) -> Question:
    return Question(f"How many positive divisors has {n}?", sum((d * d < n) + 1 for d in _divisors_up_to_root(n)))


@MEDIUM.family(a=range(10, 200, 5), b=range(1, 9), c=range(12, 300, 7), d=range(1, 9))
def mean_speed(a: int, b: int, c: int, d: int) -> Question:
    text = f"A train goes {a} km in {b} h, then {c} km in {d} h. What is its mean speed in km/h?"
    return Question(text, Fraction(a + c, b + d), "km/h")


@HARD.family(a=range(2, 60), b=range(10, 200), m=range(7, 102))
def modular_power(a: int, b: int, m: int) -> Question:
    return Question(f"What is the remainder of {a}^{b} divided by {m}?", pow(a, b, m))


@HARD.family(p=PRIMES, a=range(2, 17), b=range(1, 17))
def modular_equation(p: int, a: int, b: int) -> Question:
    text = f"What is the smallest positive integer x for which {a}x - {b} is divisible by {p}?"
    return Question(text, pow(a, -1, p) * b % p)


@HARD.family(p=PRIMES, a=range(17), q=LARGER_PRIMES, b=range(53))
def chinese_remainder(p: int, a: int, q: int, b: int) -> Question:
    text = f"What is the smallest integer from 0 on that leaves {a} when divided by {p}, and {b} when divided by {q}?"
    return Question(text, (a + p * ((b - a) * pow(p, -1, q) % q)) % (p * q))


@HARD.family(first=range(1, 20), a=range(2, 12), b=range(1, 20), m=range(50, 120), n=range(6, 20))
def recurrence(first: int, a: int, b: int, m: int, n: int) -> Question:
    value = first
    for _ in range(n - 1):
        value = (a * value + b) % m
    text = f"x(1) = {first}, and x(n + 1) is the remainder of {a} x(n) + {b} divided by {m}. What is x({n})?"
    return Question(text, value)


@HARD.family(**{name: range(-6, 7) for name in "abcdefghi"})
def determinant(a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int, i: int) -> Question:
    text = f"What is the determinant of the matrix with the rows ({a}, {b}, {c}), ({d}, {e}, {f}), ({g}, {h}, {i})?"
    return Question(text, a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g))


@HARD.family(a=range(1, 8), b=range(-9, 10), c=range(-9, 10), d=range(-9, 10), r=(-5, -4, -3, -2, 2, 3, 4, 5))
def polynomial_remainder(a: int, b: int, c: int, d: int, r: int) -> Question:
    polynomial = f"{a}x^3 {_term(b, 'x^2')} {_term(c, 'x')} {_term(d, '')}"
    return Question(
        f"What is the remainder of {polynomial} divided by x {_term(-r, '')}?", ((a * r + b) * r + c) * r + d
    )


@HARD.family(n=range(12, 60), parts=range(2, 6), least=range(3), most=range(20, 40))
def stars_and_bars(n: int, parts: int, least: int, most: int) -> Question:
    def ways(rest: int) -> int:
        return comb(rest + parts - 1, parts - 1) if rest >= 0 else 0

    rest, excess = n - parts * least, most - least + 1
    total = sum((-1) ** k * comb(parts, k) * ways(rest - k * excess) for k in range(parts + 1))
    text = f"In how many ways can {n} equal balls go into {parts} different boxes, {least} to {most} in each?"
    return Question(text, total)


@HARD.family(a=range(2, 10), b=range(2, 10), c=range(2, 10), d=range(2, 10))
def lattice_paths(a: int, b: int, c: int, d: int) -> Question:
    avoiding = comb(a + b + c + d, a + c) - comb(a + b, a) * comb(c + d, c)
    text = (
        f"How many shortest paths on a square grid lead from (0, 0) to ({a + c}, {b + d}) and do not pass through "
        f"({a}, {b})?"
    )
    return Question(text, avoiding)


@HARD.family(n=range(500, 5000), a=range(3, 12), b=range(13, 25))
def inclusion_exclusion(n: int, a: int, b: int) -> Question:
    text = f"How many integers from 1 to {n} are divisible by {a} or by {b}?"
    return Question(text, n // a + n // b - n // lcm(a, b))


@HARD.family(first=range(1, 30), p=range(1, 8), q=range(2, 9), n=range(4, 8))
def geometric_series(first: int, p: int, q: int, n: int) -> Question:
    ratio = Fraction(p, q)
    text = f"What is the sum of the first {n} terms of a geometric series that begins with {first}, with ratio {p}/{q}?"
    return Question(text, sum(first * ratio**k for k in range(n)))


@HARD.family(red=range(2, 21), blue=range(2, 21), green=range(2, 21))
def urn(red: int, blue: int, green: int) -> Question:
    total = red + blue + green
    same = sum(comb(number, 2) for number in (red, blue, green))
    text = (
        f"An urn has {red} red, {blue} blue and {green} green balls. Two are drawn without putting one back. "
        "What is the probability that they have the same colour?"
    )
    return Question(text, Fraction(same, comb(total, 2)))
