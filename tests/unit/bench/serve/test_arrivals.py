"""Arrival times against the theory of the process that they claim to be, with fixed seeds."""

import math

import numpy as np
import pytest

from glm5.bench.serve.arrivals import arrival_times, read_arrivals
from glm5.common.errors import ConfigError

NUM, RATE = 20_000, 5.0
KS_LIMIT = 1.63  # of sqrt(n) * D: 1 % of true samples are beyond it (Kolmogorov)


def gaps(burstiness, seed=0):
    return np.diff([0.0, *arrival_times(NUM, RATE, burstiness, seed)])


def ks_exponential(values, rate):
    """sqrt(n) * largest distance between the distribution of `values` and the exponential one."""
    expected = 1 - np.exp(-rate * np.sort(values))
    ranks = np.arange(len(values) + 1) / len(values)
    return math.sqrt(len(values)) * max(np.max(ranks[1:] - expected), np.max(expected - ranks[:-1]))


def test_gaps_are_exponential():
    values = gaps(1.0)
    assert ks_exponential(values, RATE) < KS_LIMIT
    assert values.mean() == pytest.approx(1 / RATE, rel=4 / math.sqrt(NUM))  # four standard errors
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 4 / math.sqrt(NUM)


@pytest.mark.parametrize(
    ("values", "why"), [(gaps(1.5), "evener"), (gaps(0.7), "burstier"), (gaps(1.0) * 1.1, "slower")]
)
def test_the_test_of_gaps_notices(values, why):
    assert ks_exponential(values, RATE) > 2 * KS_LIMIT, why


def test_counts_are_poisson():
    # In a Poisson process the number in any second has its mean for variance, and the counts are independent.
    times = np.array(arrival_times(NUM, RATE, 1.0, 3))
    counts = np.bincount(times.astype(int))[:-1]
    ratio = counts.var() / counts.mean()
    assert ratio == pytest.approx(1, abs=4 * math.sqrt(2 / len(counts)))
    shares = [np.mean(counts == k) for k in range(15)]
    theory = [math.exp(-RATE) * RATE**k / math.factorial(k) for k in range(15)]
    assert shares == pytest.approx(theory, abs=4 * math.sqrt(0.25 / len(counts)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_variation_of_gaps(burstiness):
    values = gaps(burstiness)
    assert values.std() / values.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert values.mean() == pytest.approx(1 / RATE, rel=0.06)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_a_seed_is_a_sequence():
    times = arrival_times(50, RATE, 1.0, 7)
    assert times == arrival_times(80, RATE, 1.0, 7)[:50]
    assert times != arrival_times(50, RATE, 1.0, 8)
    assert times == sorted(times)


def test_a_trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('10\n10.5\n\n{"timestamp": 12000, "input_length": 3}\n')
    assert read_arrivals(str(file)) == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nsoon\n", "line 2: got 'soon'; allowed: a number of seconds"),
        ("1\nnan\n", "line 2: got 'nan'"),
        ('{"time": 3}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("2\n1\n", "times must ascend, got 1 s after 2 s"),
        ("\n", "holds no arrival times"),
    ],
)
def test_what_is_no_trace(text, message, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_arrivals(str(file))
