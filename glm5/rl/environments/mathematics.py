"""Mathematics in three levels (mathematics.toml). Every answer is one rational number."""

from fractions import Fraction
from functools import cache
from math import comb, gcd, isqrt, lcm

from glm5.rl.environments.families import Question, Questions, read_levels


@cache
def mathematics() -> Questions:
    """The environment."""
    of_numbers = (Fraction, abs, comb, gcd, lcm, pow, num_throws, num_divisors, num_fillings, recurring, geometric_sum)
    return Questions("math", read_levels("mathematics", Question, term, *of_numbers))


def term(factor: int, name: str) -> str:
    """A term of a polynomial that is not the first."""
    return f"{'-' if factor < 0 else '+'} {abs(factor)}{name}"


def num_throws(n: int, m: int, total: int) -> int:
    """Throws of two dice with n and m sides that show this total."""
    return sum(1 <= total - first <= m for first in range(1, n + 1))


def num_divisors(n: int) -> int:
    return sum((d * d < n) + 1 for d in range(1, isqrt(n) + 1) if n % d == 0)


def num_fillings(n: int, parts: int, least: int, most: int) -> int:
    """Ways to put n equal balls into different boxes, from `least` to `most` in each: by inclusion and exclusion."""

    def ways(rest: int) -> int:
        return comb(rest + parts - 1, parts - 1) if rest >= 0 else 0

    rest, excess = n - parts * least, most - least + 1
    return sum((-1) ** k * comb(parts, k) * ways(rest - k * excess) for k in range(parts + 1))


def recurring(value: int, a: int, b: int, m: int, n: int) -> int:
    """x(n), where x(1) is the value and x(n + 1) the remainder of a x(n) + b divided by m."""
    for _ in range(n - 1):
        value = (a * value + b) % m
    return value


def geometric_sum(first: int, ratio: Fraction, n: int) -> Fraction:
    return Fraction(sum(first * ratio**k for k in range(n)))
