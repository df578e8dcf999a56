"""Ranks that compute one model together, and what they exchange: sums and gathered rows, in a fixed order.

    GlooGroup       processes on CPUs (gloo.py): rows are gathered, and every rank adds them up in the order of ranks
    CudaGroup       one process a GPU (cuda.py): symmetric memory and kernels of our own, else NCCL
    Alone           one rank

Every rank gets the same bits, and the same bits again for the same rows: what follows from them (which experts, which
keys, which token) is then the same everywhere, and need not be broadcast.
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

    def broadcast(self, x: Tensor) -> None:
        """Make `x`, of bytes in one piece, what it is on the first rank."""
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
        return joined(summed(part), residual_TD, weight_D, eps, quantize=quantize)

    def add_rms_norm_sharded(
        self, part: PartialSum, residual_OD: Tensor, weight_D: Tensor, eps: float, *, quantize: Kind | None
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        return joined(summed(part), residual_OD, weight_D, eps, quantize=quantize)

    def all_gather(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def gather_rows(self, *parts: Tensor) -> Sequence[Tensor]:
        return parts

    def broadcast(self, x: Tensor) -> None:
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
        if is_transposed(part)
        else group.all_gather(part).flatten(0, 1)
        for part in parts
    ]


def all_reduce_min(group: Group, numbers: Sequence[int], device: torch.device) -> list[int]:
    """The smallest of all ranks' numbers, one by one."""
    return group.all_gather(torch.tensor(numbers, dtype=torch.int64, device=device)).amin(dim=0).tolist()
