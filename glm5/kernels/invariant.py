"""Batch invariance, bit for bit: the assumptions of the `invariant` implementations.

In deterministic mode a model runs on passes of exactly `pass_rows` rows, so nearly every operation has one shape,
whatever the batch. Then a matmul computes all of its rows alike, if they begin at multiples of 16 bytes and if their
number leaves no implementation a remainder: MKL adds up the last 8 of 32 in another order with AVX2, where it takes 24
at a time, and rows of 4 with SSE. 24 rows are alike with SSE, AVX2 and AVX-512, with one thread and with two
(test_invariant.py; cuBLAS measured on an H100). So are norms, softmax, sums over the last dimension, and arithmetic and
exp of single elements. The rest has separate implementations:

    sums over keys, rows of an expert     tiles of one shape: `impl="invariant"` of index_score, sparse_mla,
                                          grouped_experts; `invariant_triton`: Triton's kernels under one tiling,
                                          those over plain weights for any number of rows (row_linear)
    sigmoid, silu on a CPU                below: torch computes the last elements of a piece of memory, or of a
                                          thread's share of it, otherwise than those before them

All of it holds for one number of threads; with another, MKL may divide a product otherwise. With AVX2 and three threads
or more some products leave a thread such a remainder: `has_alike_rows` finds them.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.dispatch import forward_only, machine_of

# Rows of a pass. Milliseconds of a step of nano (all layers, head, MTP layer; float32, one core, contexts of 200):
#
#     rows of a pass             8     16     32     64      one pass of any size, default implementations
#     1 row                      7.0    7.2    8.1    9.9        5.3
#     32 rows                   27.2   15.4    9.8   11.0        9.3
#     a prompt of 256          198.0  104.8   59.5   38.8       21.1
PASS_ROWS = 24
_TILE_ROWS_GPU = 8
PASS_ROWS_GPU = 128  # 251 of 256 experts are read once for as many rows, where 32 read 163 (docs/numerics.md)
WIDTH_UNIT = 4  # values: 16 bytes in float32

Impl = Literal["auto", "invariant", "invariant_triton"]  # what the seams of a model and of a cache ask kernels for


def impl_on(device: torch.device, dtype: torch.dtype) -> Impl:
    """The implementations of deterministic mode there, for ops that have both."""
    return "invariant_triton" if "triton" in machine_of(device, dtype) else "invariant"


def pass_rows(device: torch.device) -> int:
    """Rows of a pass on this device."""
    return PASS_ROWS if device.type == "cpu" else PASS_ROWS_GPU


def tile_rows(device: torch.device) -> int:
    """Rows of an expert in one product on this device."""
    return PASS_ROWS if device.type == "cpu" else _TILE_ROWS_GPU


def has_alike_rows(weight_OI: Tensor) -> bool:
    """Whether this processor, with as many threads as there are now, computes all rows of a pass times `weight_OI`
    alike. On a CPU."""
    gen = torch.Generator().manual_seed(0)
    row_I = torch.randn(weight_OI.shape[1], generator=gen).to(weight_OI.dtype)
    out_RO = F.linear(row_I.expand(PASS_ROWS, -1).contiguous(), weight_OI)
    return torch.equal(out_RO, out_RO[:1].expand_as(out_RO))


@forward_only("sigmoid[invariant]")
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32 inside (float64 stays float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


@forward_only("silu[invariant]")
def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), float32 inside (float64 stays float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)
