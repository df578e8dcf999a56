"""Reads the number in a reply and compares it with the right one, exactly.

    17/3   \\boxed{\\frac{17}{3}}   x = 17/3   The speed is 5.667 m/s.   Answer: 20.4 km/h   $1,234$   1.5e3   3 x 10^8

The answer is what the last \\boxed holds, else the last line, from its last "=", ":", "is" or "are" on: one number and
perhaps a unit, nothing else. Format is free, the value is not: it must be equal as a fraction. Where the right value
takes more than 6 digits, its rounding to 4 significant digits or more is right too. What is read is bounded in length
and digits, and nothing is evaluated.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from glm5.rl.environments.units import Unit, unit_of

MAX_CHARS = 4000
"""The end of a reply that is read."""
MAX_DIGITS, MAX_EXPONENT = 40, 40
EXACT_DIGITS, ROUNDED_DIGITS, FLOAT_DIGITS = 6, 4, 15

_START = re.compile(r"=|≈|:|\b(?:is|are|equals?)\b", re.IGNORECASE)
_SEVERAL = re.compile(r"\b(?:or|and|not)\b", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?:"
    r"\\[dt]?frac\{(?P<over>-?\d+)\}\{(?P<under>\d+)\}"
    r"|(?P<a>\d+)\s*/\s*(?P<b>\d+)"
    r"|(?P<whole>\d{1,3}(?:,\d{3})+|\d*)(?P<part>\.\d*)?"
    r"(?:[eE](?P<e>[+-]?\d+)|\s*[x\u00d7*]\s*10\s*\^\s*(?P<ten>[+-]?\d+))?"
    r")(?P<rest>.*)",
    re.ASCII,
)  # fmt: skip
_LATEX = (
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\{(-?\d+)\}"), r"^\1"),
    (re.compile(r"\\times|\\cdot"), "*"),
    (re.compile(r"\\[,;! ]|\\[()\[\]]|\$|\*\*|`"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\%"), "%"),
    (re.compile("[\u2212\u2013]"), "-"),
)


@dataclass(frozen=True)
class Number:
    """A number as it was written: its value, the place of its last digit (0: a fraction), how many digits are
    significant, and what follows it."""

    value: Fraction
    place: Fraction
    digits: int
    rest: str


def answer_of(content: str) -> str:
    """The part of a reply that is its answer; "" if there is none."""
    content = content[-MAX_CHARS:]
    boxed = content.rfind("\\boxed{")
    if boxed >= 0:
        return _braced(content[boxed + len("\\boxed{") :])
    lines = [line for line in content.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def read_number(answer: str) -> Number | None:
    """The number that an answer consists of."""
    for pattern, plain in _LATEX:
        answer = pattern.sub(plain, answer)
    found = None if _SEVERAL.search(answer) else _NUMBER.fullmatch(_START.split(answer)[-1].strip().rstrip(". "))
    if found is None or len(found["whole"] or "") + len(found["part"] or "") > MAX_DIGITS:
        return None
    sign = -1 if found["sign"] == "-" else 1
    over, under = found["over"] or found["a"], found["under"] or found["b"]
    if over is not None:
        if max(len(over), len(under)) > MAX_DIGITS or int(under) == 0:
            return None
        return Number(sign * Fraction(int(over), int(under)), Fraction(0), 0, found["rest"].strip())
    whole, part = (found["whole"] or "").replace(",", ""), (found["part"] or ".")[1:]
    exponent = found["e"] or found["ten"] or "0"
    if not whole + part or len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    place = Fraction(10) ** (int(exponent) - len(part))
    return Number(sign * int(whole + part) * place, place, len((whole + part).lstrip("0")), found["rest"].strip())


def is_right(content: str, wanted: Fraction, unit: str = "") -> bool:
    """Whether a reply's answer is `wanted`, in `unit` or converted from another unit of its kind.

    Without a unit in the answer, it is taken in the one that was asked for. If none was asked for, words may follow
    the number ("12 apples"), and % is a hundredth.
    """
    number = read_number(answer_of(content))
    if number is None:
        return False
    factor = _factor(number.rest, unit)
    return factor is not None and _equal(number, factor, wanted)


def spelled(value: Fraction) -> str:
    """A value as an answer: a short decimal if it is one, else a fraction."""
    digits = _decimal_places(value)
    if digits is None or digits > EXACT_DIGITS:
        return f"{value.numerator}/{value.denominator}"
    scaled = abs(value.numerator) * 10**digits // value.denominator
    text = f"{scaled:0{digits + 1}}"
    return ("-" if value < 0 else "") + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


def is_short(value: Fraction) -> bool:
    """Whether a value must be given exactly: it is an integer, or has few digits."""
    places = _decimal_places(value)
    return places == 0 or (places is not None and abs(value) * 10**places < 10**EXACT_DIGITS)


def _braced(text: str) -> str:
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:end]
    return ""


def _decimal_places(value: Fraction) -> int | None:
    """How many decimals it takes; None if no number of them is enough."""
    twos, fives, rest = 0, 0, value.denominator
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def _factor(rest: str, unit: str) -> Fraction | None:
    """What turns the number into the unit asked for; None if its unit does not fit."""
    if not rest:
        return Fraction(1)
    given, asked = unit_of(rest), unit_of(unit) if unit else Unit(Fraction(1))
    assert asked is not None, unit
    if not unit and rest != "%":
        return Fraction(1) if re.fullmatch(r"[A-Za-z]+", rest) and rest.lower() not in _SCALES else None
    if given is None or given.dimension != asked.dimension:
        return None
    return given.factor / asked.factor


_SCALES = ("dozen", "hundred", "thousand", "million", "billion", "trillion", "percent", "k", "e", "i", "pi")
"""Words after a number that change it."""


def _equal(number: Number, factor: Fraction, wanted: Fraction) -> bool:
    error = abs(number.value * factor - wanted)
    if error == 0:
        return True
    if number.digits >= FLOAT_DIGITS and number.place < 1:  # a float, such as 0.30000000000000004
        return error <= abs(wanted) / 10 ** (FLOAT_DIGITS - 1)
    return not is_short(wanted) and number.digits >= ROUNDED_DIGITS and error <= number.place * factor / 2
