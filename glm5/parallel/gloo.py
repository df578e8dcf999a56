"""Collectives over CPU processes of one machine, by gloo."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from glm5.kernels.all_reduce import all_reduce_reference
from glm5.kernels.all_reduce.part import PartialSum, summed
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.row_codes import Kind, Quantized
from glm5.parallel.group import add_and_norm, rows_of
from glm5.parallel.table import Shard


class GlooGroup:
    """All-gathers parts, and every rank sums them in the order of ranks."""

    def __init__(self, shard: Shard):
        self.shard = shard

    def all_reduce(self, part: Tensor) -> Tensor:
        return all_reduce_reference(self.all_gather(part))

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return add_and_norm(self.all_reduce(summed(part)), residual_TD, weight_D, eps, quantize=quantize)

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        new_OD = self.all_reduce(summed(part)).unflatten(0, (self.shard.size, -1))[self.shard.rank]
        return add_and_norm(new_OD, residual_OD, weight_D, eps, quantize=quantize)

    def all_gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        # As bytes, because gloo does not support every dtype.
        out = torch.empty((self.shard.size, *part.shape), dtype=part.dtype, device=part.device)
        if part.numel():
            dist.all_gather([one.view(-1).view(torch.uint8) for one in out], part.view(-1).view(torch.uint8))
        return out

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        return rows_of(self, parts)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def close(self) -> None:
        dist.destroy_process_group()
