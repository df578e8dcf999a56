"""Full-text search by BM25 over an inverted index, k1 = 1.2, b = 0.75 (Robertson and Zaragoza, 2009)."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import nlargest
from math import log

K1, B = 1.2, 0.75
MAX_QUERY = 1000  # characters that are read


class Index:
    """Of texts, by their numbers. Words in more than a quarter of them tell nothing apart, and are left out."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_words(text)) for text in texts]
        mean = sum(each.total() for each in counts) / len(counts)
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, each in enumerate(counts):
            penalty = K1 * (1 - B + B * each.total() / mean)
            for word, count in each.items():
                found[word].append((number, (K1 + 1) * count / (count + penalty)))
        self._postings = {word: places for word, places in found.items() if len(places) <= len(texts) / 4}
        self._size = len(texts)

    def best(self, query: str, count: int) -> list[int]:
        """Numbers of the texts with the highest scores, the best first; of equal ones the first."""
        scores = defaultdict[int, float](float)
        for word in dict.fromkeys(_words(query[:MAX_QUERY])):
            places = self._postings.get(word, [])
            rarity = log(1 + (self._size - len(places) + 0.5) / (len(places) + 0.5))
            for number, score in places:
                scores[number] += rarity * score
        return nlargest(count, scores, key=lambda number: (scores[number], -number))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
