"""2,000 random requests through a cache of a tenth of what they need: every answer is that of its lone run."""

import pytest

from tests.support.crowd import endure


@pytest.mark.slow
def test_two_thousand_requests(rng):
    print(endure(rng, 2000))
