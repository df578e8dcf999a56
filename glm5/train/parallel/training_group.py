"""The process groups of a distributed run, and reductions over all ranks."""

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from glm5.parallel.rendezvous import begin
from glm5.parallel.table import Shard
from glm5.train.parallel.collectives import Group
from glm5.train.parallel.mesh import Mesh


class TrainingGroup:
    """This rank's process groups in a `mesh`. Creating it is a collective operation of all ranks. `beyond`: they are on
    several machines."""

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, store: Store, *, timeout_s: float, beyond: bool = False
    ) -> None:
        self.mesh, self.rank, self.device, self.store = mesh, rank, device, store
        begin(Shard(rank, mesh.size), device, store, timeout_s=timeout_s, beyond=beyond)
        if rank == 0:
            store.set("run", uuid4().hex[:12])
        self.run = store.get("run").decode()
        """A unique name of the run, the same on all ranks."""
        timeout = timedelta(seconds=timeout_s)

        def new_group(ranks_of: Callable[[int], list[int]]) -> Group:
            own_group: Group | None = None
            for ranks in sorted({tuple(ranks_of(one)) for one in range(mesh.size)}):  # every rank creates each group
                group = dist.new_group(list(ranks), timeout=timeout)
                if rank in ranks:
                    assert isinstance(group, Group)
                    own_group = group
            assert own_group is not None
            return own_group

        self.stage = new_group(mesh.stage_ranks)
        self.context = new_group(mesh.context_ranks)
        self.pipeline = new_group(mesh.pipeline_ranks)
        self.experts = new_group(mesh.expert_ranks)
        self.expert_shards = new_group(mesh.expert_shard_ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and messages."""
        return self.rank == 0

    def total(self, values: Tensor, group: Group | None = None) -> Tensor:
        """The sum over the group, by default over all ranks; bitwise the same on each."""
        values = values.to(self.device, copy=True)
        dist.all_reduce(values, group=group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        values = values.to(self.device, copy=True)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.largest(torch.tensor(int(flag))).item())

    def wait(self) -> None:
        """Wait for all ranks."""
        self.total(torch.zeros(1))

    def close(self) -> None:
        dist.destroy_process_group()
