"""The measure that every numeric test relies on."""

import math

import pytest
import torch

from glm5.testing.numerics import rel_rms


def test_by_hand():
    want = torch.tensor([3.0, 4.0])
    assert rel_rms(want, want) == 0.0
    assert rel_rms(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert rel_rms(1e6 * torch.tensor([3.0, 4.5]), 1e6 * want) == pytest.approx(0.1)  # scale does not matter


def test_edges():
    zeros = torch.zeros(2)
    assert rel_rms(zeros, zeros) == 0.0
    assert rel_rms(torch.ones(2), zeros) == math.inf
    assert rel_rms(torch.empty(0), torch.empty(0)) == 0.0
    assert not rel_rms(torch.tensor([float("nan")]), torch.ones(1)) < 1e9  # a NaN passes no budget


def test_measures_below_float32():
    exact = torch.tensor([1.0], dtype=torch.float64)
    assert rel_rms(exact + 2.0**-40, exact) == pytest.approx(2.0**-40)


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"got \[2, 1\], want \[1, 2\]"):
        rel_rms(torch.ones(2, 1), torch.ones(1, 2))
