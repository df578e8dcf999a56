"""Linear layers of one input as one product: their weights move into one piece of memory, of which each has a view.

So nothing is held twice, and weights that are replaced in place are replaced here too. FP8 weights have a grid of
scales, which can be joined where every weight but the last ends with a block; others, and weights as codes, are
multiplied one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.block_scaled import BLOCK, BlockScaled, num_blocks
from glm5.kernels.fp8_linear import fp8_linear
from glm5.model.linear import BlockScaledLinear, CodedLinear, Linear

AnyLinear = Linear | BlockScaledLinear | CodedLinear


@dataclass(frozen=True)
class Rows:
    """Rows of activations, and what `act_quant` makes of them where products in FP8 read it."""

    x_TD: Tensor
    quantized: tuple[Tensor, Tensor] | None = None


class Stack:
    """`linears`, one above the other. Calling it gives the outputs of a run of them side by side: [T, sum of O]."""

    def __init__(self, linears: Sequence[AnyLinear]):
        self.linears = list(linears)
        self.rows = [linear.weight.shape[0] for linear in self.linears]
        self.is_fp8 = all(isinstance(linear, BlockScaledLinear) for linear in self.linears)
        is_plain = all(isinstance(linear, Linear) for linear in self.linears)
        self.is_joined = is_plain or (self.is_fp8 and not any(count % BLOCK for count in self.rows[:-1]))
        self.join()

    @property
    def place(self) -> tuple[int, ...]:
        """Where the weights lie: what a captured graph depends on."""
        return tuple(tensor.data_ptr() for linear in self.linears for tensor in _tensors(linear))

    def join(self) -> None:
        """Put the weights into one piece, unless they are in one already."""
        if len(self.linears) < 2 or not self.is_joined:
            return
        for tensors in zip(*map(_tensors, self.linears), strict=True):
            if _in_one_piece(tensors):
                continue
            with torch.inference_mode(mode=False), torch.no_grad():
                whole = torch.cat([tensor.data for tensor in tensors])
                for tensor, part in zip(tensors, whole.split([len(each) for each in tensors]), strict=True):
                    tensor.data = part

    def __call__(self, rows: Rows, start: int = 0, stop: int | None = None) -> Tensor:
        """Of the linears `start` to `stop`."""
        chosen = self.linears[start:stop]
        if len(chosen) == 1:
            return product(rows, chosen[0])
        if not self.is_joined:
            return torch.cat([product(rows, linear) for linear in chosen], dim=-1)
        first, count = chosen[0], sum(self.rows[start:stop])
        weight = _piece(first.weight, count)
        if isinstance(first, Linear):
            return F.linear(rows.x_TD, weight)
        assert isinstance(first, BlockScaledLinear), f"{type(first)=}"
        scale = _piece(first.weight_scale_inv, num_blocks(count))
        return fp8_linear(rows.x_TD, BlockScaled(weight, scale), rows.quantized)


def product(rows: Rows, linear: AnyLinear) -> Tensor:
    """`linear` of rows that may be quantized already."""
    if isinstance(linear, BlockScaledLinear):
        return fp8_linear(rows.x_TD, BlockScaled(linear.weight, linear.weight_scale_inv), rows.quantized)
    return linear(rows.x_TD)


def _tensors(linear: AnyLinear) -> tuple[Tensor, ...]:
    return (linear.weight, linear.weight_scale_inv) if isinstance(linear, BlockScaledLinear) else (linear.weight,)


def _in_one_piece(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before it ends."""
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
    same = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    return same and all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))


def _piece(first: Tensor, num_rows: int) -> Tensor:
    """`num_rows` rows that begin with those of `first`, which the following weights continue."""
    data = first.data
    return data.as_strided((num_rows, data.shape[1]), data.stride())
