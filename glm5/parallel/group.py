"""Groups of ranks that share a model, and their collectives.

    GlooGroup       processes on CPUs (gloo.py)
    CudaGroup       one process per GPU (cuda.py): symmetric memory with Triton kernels, else NCCL
    Alone           one rank

Collectives are deterministic, with the same bits on every rank. Decisions that follow from them (experts, keys, tokens)
are then equal on all ranks and need no broadcast.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from glm5.kernels.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from glm5.kernels.all_reduce import is_transposed
from glm5.kernels.all_reduce.part import PartialSum, summed
from glm5.kernels.grouped_experts.expert_outputs import ExpertOutputs
from glm5.kernels.row_codes import Kind, Quantized
from glm5.parallel.table import Shard


class Group(Protocol):
    """The collectives that modules, sampler and engine use. All ranks make the same calls in the same order."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`s, added in float32 at least, rounded once."""
        ...

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        """(out, sum, codes of out with `quantize`): `kernels.add_rms_norm` of the `all_reduce` of `part`. Expert
        outputs are summed over each token, too."""
        ...

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        """The same for this rank's rows only, the `rank`-th of `size` equal shares (reduce-scatter)."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' `part`s, [ranks, ...], in their order."""
        ...

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        """All ranks' rows of each of `parts` [rows, ...], in their order: [ranks x rows, ...]. A part with contiguous
        columns gives a result with contiguous columns."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Copy `x`, contiguous bytes, from the first rank, in place."""
        ...

    def close(self) -> None: ...


class Alone:
    """A group of one rank: nothing is exchanged."""

    shard = Shard()

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def add_rms_norm(
        self, part: Tensor | ExpertOutputs, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return add_and_norm(summed(part), residual_TD, weight_D, eps, quantize=quantize)

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return add_and_norm(summed(part), residual_OD, weight_D, eps, quantize=quantize)

    def all_gather(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        return parts

    def broadcast(self, x: Tensor) -> None:
        """Nothing to copy."""

    def close(self) -> None:
        """Nothing to close."""


ALONE: Group = Alone()


def add_and_norm(
    new_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
) -> tuple[Tensor, Tensor, Quantized | None]:
    """(out, sum, codes of out with `quantize`) of a reduced part."""
    if quantize is None:
        return *add_rms_norm(new_TD, residual_TD, weight_D, eps), None
    out_TD, total_TD, *quantized = add_rms_norm_quantized(new_TD, residual_TD, weight_D, eps, quantize)
    return out_TD, total_TD, (quantized[0], quantized[1])


def rows_of(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """`gather_rows` by one `all_gather` per part."""
    return [
        group.all_gather(part.T).transpose(0, 1).flatten(1).T
        if is_transposed(part)
        else group.all_gather(part).flatten(0, 1)
        for part in parts
    ]


def all_reduce_min(group: Group, numbers: Sequence[int], device: torch.device) -> list[int]:
    """The elementwise minimum over ranks."""
    return group.all_gather(torch.tensor(numbers, dtype=torch.int64, device=device)).amin(dim=0).tolist()
