"""Ranks on the GPUs of one machine, over NCCL: sums of every size in the order of ranks, rounded once.

    all_reduce   each rank gets its share of the rows from all others, adds it up, and gives the sum to all others

NCCL's own all-reduce would round at every hop.
"""

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.kernels.add_rms_norm import add_rms_norm
from glm5.kernels.all_reduce import all_reduce_reference
from glm5.parallel.table import Shard


class CudaGroup:
    """One process a GPU. Everything is enqueued on the current stream, and can be captured in a graph."""

    def __init__(self, shard: Shard, device: torch.device):
        self.shard, self.device = shard, device

    def all_reduce(self, part: Tensor) -> Tensor:
        return self.all_reduce_nccl(part)

    def add_rms_norm(self, part_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(self.all_reduce(part_TD), residual_TD, weight_D, eps)

    def all_gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        out = torch.empty((self.shard.size, *part.shape), dtype=part.dtype, device=part.device)
        if part.numel():
            dist.all_gather_into_tensor(out.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))
        return out

    def all_reduce_nccl(self, part: Tensor) -> Tensor:
        """The fallback, of any size."""
        size, count = self.shard.size, part.numel()
        flat = part.reshape(-1)
        if count % size:
            flat = torch.nn.functional.pad(flat, (0, -count % size))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        mine, total = all_reduce_reference(parts.view(size, -1)), torch.empty_like(flat)
        dist.all_gather_into_tensor(total, mine)
        return total[:count].view(part.shape)

    def close(self) -> None:
        dist.destroy_process_group()
