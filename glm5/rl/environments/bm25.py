"""Full-text search by BM25 over an inverted index, k1 = 1.2, b = 0.75 (Robertson and Zaragoza, 2009)."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import nlargest
from math import log

K1, B = 1.2, 0.75
COMMON = 0.25  # words in more than this share of the texts tell nothing apart, and are left out
MAX_QUERY = 1000  # characters that are read


class Index:
    """Of texts, by their numbers."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        counts = [Counter(_words(text)) for text in texts]
        mean = sum(each.total() for each in counts) / len(counts)
        for number, each in enumerate(counts):
            penalty = K1 * (1 - B + B * each.total() / mean)
            for word, count in each.items():
                self._postings[word].append((number, (K1 + 1) * count / (count + penalty)))
        self._rarity = {
            word: log(1 + (len(texts) - len(found) + 0.5) / (len(found) + 0.5))
            for word, found in self._postings.items()
            if len(found) <= COMMON * len(texts)
        }

    def best(self, query: str, count: int) -> list[int]:
        """Numbers of the texts with the highest scores, the best first; of equal ones the first."""
        scores = defaultdict[int, float](float)
        for word in set(_words(query[:MAX_QUERY])) & self._rarity.keys():
            for number, score in self._postings[word]:
                scores[number] += score * self._rarity[word]
        return nlargest(count, scores, key=lambda number: (round(scores[number], 6), -number))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
