"""Optional outputs of `mla_keys`: an indexer's keys and head weights, and unquantized latents."""

from typing import NamedTuple

from torch import Tensor

from glm5.kernels.fp8_pool import Pool


class HeadWeights(NamedTuple):
    """`x_TD`, the layer's input, times the transpose of `weight_JD` is written to `out_TJ`. For a few tokens."""

    x_TD: Tensor
    weight_JD: Tensor
    out_TJ: Tensor


class PlainLatents(NamedTuple):
    """Buffers for each token's normed latent and its rotated part, in the dtype of `qkv_TY`."""

    kv_TC: Tensor
    rope_TR: Tensor


class IndexKeys(NamedTuple):
    """`x_TI` [T, I], the product of the layer's input with wk (rows may be a piece of longer ones); LayerNorm's weight
    and bias, [I]; its eps; and the pool that keys go to. The first R of their I dimensions are rotated.

    `heads`: weights of index heads, computed along the way.
    """

    x_TI: Tensor
    weight_I: Tensor
    bias_I: Tensor
    eps: float
    pool_PZI: Pool
    heads: HeadWeights | None = None
