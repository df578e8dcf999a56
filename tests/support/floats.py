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


def f32(value: float) -> np.float32:
    """A float64 quotient of two float32 rounds to the same float32 as the exact one (53 >= 2 * 24 + 2 bits)."""
    return np.float32(value)


def quantized_value(value: float, scale: np.float32) -> float:
    """What a float32 becomes in e4m3 under a scale: the quotient in float32, cut to 448, to nearest even."""
    quotient = float(np.clip(f32(float(value) / float(scale)), f32(-448), f32(448)))
    return float(round_exactly(Fraction(quotient), E4M3))


def quantize_group(group: np.ndarray, least: float) -> tuple[np.ndarray, np.float32]:
    """Values after e4m3, and the scale max(amax, least) / 448 (1 for 0): the definition, number by number."""
    amax = max((abs(float(v)) for v in group.ravel()), default=0.0)
    scale = f32(max(amax, float(f32(least))) / 448.0)
    scale = scale or f32(1.0)
    return np.array([quantized_value(v, scale) for v in group.ravel()]).reshape(group.shape), scale
