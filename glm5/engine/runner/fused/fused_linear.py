"""Linear layers of one input as one matrix product: their weights become views of one contiguous tensor.

So no weight is stored twice, and weights that are replaced in place are replaced here too. Adjacent layers of one kind
are joined: FP8 layers if the first one's rows fill whole scale blocks, integer codes if their format is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK, BlockScaled, num_blocks
from glm5.kernels.fp8_linear import few_rows, fp8_linear
from glm5.kernels.quantized_linear import quantized_linear
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.row_codes import DTYPES, Kind, Quantized
from glm5.model.linear import BlockScaledLinear, Linear, QuantizedLinear

AnyLinear = Linear | BlockScaledLinear | QuantizedLinear


@dataclass(frozen=True)
class Rows:
    """Rows of activations, and their quantized codes if products read those (`FusedLinear.wants`)."""

    x_TD: Tensor
    quantized: Quantized | None = None

    def codes_for(self, linear: AnyLinear) -> Quantized | None:
        """The rows as `linear` would quantize them, if present."""
        kind = _kind_of(linear)
        is_there = self.quantized is not None and kind is not None and self.quantized[0].dtype == DTYPES[kind]
        return self.quantized if is_there else None


class FusedLinear:
    """`linears` with stacked weights. A call returns the concatenated outputs of consecutive ones: [T, sum of O]."""

    def __init__(self, linears: Sequence[AnyLinear]):
        self.linears = list(linears)
        self.rows = [linear.weight.shape[0] for linear in self.linears]
        self.runs = [range(len(self.linears))[:1]]
        for i in range(1, len(self.linears)):
            if _continues(self.linears[i - 1], self.linears[i]):
                self.runs[-1] = range(self.runs[-1].start, i + 1)
            else:
                self.runs.append(range(i, i + 1))
        self.join()

    @property
    def place(self) -> tuple[int, ...]:
        """The weights' addresses, which captured graphs contain."""
        return tuple(tensor.data_ptr() for linear in self.linears for tensor in _tensors(linear))

    def wants(self, num_rows: int) -> Kind | None:
        """How `num_rows` rows should be quantized in advance, so that no product has to do it."""
        return wanted(self.linears, num_rows)

    def join(self) -> None:
        """Make the weights of each run contiguous, unless they are already."""
        for run in self.runs:
            for tensors in zip(*(_tensors(self.linears[i]) for i in run), strict=True):
                if _in_one_piece(tensors):
                    continue
                with torch.inference_mode(mode=False), torch.no_grad():
                    joined = torch.cat([tensor.data for tensor in tensors])
                    for tensor, part in zip(tensors, joined.split([len(each) for each in tensors]), strict=True):
                        tensor.data = part

    def __call__(self, rows: Rows, start: int = 0, stop: int | None = None) -> Tensor:
        """Outputs of the linears `start` to `stop` - 1."""
        stop = len(self.linears) if stop is None else stop
        parts = [range(max(run.start, start), min(run.stop, stop)) for run in self.runs]
        outs = [self._product(rows, part) for part in parts if part]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def _product(self, rows: Rows, part: range) -> Tensor:
        """Outputs of a part of a run."""
        first, count = self.linears[part.start], sum(self.rows[part.start : part.stop])
        if len(part) == 1:
            return product(rows, first)
        weight = _piece(first.weight, count)
        match first:
            case Linear():
                return first.product(rows.x_TD, weight)
            case QuantizedLinear():
                quantized = QuantizedWeight(weight, _piece(first.weight_scale, count), first.format)
                return quantized_linear(rows.x_TD, quantized, rows.codes_for(first))
            case BlockScaledLinear():
                scale = _piece(first.weight_scale_inv, num_blocks(count))
                return fp8_linear(rows.x_TD, BlockScaled(weight, scale), rows.codes_for(first))


def _continues(before: AnyLinear, linear: AnyLinear) -> bool:
    """Whether one product can compute both."""
    match before, linear:
        case Linear(), Linear():
            return True
        case QuantizedLinear(), QuantizedLinear():
            return before.format == linear.format
        case BlockScaledLinear(), BlockScaledLinear():
            return before.weight.shape[0] % BLOCK == 0
        case _:
            return False


def product(rows: Rows, linear: AnyLinear) -> Tensor:
    """Apply `linear` to rows that may be quantized already."""
    match linear:
        case BlockScaledLinear():
            return fp8_linear(rows.x_TD, linear.block_scaled, rows.codes_for(linear))
        case QuantizedLinear():
            return quantized_linear(rows.x_TD, linear.quantized_weight, rows.codes_for(linear))
        case _:
            return linear(rows.x_TD)


def wanted(linears: Sequence[AnyLinear], num_rows: int) -> Kind | None:
    """How `num_rows` rows should be quantized for products with `linears`; None for not at all."""
    kinds = {_kind_of(linear) for linear in linears}
    if kinds == {"blocks"}:
        return "blocks" if num_rows > few_rows(linears[0].weight.device) else None
    return "int8" if "int8" in kinds else None


def _kind_of(linear: AnyLinear) -> Kind | None:
    match linear:
        case BlockScaledLinear():
            return "blocks"
        case QuantizedLinear() if (linear.format.weight, linear.format.act) == ("int8", "int8"):
            return "int8"
        case _:
            return None


def _tensors(linear: AnyLinear) -> tuple[Tensor, ...]:
    match linear:
        case Linear():
            return (linear.weight,)
        case QuantizedLinear():
            return linear.weight, linear.weight_scale
        case BlockScaledLinear():
            return linear.weight, linear.weight_scale_inv


def _in_one_piece(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins where the previous one ends."""
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
    same = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    return same and all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))


def _piece(first: Tensor, num_rows: int) -> Tensor:
    """A view of `num_rows` rows from the start of `first`, reaching into the weights that follow it."""
    data = first.data
    return data.as_strided((num_rows, data.shape[1]), data.stride())
