"""Answers of replies: free in format, strict in value, bounded."""

from fractions import Fraction

import pytest

from glm5.rl.environments.answers import MAX_CHARS, is_right, spelled
from glm5.rl.environments.units import unit_of

HALF, THIRDS, SPEED = Fraction(1, 2), Fraction(17, 3), Fraction(51, 9)

RIGHT = [
    ("0.5", HALF, ""),
    (".5", HALF, ""),
    ("1/2", HALF, ""),
    ("2/4", HALF, ""),
    ("50%", HALF, ""),
    (r"\boxed{\frac{1}{2}}", HALF, ""),
    (r"So $x = \boxed{\dfrac{1}{2}}$. Done.", HALF, ""),
    (r"First \boxed{3}, no: \boxed{0.50}", HALF, ""),
    ("Because of that\n\nAnswer: 1 / 2.", HALF, ""),
    ("**0.5**", HALF, ""),
    (r"\(0.5\)", HALF, ""),
    ("x = 1/2 = 0.5", HALF, ""),
    ("The answer is 5e-1", HALF, ""),
    (r"5 \times 10^{-1}", HALF, ""),
    ("-3", Fraction(-3), ""),
    ("\u2212 3", Fraction(-3), ""),
    (r"-\frac{6}{2}", Fraction(-3), ""),
    ("It is 12 apples.", Fraction(12), ""),
    ("$1,234,567$", Fraction(1_234_567), ""),
    (r"1{,}234{,}567", Fraction(1_234_567), ""),
    ("5.667", THIRDS, ""),
    ("5.66667", THIRDS, ""),
    ("5.6666666666666670", THIRDS, ""),  # a float
    ("0.30000000000000004", Fraction(3, 10), ""),
    ("17/3 m/s", SPEED, "m/s"),
    ("20.4 km/h", SPEED, "m/s"),
    ("5.667 meters per second", SPEED, "m/s"),
    (r"5.667\ \text{m/s}", SPEED, "m/s"),
    ("5.667 m*s^-1", SPEED, "m/s"),
    ("1.5 kΩ", Fraction(1500), "ohm"),
    ("1500 ohms", Fraction(1500), "ohm"),
    ("1500", Fraction(1500), "ohm"),
    ("2 kWh", Fraction(72, 10), "MJ"),
    ("3 dm³", Fraction(3), "L"),
    ("30 °C", Fraction(30), "°C"),
]
WRONG = [
    ("", HALF, ""),
    ("1/0", HALF, ""),
    ("0.51", HALF, ""),
    ("-0.5", HALF, ""),
    ("5", HALF, ""),
    ("50", HALF, ""),
    ("0.5 0.6", HALF, ""),
    ("0.4 or 0.5", HALF, ""),
    ("not 0.5", HALF, ""),
    ("1/2/1", HALF, ""),
    ("__import__('os')", HALF, ""),
    ("1 - 1/2", HALF, ""),
    (r"\boxed{0.5", HALF, ""),
    (r"0.5 \boxed{}", HALF, ""),
    ("0.5\nIt is hard to say", HALF, ""),
    ("12 million", Fraction(12), ""),
    ("12 dozen", Fraction(12), ""),
    ("12 i", Fraction(12), ""),
    ("12,34", Fraction(1234), ""),
    ("5.67", THIRDS, ""),  # three digits
    ("5.666", THIRDS, ""),  # cut off, not rounded
    ("5.668", THIRDS, ""),
    ("1.235e6", Fraction(1_234_567), ""),  # integers are exact
    ("0.3000000001", Fraction(3, 10), ""),
    ("17/3 km/h", SPEED, "m/s"),
    ("17/3 m", SPEED, "m/s"),
    ("17/3 m/s^2", SPEED, "m/s"),
    ("17/3 wonders", SPEED, "m/s"),
    ("1500 mohm", Fraction(1500), "ohm"),
    ("303.15 K", Fraction(30), "°C"),
    ("1" * 50, HALF, ""),
    ("1e99999999999", HALF, ""),
    ("1e41", Fraction(10**41), ""),
    ("٣", Fraction(3), ""),
]


@pytest.mark.parametrize(("said", "wanted", "unit"), RIGHT)
def test_right_answers(said, wanted, unit):
    assert is_right(said, wanted, unit)


@pytest.mark.parametrize(("said", "wanted", "unit"), WRONG)
def test_wrong_answers(said, wanted, unit):
    assert not is_right(said, wanted, unit)


def test_only_the_end_of_a_long_reply_is_read():
    assert is_right("\\boxed{7}" + "x\n" * MAX_CHARS + "0.5", HALF)
    assert is_right("x\n" * 10**6 + "0.5", HALF)
    for hostile in ("1," * 10**6, "1/" * 10**6, "{" * 10**6, "-" * 10**6, "9" * 10**6, "\\frac{" * 10**5, " " * 10**6):
        assert not is_right(hostile, HALF)
        assert not is_right("\\boxed{" + hostile, HALF)


def test_spelled_values_are_right():
    for value in (HALF, THIRDS, Fraction(-5, 4), Fraction(0), Fraction(1, 3125), Fraction(-7), Fraction(1, 10**9)):
        assert is_right(spelled(value), value)
    assert [spelled(value) for value in (HALF, THIRDS, Fraction(-5, 4), Fraction(7))] == ["0.5", "17/3", "-1.25", "7"]


def test_units():
    speed = unit_of("km/h")
    assert speed is not None
    assert (speed.factor, speed.dimension) == (Fraction(5, 18), {"m": 1, "s": -1})
    assert unit_of("J") == unit_of("N m") == unit_of("kg*m^2/s^2") == unit_of("W s")
    assert unit_of("V/A") == unit_of("Ω") == unit_of("ohm")
    for wrong in ("", "furlong", "m//s", "m^9", "m" * 100, "5", "m s s s" * 9):
        assert unit_of(wrong) is None
