"""Calibration of a preference model: do its probabilities come true?

    p = sigmoid(d / T), d = r_chosen - r_rejected      confidence max(p, 1 - p), right where p > 1/2, half where p = 1/2
    expected calibration error = sum_bins |bin| / n  |mean confidence - share that is right|

T, the temperature, minimises the mean of -log sigmoid(d / T) on held-out pairs (Guo et al. 2017, section 4.2). It is
convex in 1/T, so bisection of its derivative finds the minimum. It changes no order and no accuracy.
"""

import numpy as np
from numpy.typing import NDArray

BINS = 10
"""Of equal width, over the confidences 1/2 to 1."""
LIMIT = 100.0
"""Largest temperature, and with 1 / LIMIT the smallest: where all pairs are right, none would be small enough."""


def probabilities(difference_P: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    """sigmoid(d / T), without overflow."""
    return np.exp(-np.logaddexp(0.0, -difference_P / temperature))


def mean_loss(difference_P: NDArray[np.float64], temperature: float = 1.0) -> float:
    """-log sigmoid(d / T), the mean."""
    return float(np.logaddexp(0.0, -difference_P / temperature).mean())


def accuracy(difference_P: NDArray[np.float64]) -> float:
    """The share of pairs whose chosen answer is preferred; ties count half."""
    return float(((difference_P > 0) + 0.5 * (difference_P == 0)).mean())


def calibration_error(difference_P: NDArray[np.float64], temperature: float = 1.0) -> float:
    """The expected calibration error, 0 to 1/2."""
    chosen_P = probabilities(difference_P, temperature)
    confidence_P = np.maximum(chosen_P, 1 - chosen_P)
    right_P = (difference_P > 0) + 0.5 * (difference_P == 0)
    bin_P = np.minimum(((confidence_P - 0.5) * 2 * BINS).astype(np.int64), BINS - 1)
    gap_N = np.bincount(bin_P, confidence_P - right_P, BINS)
    return float(np.abs(gap_N).sum() / len(difference_P))


def fitted_temperature(difference_P: NDArray[np.float64]) -> float:
    """The temperature of the lowest loss, from 1 / LIMIT to LIMIT."""
    low, high = -np.log(LIMIT), np.log(LIMIT)  # of log(1 / T)
    for _ in range(60):
        middle = (low + high) / 2
        inverse = np.exp(middle)
        rising = -(difference_P * probabilities(-difference_P * inverse)).mean() > 0
        low, high = (low, middle) if rising else (middle, high)
    return float(np.exp(-(low + high) / 2))


def is_at_limit(temperature: float) -> bool:
    """Whether no temperature fits: a larger or smaller one than is allowed would have a lower loss."""
    return not 1.01 / LIMIT < temperature < LIMIT / 1.01
