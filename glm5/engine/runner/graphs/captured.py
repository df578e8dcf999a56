"""CUDA graphs by key, in one pool of memory: pieces of a step that are recorded once and then launched as a whole.

A piece takes nothing and returns nothing: it reads and writes tensors that stay where they are. Graphs hold addresses,
so all of them are dropped once weights or cache lie elsewhere.

What else happens in the process can end a capture (cudaErrorStreamCaptureInvalidated): a graph that is destroyed by the
thread that captures, as when the garbage collector finds a closed engine; a synchronization of the device by any
thread, with which each capture begins; one of the capture's own stream. So captures of a process take turns, without
the collector, on a stream that nothing else is given, and one that fails for others' doing is tried again.
"""

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.passes import Passes

Piece = Callable[[], object]

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_DISTURBED = (900, 901)  # cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated
_alone = threading.RLock()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for all engines of the process, as libraries keep workspaces of tens of megabytes for each stream.
    Of high priority, as torch gives out its 32 streams of the usual one in turn, again and again."""
    return torch.cuda.Stream(device, priority=-1)


def synchronize(device: torch.device) -> None:
    """Wait for the device, between captures."""
    with _alone:
        torch.cuda.synchronize(device)


@contextmanager
def _undisturbed() -> Iterator[None]:
    with _alone:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Graphs:
    """`captures`: whether pieces become graphs at all; else they run as they are."""

    def __init__(self, passes: Passes, cache: KVCache, *, captures: bool):
        self.passes, self.cache, self.captures = passes, cache, captures
        self.num_captured = 0
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._place: object = None
        self._stream = _capture_stream(cache.device) if captures else None
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
        with _undisturbed():
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    self._graphs[key] = self._captured(piece, warm=warm)
                    break
                except torch.AcceleratorError as error:
                    if getattr(error, "error_code", None) not in _DISTURBED or attempt == _ATTEMPTS:
                        raise
                    reason = str(error).partition("\n")[0]
                    self._abandon_pool()
                    logger.warning("another thread disturbed the capture of a CUDA graph (%s); trying again", reason)
        self.num_captured += 1

    def _captured(self, piece: Piece, *, warm: bool) -> torch.cuda.CUDAGraph:
        main, side = torch.cuda.current_stream(self.cache.device), self._stream
        assert side is not None
        side.wait_stream(main)
        if warm:
            with torch.cuda.stream(side):
                piece()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            piece()
        return graph

    def _abandon_pool(self) -> None:
        """Take another one: of a capture that failed, torch goes on recording what is allocated."""
        assert self._pool is not None
        end_recording = torch._C._cuda_endAllocateToPool  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        end_recording(self.cache.device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def forget_if_moved(self) -> None:
        """Drop all graphs if what they read has moved. To be called before each step."""
        if self.captures and (place := (self.passes.generation, self.cache.place)) != self._place:
            self._graphs.clear()
            # Not the old one again: a pool whose graphs are gone is not taken back.
            self._pool, self._place = torch.cuda.graph_pool_handle(), place
