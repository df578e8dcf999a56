"""Bytes from one process to others, within a time limit: by NCCL between GPUs, by gloo between CPUs.

A group beside the one that the ranks of a model may have. A member that ends or stops leaves the others an error in
place of a wait without end; the group is then of no use any more.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from glm5.common.errors import GlmError
from glm5.parallel.rendezvous import gloo_options

_POLL_SECONDS = 0.0005
_JOINED = "joined"
# NCCL's own threads end a process whose collective takes longer; here the one that waits decides.
_NEVER_SECONDS = 86_400.0
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60"}


class BroadcastGroup:
    """Rank 0 of `size` sends, the others receive. All of them make one and then the same calls in the same order.

    `beyond`: they are on several machines. Raises GlmError if the others do not join within `timeout_s`, or once
    `is_wanted` of rank 0 is false.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
        beyond: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._backend: Any = None
        store.set_timeout(timedelta(seconds=timeout_s))
        if rank:
            store.set(f"{_JOINED}/{rank}", "")
        else:
            self._until(lambda: store.check([f"{_JOINED}/{other}" for other in range(1, size)]), is_wanted)
        try:
            if device.type == "cuda":
                self._backend = _nccl(store, rank, size, device)
            else:
                self._backend = ProcessGroupGloo(store, rank, size, gloo_options(timeout_s, beyond=beyond))
        except RuntimeError as error:
            raise GlmError(f"the processes could not form a group: {error}") from error

    def broadcast(self, data: Tensor, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Copy `data`, contiguous, from rank 0, in place. Raises GlmError where another member has ended, does not take
        part within the time limit, or once `is_wanted` is false."""
        options, backend = BroadcastOptions(), self._backend
        options.rootRank = 0
        if backend is None:
            raise GlmError("the group of a push has ended")
        try:
            work = backend.broadcast([data], options)
            self._until(work.is_completed, is_wanted)
            work.wait()
        except RuntimeError as error:  # of torch, not of `_until`
            self.close()
            raise GlmError(f"weights did not arrive: {error}") from error
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()

    def close(self) -> None:
        """What is under way ends. Closing again does nothing."""
        backend, self._backend = self._backend, None
        if backend is not None and not isinstance(backend, ProcessGroupGloo):
            backend.abort()

    def _until(self, is_done: Callable[[], bool], is_wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_done():
            if not is_wanted():
                self.close()
                raise GlmError("the push has ended")
            if time.monotonic() > deadline:
                self.close()
                raise GlmError(f"another process did not take part for {self._timeout_s:g} s")
            time.sleep(_POLL_SECONDS)


def _nccl(store: Store, rank: int, size: int, device: torch.device) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for CPUs have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_NEVER_SECONDS)
    options.config.blocking = False  # so that `abort` ends what waits for a member that is gone
    for name, value in _NCCL_SETTINGS.items():  # it has no options for them, and reads them when it is made
        os.putenv(name, value)
    backend: Any = ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return backend
