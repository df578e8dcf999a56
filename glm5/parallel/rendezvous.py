"""Rendezvous of the ranks of a machine, and the process group they form."""

import socket
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore

from glm5.parallel.cuda import CudaGroup
from glm5.parallel.gloo import GlooGroup
from glm5.parallel.group import Group
from glm5.parallel.table import Shard

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Rendezvous:
    """A TCP store on the loopback interface, hosted by the first rank."""

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
    """The store of a `Rendezvous`, for the other ranks."""
    return TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)


def open_group(shard: Shard, device: torch.device, store: Store, *, timeout_s: float) -> Group:
    """Form a group with the other ranks, which all call this. `timeout_s`: timeout of a collective."""
    begin(shard, device, store, timeout_s=timeout_s)
    return CudaGroup(shard, device) if device.type == "cuda" else GlooGroup(shard)


def begin(shard: Shard, device: torch.device, store: Store, *, timeout_s: float) -> None:
    """Initialize torch.distributed: NCCL on GPUs, else gloo on the loopback interface."""
    timeout = timedelta(seconds=timeout_s)
    ranks = {"store": store, "rank": shard.rank, "world_size": shard.size, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **ranks)
        return
    dist.init_process_group("gloo", pg_options=gloo_options(timeout_s), **ranks)


def gloo_options(timeout_s: float) -> Any:
    """Options of a gloo group on the loopback interface; there is no other way without environment variables."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=_LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    return options
