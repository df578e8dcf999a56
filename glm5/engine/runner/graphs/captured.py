"""CUDA graphs by key, in one memory pool: pieces of a step that are captured once and then replayed.

A piece has no arguments and no result: it reads and writes tensors at fixed addresses. All graphs are dropped when
weights or cache move.

Other work of the process can invalidate a capture (cudaErrorStreamCaptureInvalidated): the capturing thread destroys a
graph, for example when the garbage collector finds a closed engine; any thread synchronizes the device, as every
capture does at its start; the capture's own stream is synchronized. So captures of a process are serialized, with the
collector off, on a dedicated stream, and a capture that other threads disturbed is repeated.
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
_GC_INTERFERES = (900, 901)  # cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated
_alone = threading.RLock()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all engines of the process, as libraries keep workspaces of tens of megabytes for each stream. Of
    high priority, as torch reuses its 32 streams of normal priority in turn."""
    return torch.cuda.Stream(device, priority=-1)


def synchronize(device: torch.device) -> None:
    """Wait for the device, between captures."""
    with _alone:
        torch.cuda.synchronize(device)


@contextmanager
def _without_gc() -> Iterator[None]:
    with _alone:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Graphs:
    """`captures`: whether pieces become graphs; otherwise they run eagerly."""

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
        """Replay the captured graph of a piece; without captures, run the piece."""
        if self.captures:
            self._graphs[key].replay()
        else:
            piece()

    def capture(self, key: Hashable, piece: Piece, *, warm: bool) -> None:
        """Capture a piece. `warm`: run it first, so that kernels are compiled and libraries have chosen theirs."""
        with _without_gc():
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    self._graphs[key] = self._captured(piece, warm=warm)
                    break
                except torch.AcceleratorError as error:
                    if getattr(error, "error_code", None) not in _GC_INTERFERES or attempt == _ATTEMPTS:
                        raise
                    reason = str(error).partition("\n")[0]
                    self._drop_pool()
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

    def _drop_pool(self) -> None:
        """Use a new pool: after a failed capture, torch would keep recording allocations for the old one."""
        assert self._pool is not None
        end_recording = torch._C._cuda_endAllocateToPool  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        end_recording(self.cache.device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def forget_if_moved(self) -> None:
        """Drop all graphs if weights or cache have moved. Call it before each step."""
        if self.captures and (place := (self.passes.generation, self.cache.place)) != self._place:
            self._graphs.clear()
            # A new pool, since torch does not reuse one whose graphs are gone.
            self._pool, self._place = torch.cuda.graph_pool_handle(), place
