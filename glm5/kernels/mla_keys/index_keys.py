"""An indexer's part in `mla_keys`."""

from typing import NamedTuple

from torch import Tensor

from glm5.kernels.fp8_pool import Pool


class IndexKeys(NamedTuple):
    """`x_TI` [T, I], the product of the layer's input with wk (rows may be a piece of longer ones); LayerNorm's weight
    and bias, [I]; its eps; and the pool that keys go to. The first R of their I dimensions are rotated."""

    x_TI: Tensor
    weight_I: Tensor
    bias_I: Tensor
    eps: float
    pool_PZI: Pool
