"""Results that do not depend on the batch, bit for bit: what the `invariant` implementations rest on.

In deterministic mode a model runs on passes of exactly PASS_ROWS rows, so that nearly every operation has one shape
whatever the batch. A matmul of one shape computes its rows alike: measured with MKL and oneDNN (float32, bfloat16,
float64; one and two threads; every width of tiny, nano and GLM-5) and on an H100, under the one condition that rows
begin at multiples of 16 bytes. So do norms, softmax and sums over the last dimension, and arithmetic and exp of single
elements. Three things remain, and have a fixed form of their own:

    sums over keys and rows per expert, whose number varies     `impl="invariant"` of index_score, sparse_mla,
                                                                grouped_experts: tiles of one shape
    sigmoid and silu on a CPU                                   here: torch rounds the last elements of a piece of
                                                                memory otherwise than those before them
"""

import torch
from torch import Tensor

# Microseconds for a decoding pass of nano in float32 on one core, MTP layer and head included, by rows of a pass:
#     rows     8    16    32    64
PASS_ROWS = 16
ALIGNMENT = 16  # bytes: the width of a row has to be a multiple, or rows of one matmul go different ways on a CPU


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32 inside (float64 stays float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), float32 inside (float64 stays float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)
