"""Changes of skills computed by hand; the paired interval against the normal one, and against other tasks."""

import math

import numpy as np
import pytest

from glm5.post_train.compare import RESAMPLES, changes, paired, score


def test_a_skill_is_gained_forgotten_and_given_back():
    found = changes({"base": 0.1, "sft": 0.9, "rl": 0.4, "more": 0.3, "distill": 0.8, "last": 1.0})
    expected = {
        "base": (0.1, 0.0, 0.0),
        "sft": (0.8, 0.0, 0.0),
        "rl": (0.0, 0.5, 0.0),
        "more": (0.0, 0.1, 0.0),
        "distill": (0.0, 0.0, 0.5),
        "last": (0.1, 0.0, 0.1),
    }
    for name, values in expected.items():
        assert tuple(found[name].values()) == pytest.approx(values), name


def test_the_interval_is_that_of_paired_differences():
    """2,000 tasks, of which the second model loses 2 % and wins 1 %: standard error of the mean difference by hand.

    A quantile of 10,000 resamples has a standard error of about 0.027 standard deviations, and a bootstrap of 2,000
    discrete values is off by one step, 1/2000 = 0.13 of them: 0.25 is more than both.
    """
    first = [1.0] * 1000 + [0.0] * 1000
    second = [0.0] * 40 + [1.0] * 960 + [1.0] * 20 + [0.0] * 980
    mean = -20 / 2000
    error = math.sqrt((60 / 2000 - mean**2) / 2000)
    found = paired(first, second)
    assert found.mean == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.25 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.25 * error)
    assert found.is_within(0.03)
    assert not found.is_within(0.015)
    # The control: unpaired, the same scores have an interval four times as wide, which is not inside 3 points.
    shuffled = list(np.random.default_rng(0).permutation(second))
    assert paired(first, shuffled).high - paired(first, shuffled).low > 3.5 * (found.high - found.low)
    assert not paired(first, shuffled).is_within(0.03)


def test_a_planted_loss_of_five_points_is_found():
    first = [1.0] * 2000
    assert not paired(first, [0.0] * 100 + [1.0] * 1900).is_within(0.03)
    assert paired(first, first).is_within(1e-9)


def test_episodes_that_failed_are_left_out():
    found = paired([1.0, None, 0.5, 0.0], [1.0, 1.0, None, 1.0])
    assert (found.mean, found.num_tasks) == (0.5, 2)
    assert score([1.0, None, 0.0]) == 0.5
    assert score([None]) == 0.0
    with pytest.raises(ValueError, match="no task"):
        paired([None], [1.0])
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 0.0])


def test_the_same_seed_gives_the_same_interval():
    first, second = [1.0] * 50, [0.0] * 5 + [1.0] * 45
    assert paired(first, second, 3) == paired(first, second, 3)
    assert RESAMPLES >= 1000
