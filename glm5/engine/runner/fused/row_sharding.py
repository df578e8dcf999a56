"""Between the blocks of a layer: residual add and norm, and which rows of a step each rank has meanwhile.

    ReplicatedRows    every rank has all rows; outputs of a block are all-reduced
    ShardedRows       for long prompts with tensor parallelism: rank r has the r-th of equal shards. Outputs of a block
                      are reduce-scattered. What every rank would compute alike (norm, products with replicated
                      weights, router, selection of keys) is computed for one shard only. Rows are all-gathered where
                      they are narrowest: latents and index keys before attention, the selected keys, FP8 codes with
                      scales and chosen experts before the experts

Both give every rank the same bits. For 2,048 rows of GLM-5, each of eight ranks sends 44 MB in an all-reduce; sharded,
22 MB and then 9 to 11 (docs/performance-steps.md).
"""

from typing import Protocol

from torch import Tensor

from glm5.engine.runner.fused.fused_linear import AnyLinear, Rows, product
from glm5.kernels.all_reduce.part import PartialSum, computed
from glm5.kernels.fp8_linear.pending import PendingLinear
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.row_codes import Kind, Quantized
from glm5.kernels.triton_support import chosen
from glm5.model.linear import BlockScaledLinear
from glm5.model.norm import RMSNorm
from glm5.parallel.group import Group
from glm5.parallel.table import UNSHARDED, Shard

MIN_SHARDED_ROWS = 512  # below, latency dominates, and gathering adds its own


class RowSharding(Protocol):
    shard: Shard
    """This rank, and the number of ranks with a shard of the rows."""

    def shard_rows(self, x_TD: Tensor) -> Tensor:
        """This rank's shard of rows that every rank has: [O, D]."""
        ...

    def product(self, rows: Rows, linear: AnyLinear) -> Tensor | PendingLinear:
        """Apply `linear` to rows that every rank has; the result is an input of `reduce_add_norm`."""
        ...

    def reduce_add_norm(
        self, new: PartialSum, residual_TD: Tensor, norm: RMSNorm, kind: Kind | None
    ) -> tuple[Rows, Tensor]:
        """Sum `new` over ranks and add it to the residual stream: (normed rows [O, D], the stream). Terms of experts
        are added up first, and their memory is released.

        `kind`: how to quantize the normed rows.
        """
        ...

    def gather_rows(self, x_TO: Tensor) -> Tensor:
        """All-gather rows: [T, O]."""
        ...

    def gather_inputs(self, x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
        """All-gather rows and further tensors of them. For quantized rows, only what the kernels read is gathered."""
        ...


class ReplicatedRows:
    """All rows on every rank of `group`."""

    shard = UNSHARDED

    def __init__(self, group: Group):
        self.group = group

    def shard_rows(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def product(self, rows: Rows, linear: AnyLinear) -> Tensor | PendingLinear:
        return product(rows, linear)

    def reduce_add_norm(
        self, new: PartialSum, residual_TD: Tensor, norm: RMSNorm, kind: Kind | None
    ) -> tuple[Rows, Tensor]:
        joined = self.group.add_rms_norm(computed(new), residual_TD, norm.weight, norm.eps, quantize=kind)
        return _released(new, *joined)

    def gather_rows(self, x_TO: Tensor) -> Tensor:
        return x_TO

    def gather_inputs(self, x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
        return x, *more


class ShardedRows:
    """An equal shard of the rows on each rank of `group`. The number of rows must be divisible by the ranks."""

    def __init__(self, group: Group):
        self.group, self.shard = group, group.shard

    def shard_rows(self, x_TD: Tensor) -> Tensor:
        rank, size = self.shard
        return x_TD.unflatten(0, (size, -1))[rank]

    def product(self, rows: Rows, linear: AnyLinear) -> Tensor | PendingLinear:
        if not isinstance(linear, BlockScaledLinear):
            return product(rows, linear)
        return PendingLinear(rows.x_TD, linear.block_scaled, rows.codes_for(linear))

    def reduce_add_norm(
        self, new: PartialSum, residual_TD: Tensor, norm: RMSNorm, kind: Kind | None
    ) -> tuple[Rows, Tensor]:
        joined = self.group.add_rms_norm_sharded(new, residual_TD, norm.weight, norm.eps, quantize=kind)
        return _released(new, *joined)

    def gather_rows(self, x_TO: Tensor) -> Tensor:
        return self.group.all_gather(x_TO).flatten(0, 1)

    def gather_inputs(self, x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
        if x.quantized is None:
            x_TD, *rest = self.group.gather_rows(x.x_TD, *more)
            return Rows(x_TD), *rest
        data, scale, *rest = self.group.gather_rows(*x.quantized, *more)
        # If kernels read the codes, an uninitialized tensor of x's shape and dtype replaces x.
        is_read = not chosen(x.x_TD)
        x_TD = self.gather_rows(x.x_TD) if is_read else x.x_TD.new_empty(data.shape)
        return Rows(x_TD, (data, scale)), *rest


def _released(new: PartialSum, x_TD: Tensor, total_TD: Tensor, quantized: Quantized | None) -> tuple[Rows, Tensor]:
    """The result of `reduce_add_norm`, after the memory of `new` is released."""
    if isinstance(new, ExpertOutputs):
        new.release()
    return Rows(x_TD, quantized), total_TD


def row_sharding_of(group: Group, num_rows: int) -> RowSharding:
    """The faster sharding for a step of `num_rows` rows."""
    size = group.shard.size
    is_sharded = size > 1 and num_rows >= MIN_SHARDED_ROWS and not num_rows % size
    return ShardedRows(group) if is_sharded else ReplicatedRows(group)
