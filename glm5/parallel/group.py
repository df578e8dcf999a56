"""Ranks that compute one model together, and what they exchange: sums and gathered rows, in a fixed order.

    GlooGroup       processes on CPUs: rows are gathered, and every rank adds them up in the order of ranks
    CudaGroup       one process a GPU: symmetric memory and kernels of our own; NCCL for what does not fit there

Every rank gets the same bits, and the same bits again for the same rows: what follows from them (which experts, which
keys, which token) is then the same everywhere without being told.
"""

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore

from glm5.kernels.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from glm5.kernels.all_reduce import all_reduce_reference, is_turned
from glm5.kernels.all_reduce.part import PartialSum, summed
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.row_codes import Kind, Quantized
from glm5.parallel.table import Shard

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Group(Protocol):
    """What modules, the sampler and the engine ask of the ranks. All ranks make the same calls in the same order."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`s, added in float32 at least, rounded once."""
        ...

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        """(out, sum, its codes if asked for): `kernels.add_rms_norm` of the `all_reduce` of `part`; terms are added up
        before, or on their way."""
        ...

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        """The same of this rank's rows alone, the `rank`-th of `size` equal shares."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' `part`s, [ranks, ...], in their order."""
        ...

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        """All ranks' rows of each of `parts` [O, ...], in their order: [ranks x O, ...]. Of a part whose columns lie in
        one piece, so do those of what is returned."""
        ...

    def spread(self, x: Tensor) -> None:
        """Make `x`, of bytes in one piece, what it is on the first rank."""
        ...

    def close(self) -> None: ...


class GlooGroup:
    """Processes that exchange through sockets of this machine."""

    def __init__(self, shard: Shard):
        self.shard = shard

    def all_reduce(self, part: Tensor) -> Tensor:
        return all_reduce_reference(self.all_gather(part))

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return joined(self.all_reduce(summed(part)), residual_TD, weight_D, eps, quantize=quantize)

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        new_OD = self.all_reduce(summed(part)).unflatten(0, (self.shard.size, -1))[self.shard.rank]
        return joined(new_OD, residual_OD, weight_D, eps, quantize=quantize)

    def all_gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        # As bytes: not every dtype is known there.
        out = torch.empty((self.shard.size, *part.shape), dtype=part.dtype, device=part.device)
        if part.numel():
            dist.all_gather([one.view(-1).view(torch.uint8) for one in out], part.view(-1).view(torch.uint8))
        return out

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        return rows_of(self, parts)

    def spread(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def close(self) -> None:
        dist.destroy_process_group()


class Meeting:
    """Where ranks find each other: a store that the first rank keeps, on this machine alone."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def open(self, size: int) -> Store:
        return TCPStore(
            "127.0.0.1",
            self.port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )


def store_at(port: int, size: int) -> Store:
    """The store of a `Meeting`, for the other ranks."""
    return TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)


def open_group(shard: Shard, device: torch.device, store: Store, *, timeout_s: float) -> Group:
    """Meet the other ranks, all of which call this. `timeout_s`: how long a collective may take before it fails."""
    begin(shard, device, store, timeout_s=timeout_s)
    if device.type == "cuda":
        from glm5.parallel.cuda import CudaGroup

        return CudaGroup(shard, device)
    return GlooGroup(shard)


def begin(shard: Shard, device: torch.device, store: Store, *, timeout_s: float) -> None:
    """torch.distributed's world for these ranks: NCCL on GPUs, else gloo on this machine's own interface."""
    timeout = timedelta(seconds=timeout_s)
    ranks = {"store": store, "rank": shard.rank, "world_size": shard.size, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **ranks)
        return
    # The one way to stay on this machine's own interface without the environment.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=_LOOPBACK)]
    options._timeout = timeout
    dist.init_process_group("gloo", pg_options=options, **ranks)


class Alone:
    """A group of one rank: nothing is exchanged."""

    shard = Shard()

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return joined(summed(part), residual_TD, weight_D, eps, quantize=quantize)

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return joined(summed(part), residual_OD, weight_D, eps, quantize=quantize)

    def all_gather(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        return parts

    def spread(self, x: Tensor) -> None:
        """It is."""

    def close(self) -> None:
        """Nothing to close."""


ALONE: Group = Alone()


def joined(
    new_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
) -> tuple[Tensor, Tensor, Quantized | None]:
    """(out, sum, its codes if asked for) of what is new, added up."""
    if quantize is None:
        return *add_rms_norm(new_TD, residual_TD, weight_D, eps), None
    out_TD, total_TD, *quantized = add_rms_norm_quantized(new_TD, residual_TD, weight_D, eps, quantize)
    return out_TD, total_TD, (quantized[0], quantized[1])


def rows_of(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """`gather_rows`, of one part after the other."""
    return [
        group.all_gather(part.T).transpose(0, 1).flatten(1).T
        if is_turned(part)
        else group.all_gather(part).flatten(0, 1)
        for part in parts
    ]


def least(group: Group, numbers: Sequence[int], device: torch.device) -> list[int]:
    """The smallest of all ranks' numbers, one by one."""
    return group.all_gather(torch.tensor(numbers, dtype=torch.int64, device=device)).amin(dim=0).tolist()
