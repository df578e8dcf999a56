"""Rounding to small float formats in exact arithmetic, written without the library under test."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A binary float format: bits of significand (the hidden one included), least normal exponent, largest value."""

    precision: int
    min_exponent: int
    max_value: Fraction


BF16 = Format(8, -126, Fraction(255) * 2 ** (127 - 7))
FP16 = Format(11, -14, Fraction(65504))
FP32 = Format(24, -126, Fraction(2**24 - 1) * 2 ** (127 - 23))
E4M3 = Format(4, -6, Fraction(448))


def round_exactly(value: Fraction, fmt: Format) -> Fraction:
    """The nearest value of the format, ties to even, one rounding. Overflow is an error: tests stay in range."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, fmt.min_exponent) - fmt.precision + 1)
    rounded = round(magnitude / ulp) * ulp  # Python rounds a Fraction half to even
    assert rounded <= fmt.max_value, f"{float(value)} overflows"
    return rounded if value > 0 else -rounded


def round_array(values: np.ndarray, fmt: Format) -> np.ndarray:
    """`round_exactly` of every element of a float array, as float64 (which holds every value of the formats)."""
    exact = [float(round_exactly(Fraction(float(v)), fmt)) for v in values.ravel()]
    return np.array(exact, dtype=np.float64).reshape(values.shape)
