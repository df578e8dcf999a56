"""Random requests through a cache that is far too small for them; `make soak` does the same with 2,000."""

import pytest

from tests.support.crowd import endure


def test_a_crowd_leaves_nothing_and_every_answer_is_its_own(rng):
    pytest.importorskip("xgrammar")
    print(endure(rng, 60))
