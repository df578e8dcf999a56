"""pool[slot_T // Z, slot_T % Z] = row_TX, rounded to the pool's format (fp8_pool.py)."""

import torch
from torch import Tensor

from glm5.kernels.dispatch import without_gradient
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, Pool, quantize_keys, quantize_latents


@without_gradient
def store_rows(pool_PZX: Pool, slot_T: Tensor, row_TX: Tensor) -> None:
    """Write one row per slot."""
    page_size = pool_PZX.shape[1]
    where = slot_T // page_size, slot_T % page_size
    if isinstance(pool_PZX, Fp8Keys):
        data_TI, scale_T = quantize_keys(row_TX)
        pool_PZX.data.view(torch.uint8).index_put_(where, data_TI.view(torch.uint8))
        pool_PZX.scale.index_put_(where, scale_T)
    elif isinstance(pool_PZX, Fp8Latents):
        pool_PZX.row.index_put_(where, quantize_latents(row_TX, pool_PZX.format))
    else:
        pool_PZX.index_put_(where, row_TX.to(pool_PZX.dtype))
