"""Random requests through a cache of a tenth of what they need: every answer is that of its lone run."""

import pytest

from tests.support.crowd import endure


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_many_requests(num_requests, rng):
    print(endure(rng, num_requests))
