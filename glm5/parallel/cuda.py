"""Collectives over the GPUs of one machine: Triton kernels over symmetric memory, else NCCL.

    one shot     few rows: every rank sends its part to all others (kernels/all_reduce/triton.py)
    two shots    more rows: each rank sums some pieces; prompts in several launches
    sharded      prompts: reduce-scatter, each rank keeps the rows that it sums (triton_sharded.py)
    NCCL         without symmetric memory, an all-to-all and an all-gather

All of them sum in the order of ranks in float32, and round once. (NCCL's own all-reduce would round at every hop.)
NVLink multicast is never used, because a process that uses it and crashes can make a machine's GPUs unusable. Processes
start with multicast disabled (engine/transport/link.py); otherwise symmetric memory is not used.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d
from torch._C._autograd import DeviceType

from glm5.kernels.all_reduce import all_reduce_reference
from glm5.kernels.all_reduce.part import PartialSum, summed
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.row_codes import Kind, Quantized, empty_codes
from glm5.kernels.triton_support import installed
from glm5.parallel.group import add_and_norm, rows_of
from glm5.parallel.table import Shard

logger = logging.getLogger(__name__)

BUFFER_BYTES = 32 << 20  # of each of three buffers: enough for 2,048 rows of GLM-5
ONE_SHOT_BYTES = 256 << 10  # maximum that a rank sends in one shot
TWO_SHOT_BYTES = 6 << 20  # maximum of a message: larger ones are slower than several of this size


class CudaGroup:
    """One process per GPU. All calls enqueue on the current stream and can be captured in CUDA graphs."""

    def __init__(self, shard: Shard, device: torch.device):
        self.shard, self.device = shard, device
        self.buffers = None
        c10d: Any = _distributed_c10d
        has_multicast = c10d._SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0)
        if has_multicast:
            logger.warning("TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1, so NCCL does all that ranks exchange")
        elif installed():
            self._open_buffers()

    def _open_buffers(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, Buffers, empty, empty_state

        num_words, world = BUFFER_BYTES // 4, dist.group.WORLD
        assert world is not None
        self._memory = symmetric.empty(NUM_BUFFERS * num_words, dtype=torch.int32, device=self.device)
        self._handle = symmetric.rendezvous(self._memory, world)
        empty(self._memory)
        self.buffers = Buffers(
            pointers=torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=self.device),
            state=empty_state(self.device),
            rank=self.shard.rank,
            size=self.shard.size,
            num_words=num_words,
            max_programs=torch.cuda.get_device_properties(self.device).multi_processor_count,
        )
        torch.cuda.synchronize(self.device)
        dist.barrier()  # no rank may send before all have initialized their buffers

    def all_reduce(self, part: Tensor) -> Tensor:
        total = self._reduced(part, None)
        return self.all_reduce_nccl(part) if total is None else total[0]

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        quantized = empty_codes(part.shape[0], part.shape[1], quantize, self.device) if quantize else None
        reduced = self._reduced(part, (residual_TD, weight_D, eps), quantized)
        if reduced is None:
            return add_and_norm(self.all_reduce_nccl(summed(part)), residual_TD, weight_D, eps, quantize=quantize)
        return *reduced, quantized

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        if self.buffers is not None:
            from glm5.kernels.all_reduce.triton_sharded import add_rms_norm_sharded, can_shard

            if can_shard(self.buffers, part):
                quantized = empty_codes(len(residual_OD), part.shape[1], quantize, self.device) if quantize else None
                return *add_rms_norm_sharded(self.buffers, part, (residual_OD, weight_D, eps), quantized), quantized
        new_OD = self._sharded_nccl(summed(part)).view_as(residual_OD)
        return add_and_norm(new_OD, residual_OD, weight_D, eps, quantize=quantize)

    def all_gather(self, part: Tensor) -> Tensor:
        if self.buffers is not None and _has_words(part):
            from glm5.kernels.all_reduce import triton, triton_sharded

            out = triton.gather(self.buffers, part)
            if out is None:
                out = triton_sharded.gather(self.buffers, part.contiguous().view(-1))[0].view(-1, *part.shape)
            return out
        part = part.contiguous()
        out = torch.empty((self.shard.size, *part.shape), dtype=part.dtype, device=part.device)
        if part.numel():
            dist.all_gather_into_tensor(out.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8))
        return out

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        if self.buffers is None or not all(map(_has_words, parts)):
            return rows_of(self, parts)
        from glm5.kernels.all_reduce.triton_sharded import gather

        return gather(self.buffers, *parts)

    def _reduced(
        self,
        part: Tensor | ExpertOutputs,
        norm: tuple[Tensor, Tensor, float] | None,
        quantized: Quantized | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """(out, sum) through symmetric memory; None if it is not available for this part."""
        if self.buffers is None or not math.prod(part.shape):
            return None
        from glm5.kernels.all_reduce.triton import fits, one_shot, two_shot

        num_rows, num_bytes = part.shape[0], math.prod(part.shape) * part.dtype.itemsize
        is_short = num_bytes * (self.shard.size - 1) <= ONE_SHOT_BYTES
        if is_short and fits(self.buffers, part, num_rows, two_shot=False):
            return one_shot(self.buffers, summed(part), norm, quantized=quantized)
        max_rows = max(1, TWO_SHOT_BYTES // (num_bytes // num_rows))
        if not fits(self.buffers, part, min(num_rows, max_rows), two_shot=True):
            return None
        return two_shot(self.buffers, part, norm, max_rows=max_rows, quantized=quantized)

    def all_reduce_nccl(self, part: Tensor) -> Tensor:
        """All-reduce of any size without symmetric memory."""
        size, count = self.shard.size, part.numel()
        flat = part.reshape(-1)
        if count % size:
            flat = torch.nn.functional.pad(flat, (0, -count % size))
        total = torch.empty_like(flat)
        dist.all_gather_into_tensor(total, self._sharded_nccl(flat))
        return total[:count].view(part.shape)

    def _sharded_nccl(self, part: Tensor) -> Tensor:
        """Reduce-scatter: this rank's share of the sum, flat."""
        part = part.contiguous().view(self.shard.size, -1)
        parts = torch.empty_like(part)
        dist.all_to_all_single(parts, part)
        return all_reduce_reference(parts)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)

    def close(self) -> None:
        dist.destroy_process_group()


def _has_words(part: Tensor) -> bool:
    """Whether its size is a nonzero multiple of 4 bytes, as the kernels need."""
    return part.numel() > 0 and part.numel() * part.element_size() % 4 == 0
