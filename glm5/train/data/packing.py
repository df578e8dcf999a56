"""Best-fit packing: documents into sequences of one length, cut only where a document alone is longer.

Longest first, each into the sequence with the least sufficient space (best-fit decreasing). Unlike cutting the stream
every `seq_len` tokens, no document loses its beginning; the cost is unused space, a few tokens in ten thousand where
documents are short.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packed:
    """The pieces of each sequence: those from `first[i]` to `first[i + 1]` of `start` and `stop`."""

    first: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    seq_len: int

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, sequence: int) -> list[tuple[int, int]]:
        """(start, stop) of each piece, as places in the token file."""
        a, b = int(self.first[sequence]), int(self.first[sequence + 1])
        return [(int(self.start[i]), int(self.stop[i])) for i in range(a, b)]


def ranges_of(ends: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """(start, stop) of documents that end at `ends`, each of which begins where the one before ends. [N, 2]"""
    end_N = np.asarray(ends, np.int64)
    return np.stack([np.concatenate([[0], end_N[:-1]]), end_N], axis=1) if len(end_N) else np.zeros((0, 2), np.int64)


def best_fit(document_N2: NDArray[np.int64], seq_len: int) -> Packed:
    """Pack these documents, (start, stop) of each. The same documents, the same packing.

    Time n log n in the number of documents.
    """
    if seq_len < 1:
        raise ValueError(f"{seq_len=} must be at least 1")
    pieces = np.array(list(_pieces(document_N2, seq_len)), np.int64).reshape(-1, 2)
    lengths = pieces[:, 1] - pieces[:, 0]
    bin_of = np.zeros(len(pieces), np.int64)
    rooms: list[int] = []  # free rooms that some sequence has, ascending
    having: dict[int, list[int]] = {}
    num_bins = 0
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            chosen, room = num_bins, seq_len
            num_bins += 1
        else:
            room = rooms[at]
            chosen = having[room].pop()
            if not having[room]:
                del having[room]
                rooms.pop(at)
        bin_of[piece] = chosen
        if left := room - length:
            if left not in having:
                having[left] = []
                insort(rooms, left)
            having[left].append(chosen)
    order = np.argsort(bin_of, kind="stable")  # within a sequence, pieces stay in the order of the file
    first = np.searchsorted(bin_of[order], np.arange(num_bins + 1))
    return Packed(first.astype(np.int64), pieces[order, 0], pieces[order, 1], seq_len)


def _pieces(document_N2: NDArray[np.int64], seq_len: int) -> Iterator[tuple[int, int]]:
    for start, stop in document_N2.tolist():
        for begin in range(start, stop, seq_len):
            yield begin, min(begin + seq_len, stop)
