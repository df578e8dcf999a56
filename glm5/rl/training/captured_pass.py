"""An engine's passes as CUDA graphs: launching the kernels of few rows one by one takes longer than computing them.

A shape is captured when it is met for the second time. Numbers of rows, sequences and pages are rounded up, so that
there are few shapes; further rows are padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.common.rounding import next_power_of_two
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.graphs.captured import Graphs
from glm5.engine.runner.inputs.view import StepView
from glm5.kernels.invariant import pass_rows

_MAX_ROWS = 2**14  # of more, a GPU computes as long as a host launches


@dataclass
class Trace:
    """Of some rows: the input of each layer and the output of the last one, [L + 1, U, D]; the hidden states behind the
    final norm; of each layer the keys that its rows read, int32 [U, index_topk] or None for all that they see; and
    experts int16 [U, MoE layers, A]."""

    stream_LUD: Tensor
    hidden_UD: Tensor
    keys: list[Tensor | None]
    expert_ULA: Tensor

    def rows(self, which: slice | Tensor, *, copied: bool = False) -> "Trace":
        """Of some of the rows. `copied`: in memory of their own."""

        def some(rows: Tensor) -> Tensor:
            return rows.clone() if copied else rows

        keys = [None if keys_UK is None else some(keys_UK[which]) for keys_UK in self.keys]
        return Trace(some(self.stream_LUD[:, which]), some(self.hidden_UD[which]), keys, some(self.expert_ULA[which]))


Compute = Callable[[Tensor, StepView], Trace]


class _Shape(NamedTuple):
    num_rows: int
    num_seqs: int
    num_pages: int
    max_end: int


class _Piece:
    """The inputs of a graph, at first padding, and what it computes."""

    def __init__(self, shape: _Shape, view: StepView, compute: Compute):
        self._compute, device = compute, view.positions_T.device
        self.ids_T, position_T, slot_T = torch.zeros(3, shape.num_rows, dtype=torch.int64, device=device)
        group_T, end_T = torch.zeros(2, shape.num_rows, dtype=torch.int32, device=device)
        table_BP = torch.zeros(shape.num_seqs, shape.num_pages, dtype=torch.int32, device=device)
        self.view = StepView(view.cache, table_BP, position_T, group_T, end_T, slot_T, shape.max_end, view.invariant)
        self.trace: Trace | None = None

    def load(self, ids_T: Tensor, view: StepView) -> None:
        own, count = self.view, len(ids_T)
        num_seqs, num_pages = view.table_BP.shape
        own.table_BP[:num_seqs, :num_pages].copy_(view.table_BP)
        given = ids_T, view.positions_T, view.group_T, view.end_T, view.slot_mapping_T
        padding = 0, 0, 0, 0, view.cache.dump_page * view.cache.page_size
        rows = self.ids_T, own.positions_T, own.group_T, own.end_T, own.slot_mapping_T
        for into, some, rest in zip(rows, given, padding, strict=True):
            into[:count].copy_(some[:count])
            into[count:].fill_(rest)

    def __call__(self) -> None:
        self.trace = self._compute(self.ids_T, self.view)


class CapturedPasses:
    """`compute`: a pass over padded rows, launched kernel by kernel. `cache`: that of all views."""

    def __init__(self, passes: Passes, cache: KVCache, compute: Compute):
        self.cache, self._compute = cache, compute
        self._graphs = Graphs(passes, cache, captures=True)
        self._met, self._pieces = set[_Shape](), dict[_Shape, _Piece]()

    def __call__(self, ids_T: Tensor, view: StepView) -> Trace:
        """Of the rows of `ids_T`; those of `view` may be more."""
        self._graphs.forget_if_moved()
        count, top_k = len(ids_T), self.cache.cfg.index_topk
        num_seqs, num_pages = map(next_power_of_two, view.table_BP.shape)
        step = max(next_power_of_two(count) // 8, pass_rows(self.cache.device))
        shape = _Shape(-(-count // step) * step, num_seqs, num_pages, max_end=top_k + (view.max_end > top_k))
        if count > _MAX_ROWS or shape not in self._met:
            self._met.add(shape)
            missing = len(view.positions_T) - count
            return self._compute(torch.nn.functional.pad(ids_T, (0, missing)), view).rows(slice(0, count))
        if shape not in self._pieces:
            self._pieces[shape] = _Piece(shape, view, self._compute)
        piece = self._pieces[shape]
        piece.load(ids_T, view)
        if not self._graphs.has(shape):
            self._graphs.capture(shape, piece, warm=True)
        self._graphs.run(shape, piece)
        assert piece.trace is not None
        return piece.trace.rows(slice(0, count), copied=True)
