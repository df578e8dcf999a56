"""Random access orders: permutations and mixtures as functions of an index, without state to save.

    Permutation(n, key)[i]       where i goes among 0..n-1: four Feistel rounds on the bits of i, walked until inside
    Mixture(weights, seed)[g]    which source draw g takes, and how many draws of that source came before

A run that resumes at step n asks for draw n * batch size and gets the same rows as a run that was not interrupted.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from glm5.common.errors import DataError

BLOCK = 1024
"""Draws after which every source has had its exact share."""
_ROUNDS = 4


def key_of(*parts: object) -> int:
    """A 64-bit hash of the parts, for use as a seed."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A permutation of 0..n-1, computed element by element."""

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation needs at least one element, got {n=}")
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [key_of(key, turn) for turn in range(_ROUNDS)]

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"element {i} of {self.n}")
        while True:  # the Feistel network permutes a power of four, at most four times n
            left, right = i >> self._half, i & self._mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & self._mask)
            i = left << self._half | right
            if i < self.n:
                return i


def _mixed(x: int) -> int:
    """The finalizer of SplitMix64."""
    x &= (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
    return x ^ (x >> 31)


class Mixture:
    """Draws from several sources in proportion to their weights."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        total = float(sum(weights))
        if not weights or min(weights) < 0 or not 0 < total < float("inf"):
            raise DataError(f"weights of a mixture must be numbers from 0 up, and not all 0; got {list(weights)}")
        self.counts = _shares([weight / total for weight in weights])
        self._seed = seed
        self._block = lru_cache(maxsize=8)(self._make_block)

    def __getitem__(self, draw: int) -> tuple[int, int]:
        """(source, draws of that source before this one)."""
        block, at = divmod(draw, BLOCK)
        sources, before = self._block(block)
        source = int(sources[at])
        return source, block * self.counts[source] + int(before[at])

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        shuffle = Permutation(BLOCK, key_of("mixture", self._seed, block))
        sources = sources[[shuffle[i] for i in range(BLOCK)]]
        before = np.zeros(BLOCK, np.int64)
        for source in range(len(self.counts)):
            places = sources == source
            before[places] = np.arange(int(places.sum()))
        return sources, before


def _shares(weights: Sequence[float]) -> list[int]:
    """Integers that sum to BLOCK, by largest remainder; at least one for each weight above 0."""
    exact = [weight * BLOCK for weight in weights]
    counts = [max(int(share), 1 if share > 0 else 0) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, BLOCK - sum(counts))]:
        counts[i] += 1
    while sum(counts) > BLOCK:  # many tiny weights were raised to one, at the expense of the largest
        counts[counts.index(max(counts))] -= 1
    return counts
