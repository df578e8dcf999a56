"""Gathers matrices that are split over shards on one rank each for Muon, and returns the rows of their updates.

    matrix inside one shard     updated by its holder; nothing is sent
    matrix in several shards    gathered on an owner: in order of decreasing FLOPs, on the rank with the least work

Each owner receives only the rows of its matrices, and sends back the rows of their updates. Where shards end at the
borders of heads and experts nothing is exchanged (training notes, 2.5).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.train.optim.newton_schulz import flops

Orthogonal = Callable[[Tensor], Tensor]
"""Updates [n, r, C] of matrices [n, r, C]."""
AllToAll = Callable[[list[Tensor]], list[Tensor]]
"""All-to-all of flat tensors: the tensor for each rank -> the tensor from each rank."""


class RowSplit(NamedTuple):
    """Matrices and shards of a tensor, viewed as 2D: repeating row counts of its matrices, row spans of each rank."""

    num_rows: int
    num_cols: int
    rows: tuple[int, ...]
    spans: Sequence[Sequence[tuple[int, int]]]

    @property
    def is_grouped(self) -> bool:
        """Whether all spans begin and end between groups of `rows`, such as between the heads of kv_b_proj."""
        return not any(border % sum(self.rows) for spans in self.spans for span in spans for border in span)


class Piece(NamedTuple):
    """Rows `start` .. `start + num_rows` of a matrix, which begin at row `at` of the holder's shard."""

    holder: int
    start: int
    num_rows: int
    at: int


@dataclass(frozen=True)
class Matrix:
    """One matrix of the tensor `name`, in consecutive pieces."""

    name: str
    num_rows: int
    num_cols: int
    pieces: tuple[Piece, ...]
    owner: int

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1


def plan_matrices(cuts: Mapping[str, RowSplit], size: int) -> list[Matrix]:
    """All matrices with their owners, the same on every rank."""
    found: list[Matrix] = []
    load = [0] * size
    for name, cut in cuts.items():
        for start, num_rows, pieces in _matrices(cut):
            assert sum(piece.num_rows for piece in pieces) == num_rows, f"{name=} {start=} {num_rows=} {pieces=}"
            found.append(Matrix(name, num_rows, cut.num_cols, tuple(pieces), pieces[0].holder))
            if len(pieces) == 1:
                load[pieces[0].holder] += flops(num_rows, cut.num_cols)
    shared = [i for i, matrix in enumerate(found) if not matrix.is_whole]
    for i in sorted(shared, key=lambda i: (-flops(found[i].num_rows, found[i].num_cols), i)):
        matrix = found[i]
        owner = min(range(size), key=lambda rank: (load[rank], rank))
        load[owner] += flops(matrix.num_rows, matrix.num_cols)
        found[i] = replace(matrix, owner=owner)
    return found


