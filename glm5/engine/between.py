"""What stands between the blocks of a layer: residual add and norm, and which rows of a step a rank has meanwhile.

    Whole    every rank has all rows; what is new is added up over ranks for all of them
    Dealt    prompts of ranks that share a model: rank r has the r-th of equal shares. What is new is added up where it
             belongs, and what every rank would compute alike (norm, products with weights that all of them hold,
             router) is computed once. Then rows are gathered, as narrow as they ever are: latents and index keys
             before attention, FP8 with scales and choices before experts

Both give every rank the same bits. Of 2,048 rows of GLM-5, each of eight ranks sends 44 MB a sum; dealt, 22 MB and then
9 to 11 (docs/performance.md).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from glm5.engine.stack import Rows
from glm5.kernels.grouped_experts.terms import Terms, summed
from glm5.kernels.row_codes import Kind
from glm5.kernels.triton_support import chosen
from glm5.model.norm import RMSNorm
from glm5.parallel.group import Group

MIN_DEALT_ROWS = 512  # fewer are a matter of latency, of which gathering has its own


class Between(Protocol):
    def mine(self, x_TD: Tensor) -> Tensor:
        """Of rows that every rank has, those that this one goes on with: [O, D]."""
        ...

    def join(self, new: Tensor | Terms, residual_OD: Tensor, norm: RMSNorm, kind: Kind | None) -> tuple[Rows, Tensor]:
        """Add what is new, of which each rank has a part, to the residual stream: (normed rows [O, D], the stream).
        Terms of experts are added up first, and their memory is given back.

        `kind`: of the codes that rows come with.
        """
        ...

    def whole(self, x_OY: Tensor) -> Tensor:
        """All ranks' rows, [T, Y]."""
        ...

    def gathered(self, x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
        """The same of rows and what belongs to them, of 4 bytes each. Of quantized rows, products get what they
        read."""
        ...


class Whole:
    """All rows on every rank of `group`."""

    def __init__(self, group: Group):
        self.group = group

    def mine(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def join(self, new: Tensor | Terms, residual_OD: Tensor, norm: RMSNorm, kind: Kind | None) -> tuple[Rows, Tensor]:
        new_TD = summed(new)
        if isinstance(new, Terms):
            new.release()
        if kind is None:
            x_TD, total_TD = self.group.add_rms_norm(new_TD, residual_OD, norm.weight, norm.eps)
            return Rows(x_TD), total_TD
        x_TD, total_TD, data, scale = self.group.add_rms_norm_quantized(
            new_TD, residual_OD, norm.weight, norm.eps, kind
        )
        return Rows(x_TD, (data, scale)), total_TD

    def whole(self, x_OY: Tensor) -> Tensor:
        return x_OY

    def gathered(self, x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
        return x, *more


class Dealt:
    """A share of the rows on each rank of `group`, which divides their number."""

    def __init__(self, group: Group):
        self.group = group

    def mine(self, x_TD: Tensor) -> Tensor:
        rank, size = self.group.shard
        return x_TD.unflatten(0, (size, -1))[rank]

    def join(self, new: Tensor | Terms, residual_OD: Tensor, norm: RMSNorm, kind: Kind | None) -> tuple[Rows, Tensor]:
        given = residual_OD, norm.weight, norm.eps
        x_OD, total_OD, quantized = self.group.add_rms_norm_dealt(new, *given, quantize=kind)
        if isinstance(new, Terms):
            new.release()
        return Rows(x_OD, quantized), total_OD

    def whole(self, x_OY: Tensor) -> Tensor:
        return self.group.all_gather(x_OY).flatten(0, 1)

    def gathered(self, x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
        return unpacked([self.whole(part) for part in packed(x, *more)], x, *more)


def packed(x: Rows, *more: Tensor) -> list[Tensor]:
    """Rows and what belongs to them as the tensors that are exchanged, one row of each for a row."""
    if x.quantized is None:
        return [x.x_TD, *more]
    data, scale = x.quantized
    words = torch.cat([each.view(torch.int32) for each in (scale.view(len(scale), -1), *more)], dim=1)
    # Where kernels read the codes, something of x's shape and dtype stands in for it.
    return [data, words] if chosen(x.x_TD) else [data, words, x.x_TD]


def unpacked(parts: Sequence[Tensor], x: Rows, *more: Tensor) -> tuple[Rows, *tuple[Tensor, ...]]:
    """`packed` undone, of any number of rows; x and more: some of those that were packed."""
    if x.quantized is None:
        return Rows(parts[0]), *parts[1:]
    data, words_TY, *read = parts
    scale = x.quantized[1]
    beside = scale.view(len(scale), -1), *more
    words = words_TY.split([each.view(torch.int32).shape[1] for each in beside], dim=1)
    scale_TB, *rest = (part.view(each.dtype) for part, each in zip(words, beside, strict=True))
    scale_TB = scale_TB if scale.dim() == 2 else scale_TB.flatten().contiguous()
    x_TD = read[0] if read else x.x_TD.new_empty(len(words_TY), x.x_TD.shape[1])
    return Rows(x_TD, (data, scale_TB)), *rest


def between_of(group: Group, num_rows: int) -> Between:
    """What suits a step of so many rows."""
    size = group.shard.size
    return Dealt(group) if size > 1 and num_rows >= MIN_DEALT_ROWS and not num_rows % size else Whole(group)
