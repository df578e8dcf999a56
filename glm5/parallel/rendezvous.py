"""Rendezvous of ranks, and the process group they form: on the loopback interface, or between machines."""

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore

from glm5.parallel.cuda import CudaGroup
from glm5.parallel.gloo import GlooGroup
from glm5.parallel.group import Group
from glm5.parallel.table import Shard

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1", 9  # of no machine (RFC 5737): nothing is sent there


def own_address(*, beyond: bool) -> str:
    """The address by which processes of this machine find this one, or `beyond`, those of others."""
    if not beyond:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(_ELSEWHERE)
        except OSError:  # there is no way out
            return socket.gethostbyname(socket.gethostname())
        return way.getsockname()[0]


class Rendezvous:
    """A TCP store, hosted by the first rank at `host` and `port`. `beyond`: other machines find it, too."""

    def __init__(self, *, beyond: bool = False) -> None:
        self.host = own_address(beyond=beyond)
        self._socket = socket.create_server((self.host, 0))
        self.port: int = self._socket.getsockname()[1]

    def open(self, size: int) -> Store:
        return TCPStore(
            self.host,
            self.port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )


def store_at(port: int, size: int, host: str = LOOPBACK) -> Store:
    """The store of a `Rendezvous`, for the other ranks."""
    return TCPStore(host, port, size, is_master=False, wait_for_workers=False)


def open_group(shard: Shard, device: torch.device, store: Store, *, timeout_s: float) -> Group:
    """Form a group with the other ranks, which all call this. `timeout_s`: timeout of a collective."""
    begin(shard, device, store, timeout_s=timeout_s)
    return CudaGroup(shard, device) if device.type == "cuda" else GlooGroup(shard)


def begin(shard: Shard, device: torch.device, store: Store, *, timeout_s: float, beyond: bool = False) -> None:
    """Initialize torch.distributed: NCCL on GPUs, else gloo. `beyond`: ranks are on several machines."""
    timeout = timedelta(seconds=timeout_s)
    ranks = {"store": store, "rank": shard.rank, "world_size": shard.size, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **ranks)
        return
    dist.init_process_group("gloo", pg_options=gloo_options(timeout_s, beyond=beyond), **ranks)


def gloo_options(timeout_s: float, *, beyond: bool = False) -> Any:
    """Options of a gloo group; there is no other way without environment variables."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address(beyond=beyond))]
    options._timeout = timedelta(seconds=timeout_s)
    return options
