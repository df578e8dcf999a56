"""CUDA graphs by key, in one pool of memory: pieces of a step that are recorded once and then launched as a whole.

A piece takes nothing and returns nothing: it reads and writes tensors that stay where they are. Graphs hold addresses,
so all of them are dropped once weights or cache lie elsewhere.
"""

from collections.abc import Callable, Hashable

import torch

from glm5.engine.kv import KVCache
from glm5.engine.passes import Passes

Piece = Callable[[], object]


class Graphs:
    """`captures`: whether pieces become graphs at all; else they run as they are."""

    def __init__(self, passes: Passes, cache: KVCache, *, captures: bool):
        self.passes, self.cache, self.captures = passes, cache, captures
        self.num_captured = 0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._place: object = None
        # Always the same stream: libraries keep workspaces of tens of megabytes for each.
        self._stream = torch.cuda.Stream(cache.device) if captures else None
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    def has(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, piece: Piece) -> None:
        """A piece whose graph, if there are any, was captured."""
        if self.captures:
            self._graphs[key].replay()
        else:
            piece()

    def capture(self, key: Hashable, piece: Piece, *, warm: bool) -> None:
        """`warm`: run it first, so that kernels are compiled and libraries have chosen theirs."""
        main, side = torch.cuda.current_stream(self.cache.device), self._stream
        assert side is not None, f"{key=}"
        side.wait_stream(main)
        if warm:
            with torch.cuda.stream(side):
                piece()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            piece()
        self._graphs[key] = graph
        self.num_captured += 1

    def forget_if_moved(self) -> None:
        """Drop all graphs if what they read has moved. To be called before each step."""
        if self.captures and (place := (self.passes.generation, self.cache.place)) != self._place:
            self._graphs.clear()
            # Not the old one again: a pool whose graphs are gone is not taken back.
            self._pool, self._place = torch.cuda.graph_pool_handle(), place
