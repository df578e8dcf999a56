"""Matrices that the borders of shards cut, made whole for Muon by one packed exchange, and taken apart by another.

    matrix inside one shard     its holder's; nothing is sent
    matrix in several shards    whole on one owner: heaviest first, each to whoever has least to do so far

An owner gets the rows of its own matrices and nothing else, and sends back the rows of their updates. Where shards end
on the borders of heads and experts there is nothing to exchange (training notes, 2.5).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.train.optim.newton_schulz import flops

Orthogonal = Callable[[Tensor], Tensor]
"""Updates [n, r, C] of matrices [n, r, C]."""
Swap = Callable[[list[Tensor]], list[Tensor]]
"""What this rank has for each, flat, to what each has for this one."""


class Cut(NamedTuple):
    """How a tensor, seen as [R, C], lies: rows of its matrices, over and over, and the spans of rows of each rank."""

    num_rows: int
    num_cols: int
    rows: tuple[int, ...]
    spans: Sequence[Sequence[tuple[int, int]]]

    @property
    def is_grouped(self) -> bool:
        """Whether every span begins and ends where `rows` begin anew: between W_UV of a head and W_UK of the next."""
        return not any(border % sum(self.rows) for spans in self.spans for span in spans for border in span)


class Piece(NamedTuple):
    """`num` rows of a matrix from `start`, which are rows `at` and on of what `holder` has."""

    holder: int
    start: int
    num: int
    at: int


@dataclass(frozen=True)
class Matrix:
    """One matrix of the tensor `name`, in pieces that follow each other."""

    name: str
    num_rows: int
    num_cols: int
    pieces: tuple[Piece, ...]
    owner: int

    @property
    def is_whole(self) -> bool:
        return len(self.pieces) == 1


def plan(cuts: Mapping[str, Cut], size: int) -> list[Matrix]:
    """All matrices with their owners, the same on every rank."""
    found: list[Matrix] = []
    load = [0] * size
    for name, cut in cuts.items():
        for start, num, pieces in _matrices(cut):
            assert sum(piece.num for piece in pieces) == num, f"{name=} rows {start} to {start + num} {pieces=}"
            found.append(Matrix(name, num, cut.num_cols, tuple(pieces), pieces[0].holder))
            if len(pieces) == 1:
                load[pieces[0].holder] += flops(num, cut.num_cols)
    shared = [i for i, matrix in enumerate(found) if not matrix.is_whole]
    for i in sorted(shared, key=lambda i: (-flops(found[i].num_rows, found[i].num_cols), i)):
        matrix = found[i]
        owner = min(range(size), key=lambda rank: (load[rank], rank))
        load[owner] += flops(matrix.num_rows, matrix.num_cols)
        found[i] = Matrix(matrix.name, matrix.num_rows, matrix.num_cols, matrix.pieces, owner)
    return found


class Exchange:
    """Rank `rank`'s part. `swap` is called twice a step where any matrix is cut, on all ranks, else never."""

    def __init__(self, cuts: Mapping[str, Cut], rank: int, size: int, swap: Swap) -> None:
        self._rank, self._size, self._swap = rank, size, swap
        matrices = plan(cuts, size)
        cut_apart = {matrix.name for matrix in matrices if not matrix.is_whole}
        cut_apart |= {name for name, cut in cuts.items() if not cut.is_grouped}
        self.names = frozenset(cut_apart)
        """Tensors with at least one matrix that is cut, or of which a rank's rows are no whole groups of matrices. The
        others need nobody."""
        self._matrices = [matrix for matrix in matrices if matrix.name in cut_apart]

    def updates(self, given: Mapping[str, Tensor], orthogonal: Orthogonal) -> dict[str, Tensor]:
        """This rank's rows of the updates, for its rows of all tensors of `names`, of the same shapes."""
        if not self.names:
            return {}
        coming = self._swap(self.outgoing(given))
        done = self.orthogonal(given, coming, orthogonal)
        return self.placed(given, self._swap(self.returning(given, done)), done)

    def outgoing(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows of cut matrices for their owners."""
        parts: list[list[Tensor]] = [[] for _ in range(self._size)]
        for matrix in self._matrices:
            for piece in matrix.pieces:
                if piece.holder == self._rank and not matrix.is_whole:
                    parts[matrix.owner].append(_rows(given[matrix.name], piece).reshape(-1))
        return self._packed(parts, given)

    def orthogonal(
        self, given: Mapping[str, Tensor], coming: Sequence[Tensor], orthogonal: Orthogonal
    ) -> dict[int, Tensor]:
        """Updates of the matrices that this rank owns, by their place in the plan; those of a shape at a time."""
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
                count = piece.num * matrix.num_cols
                begin = at[piece.holder]
                parts.append(coming[piece.holder][begin : begin + count].view(piece.num, matrix.num_cols))
                at[piece.holder] += count
            by_shape.setdefault((matrix.num_rows, matrix.num_cols), []).append((i, torch.cat(parts)))
        done: dict[int, Tensor] = {}
        for found in by_shape.values():
            stack = orthogonal(torch.stack([matrix for _, matrix in found]))
            done |= {i: update for (i, _), update in zip(found, stack, strict=True)}
        return done

    def returning(self, given: Mapping[str, Tensor], done: Mapping[int, Tensor]) -> list[Tensor]:
        """Rows of updates for those who hold them."""
        parts: list[list[Tensor]] = [[] for _ in range(self._size)]
        for i in sorted(done):
            for piece in self._matrices[i].pieces:
                if not self._matrices[i].is_whole:
                    parts[piece.holder].append(done[i][piece.start : piece.start + piece.num].reshape(-1))
        return self._packed(parts, given)

    def placed(
        self, given: Mapping[str, Tensor], coming: Sequence[Tensor], done: Mapping[int, Tensor]
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
                count = piece.num * matrix.num_cols
                begin = at[matrix.owner]
                target.copy_(coming[matrix.owner][begin : begin + count].view_as(target))
                at[matrix.owner] += count
        return updates

    def bytes_sent(self, item_bytes: int) -> int:
        """To other ranks in a step, there and back."""
        values = 0
        for matrix in self._matrices:
            for piece in matrix.pieces:
                if piece.holder != matrix.owner and self._rank in (piece.holder, matrix.owner):
                    values += piece.num * matrix.num_cols
        return values * item_bytes

    def _packed(self, parts: list[list[Tensor]], like: Mapping[str, Tensor]) -> list[Tensor]:
        empty = next(iter(like.values())).new_empty(0)
        return [torch.cat(part) if part else empty for part in parts]


def _matrices(cut: Cut) -> list[tuple[int, int, list[Piece]]]:
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
        num = cut.rows[turn % len(cut.rows)]
        pieces: list[Piece] = []
        while i < len(held) and held[i][0] < start + num:
            first, stop, holder, at = held[i]
            begin, end = max(first, start), min(stop, start + num)
            pieces.append(Piece(holder, begin - start, end - begin, at + begin - first))
            if stop > start + num:
                break
            i += 1
        found.append((start, num, pieces))
        start, turn = start + num, turn + 1
    return found


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])[piece.at : piece.at + piece.num]
