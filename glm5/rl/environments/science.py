"""Science in three levels (science.toml). Every answer is an exact rational number with a unit."""

from fractions import Fraction
from functools import cache

from glm5.rl.environments.families import Question, Questions, read_levels
from glm5.rl.environments.units import unit_of

Substance = tuple[str, int, int]
"""As a reaction has it, such as "2 H2": number of molecules, g/mol."""


@cache
def science() -> Questions:
    """The environment."""
    return Questions("science", read_levels("science", Question, Fraction, factor, short, mass, molar, equation))


def factor(name: str) -> Fraction:
    """What a unit is of the SI's."""
    unit = unit_of(name)
    assert unit is not None, name
    return unit.factor


def short(value: Fraction) -> str:
    return f"{float(value):g}"


def mass(of: Substance) -> int:
    """Grams for one mol of the reaction."""
    return of[1] * of[2]


def molar(of: Substance) -> str:
    return f"{of[0].split(' ')[-1]} ({of[2]} g/mol)"


def equation(reaction: tuple[Substance, Substance, Substance]) -> str:
    return f"{reaction[0][0]} + {reaction[1][0]} -> {reaction[2][0]}"
