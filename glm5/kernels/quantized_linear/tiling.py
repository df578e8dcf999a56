"""Tile sizes of quantized_linear by implementation, with measured ones."""

from typing import NamedTuple

from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat


class Tiling(NamedTuple):
    """Triton: rows and columns of a tile, inputs of an MMA step, MMA steps of a loop iteration, pipeline stages, warps,
    and split-K. CUDA C++: only the cluster size."""

    block_o: int = 64
    block_t: int = 16
    block_k: int = 128
    parts: int = 1
    stages: int = 4
    warps: int = 4
    split: int = 1
    cluster: int = 0


def sizes_of(weight_format: WeightFormat, rows: int, width: int) -> str:
    """The key of a weight in `kernels/tuned`."""
    return f"{weight_format} O={rows} D={width}"


def measured_for(x_TD: Tensor, weight: QuantizedWeight) -> Tiling | None:
    """What was fastest on this GPU; None if nothing was measured."""
    sizes = sizes_of(weight.format, len(weight.codes), weight.width)
    return tuned.find(Tiling, "quantized_linear", sizes, len(x_TD), x_TD.device)


def tiling_for(num_tokens: int, rows: int) -> Tiling:
    """Triton's default without an entry in `kernels/tuned`. Not measured."""
    if num_tokens <= 16:
        return Tiling(block_o=64 if rows >= 8192 else 32)
    if num_tokens <= 64:
        return Tiling(block_o=64, block_t=1 << (num_tokens - 1).bit_length())
    return Tiling(block_o=128, block_t=128, stages=3, warps=8)
