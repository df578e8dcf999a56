"""Orders as functions: every element once, shares exact, nothing depends on where one enters."""

from collections import Counter

import pytest

from glm5.common.errors import DataError
from glm5.train.data.order import BLOCK, Mixture, Permutation, key_of


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000])
def test_a_permutation_has_every_element_once(n):
    order = [Permutation(n, 7)[i] for i in range(n)]
    assert sorted(order) == list(range(n))
    if n >= 64:
        assert order != [Permutation(n, 8)[i] for i in range(n)]
        fixed = sum(i == goes for i, goes in enumerate(order))
        assert fixed < 10, "a shuffle leaves about one element in place"


def test_elements_outside_are_refused():
    with pytest.raises(IndexError):
        Permutation(3, 0)[3]


def test_neighbours_are_torn_apart():
    n = 4096
    shuffle = Permutation(n, 1)
    near = sum(abs(shuffle[i] - shuffle[i + 1]) < n // 16 for i in range(n - 1)) / n
    assert 0.08 < near < 0.16, "an even shuffle has about 12 % of neighbours this near"


@pytest.mark.parametrize("weights", [[1], [1, 1], [0.7, 0.299, 0.001], [3, 0, 1], [1e-6] * 5 + [1]])
def test_a_mixture_keeps_its_shares_and_counts_each_source_without_gaps(weights):
    mixture = Mixture(weights, seed=1)
    assert sum(mixture.counts) == BLOCK
    draws = [mixture[g] for g in range(3 * BLOCK)]
    for source, weight in enumerate(weights):
        before = [index for drawn, index in draws if drawn == source]
        assert before == list(range(3 * mixture.counts[source]))
        assert abs(mixture.counts[source] - weight / sum(weights) * BLOCK) <= len(weights)
        assert (mixture.counts[source] > 0) == (weight > 0)
    assert Mixture(weights, seed=1)[2 * BLOCK + 5] == draws[2 * BLOCK + 5]
    if len(weights) == 2:
        other = Mixture(weights, seed=2)
        assert draws != [other[g] for g in range(3 * BLOCK)]
        assert Counter(source for source, _ in draws[:64]).keys() == {0, 1}


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [float("inf")]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(DataError, match="weights of a mixture"):
        Mixture(weights, seed=0)


def test_keys_follow_from_their_parts():
    assert key_of("a", 1) == key_of("a", 1) < 1 << 64
    assert len({key_of("a", 1), key_of("a", 2), key_of("a1"), key_of("a", 1, "")}) == 4