class Exchange:
    """The exchange on one rank. If any matrix is split, all ranks call `swap` twice a step, else never."""

    def __init__(self, cuts: Mapping[str, RowSplit], rank: int, size: int, swap: AllToAll) -> None:
        self._rank, self._size, self._swap = rank, size, swap
        matrices = plan_matrices(cuts, size)
        split_names = {matrix.name for matrix in matrices if not matrix.is_whole}
        split_names |= {name for name, cut in cuts.items() if not cut.is_grouped}
        self.names = frozenset(split_names)
        """Tensors with a split matrix, or with shards that are not complete groups of matrices."""
        self._matrices = [matrix for matrix in matrices if matrix.name in split_names]

    def updates(self, given: Mapping[str, Tensor], orthogonal: Orthogonal) -> dict[str, Tensor]:
        """This rank's rows of the updates. `given`: its rows of all tensors of `names`, by name, with equal shapes."""
        if not self.names:
            return {}
        received = self._swap(self.outgoing(given))
        done = self.orthogonal(given, received, orthogonal)
        return self.placed(given, self._swap(self.returning(given, done)), done)

    def outgoing(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows of split matrices for each owner."""
        parts: list[list[Tensor]] = [[] for _ in range(self._size)]
        for matrix in self._matrices:
            for piece in matrix.pieces:
                if piece.holder == self._rank and not matrix.is_whole:
                    parts[matrix.owner].append(_rows(given[matrix.name], piece).reshape(-1))
        return self._packed(parts, given)

    def orthogonal(
        self, given: Mapping[str, Tensor], received: Sequence[Tensor], orthogonal: Orthogonal
    ) -> dict[int, Tensor]:
        """Updates of this rank's matrices, by index; matrices of equal shape are stacked."""
        at = [0] * self._size
        by_shape: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for i, matrix in enumerate(self._matrices):
            if matrix.owner != self._rank:
                continue
            parts: list[Tensor] = []
            for piece in matrix.pieces:
                if matrix.is_whole:
                    parts.append(_rows(given[matrix.name], piece))
                    continue
                count = piece.num_rows * matrix.num_cols
                begin = at[piece.holder]
                parts.append(received[piece.holder][begin : begin + count].view(piece.num_rows, matrix.num_cols))
                at[piece.holder] += count
            by_shape.setdefault((matrix.num_rows, matrix.num_cols), []).append((i, torch.cat(parts)))
        done: dict[int, Tensor] = {}
        for found in by_shape.values():
            stack = orthogonal(torch.stack([matrix for _, matrix in found]))
            done |= {i: update for (i, _), update in zip(found, stack, strict=True)}
        return done

    def returning(self, given: Mapping[str, Tensor], done: Mapping[int, Tensor]) -> list[Tensor]:
        """Rows of updates for each holder."""
        parts: list[list[Tensor]] = [[] for _ in range(self._size)]
        for i in sorted(done):
            for piece in self._matrices[i].pieces:
                if not self._matrices[i].is_whole:
                    parts[piece.holder].append(done[i][piece.start : piece.start + piece.num_rows].reshape(-1))
        return self._packed(parts, given)

    def placed(
        self, given: Mapping[str, Tensor], received: Sequence[Tensor], done: Mapping[int, Tensor]
    ) -> dict[str, Tensor]:
        updates = {name: torch.empty_like(given[name]) for name in self.names}
        at = [0] * self._size
        for i, matrix in enumerate(self._matrices):
            for piece in matrix.pieces:
                if piece.holder != self._rank:
                    continue
                target = _rows(updates[matrix.name], piece)
                if matrix.is_whole:
                    target.copy_(done[i])
                    continue
                count = piece.num_rows * matrix.num_cols
                begin = at[matrix.owner]
                target.copy_(received[matrix.owner][begin : begin + count].view_as(target))
                at[matrix.owner] += count
        return updates

    def bytes_sent(self, item_bytes: int) -> int:
        """Bytes that this rank exchanges with others in a step, in both directions."""
        values = 0
        for matrix in self._matrices:
            for piece in matrix.pieces:
                if piece.holder != matrix.owner and self._rank in (piece.holder, matrix.owner):
                    values += piece.num_rows * matrix.num_cols
        return values * item_bytes

    def _packed(self, parts: list[list[Tensor]], like: Mapping[str, Tensor]) -> list[Tensor]:
        empty = next(iter(like.values())).new_empty(0)
        return [torch.cat(part) if part else empty for part in parts]


def _matrices(cut: RowSplit) -> list[tuple[int, int, list[Piece]]]:
    """(first row, number of rows, pieces in order) of each matrix."""
    held = [
        (start, stop, holder, at)
        for holder, spans in enumerate(cut.spans)
        for (start, stop), at in zip(spans, accumulate((b - a for a, b in spans), initial=0), strict=False)
    ]
    held.sort()
    found: list[tuple[int, int, list[Piece]]] = []
    start, turn, i = 0, 0, 0
    while start < cut.num_rows:
        num_rows = cut.rows[turn % len(cut.rows)]
        pieces: list[Piece] = []
        while i < len(held) and held[i][0] < start + num_rows:
            first, stop, holder, at = held[i]
            begin, end = max(first, start), min(stop, start + num_rows)
            pieces.append(Piece(holder, begin - start, end - begin, at + begin - first))
            if stop > start + num_rows:
                break
            i += 1
        found.append((start, num_rows, pieces))
        start, turn = start + num_rows, turn + 1
    return found


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])[piece.at : piece.at + piece.num_rows]
