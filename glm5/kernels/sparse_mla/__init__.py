"""Latent attention over the keys selected by an indexer."""

from typing import Any

import torch
from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import few_queries
from glm5.kernels.sparse_mla import cuda

_TRAINED_HEADS = 64  # that fit into a program
# Queries from which on it is faster; of fewer Triton's smaller programs begin sooner.
_CUDA, _FP8_CUDA = 24, 4
_MANY_HEADS, _MOST = 16, 512  # of so many heads in bfloat16, products of more queries take the time


def sparse_mla(
    q_THL: Tensor,
    latent_PZL: Pool,
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    value_dim: int,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over its selected visible keys (None: over all visible keys).

    `keys_TK`: logical keys, distinct within a row; -1 and keys >= end_T are ignored. Returns (out [T, H, value_dim] in
    q's dtype, lse [T, H] float32, natural log), differentiable in q and latent, except over FP8; a row with nothing to
    read gives zeros and -inf. `gather` (the reference) reads K latents per query; `chunked` is the same and gathers
    again for backward, which is for training at long contexts; `masked` multiplies with the whole context. `grouped`:
    for few queries of each of many requests, on a CPU; no gradient. `invariant`: gathers, for one T and K a row's
    result depends on its query and keys alone, bit for bit; no gradient, and `keys_TK` must be given;
    `invariant_triton`: the same on a GPU, by Triton's kernels. `triton`: on a GPU, up to float32; no gradient. `cuda`:
    on Hopper, for few heads and queries in bfloat16; no gradient.
    `trained`: on a GPU, up to 64 heads and float32, differentiable; what is gathered exists block by block only.
    """
    where = page_table_BN, row_T, end_T
    run = TABLE.module(impl, q_THL, latent_PZL, keys_TK, page_table_BN, end_T, value_dim).sparse_mla
    return run(q_THL, latent_PZL, keys_TK, *where, scale=scale, value_dim=value_dim)


def _fits_cuda(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, table_BN: Tensor, _: Tensor, value_dim: int):
    is_faster = len(q_THL) >= _FP8_CUDA
    if isinstance(latent_PZL, Tensor):
        is_faster = len(q_THL) >= _CUDA and (len(q_THL) <= _MOST or q_THL.shape[1] < _MANY_HEADS)
    return is_faster and not cuda.refusal(q_THL, latent_PZL, keys_TK, table_BN, value_dim)


def _fits_trained(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, *_: Any) -> bool:
    fits = q_THL.element_size() == 2 and q_THL.shape[1] <= _TRAINED_HEADS
    return fits and keys_TK is not None and isinstance(latent_PZL, Tensor)


def _fits_grouped(q_THL: Tensor, _: Pool, _keys_TK: Tensor | None, table_BN: Tensor, end_T: Tensor, *_given: int):
    return not torch.is_grad_enabled() and few_queries(table_BN, end_T, q_THL.shape[1])


def _fits_masked(q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, table_BN: Tensor, end_T: Tensor, *_: int):
    """Measured on one core (4 heads, latents of 80 values): with hundreds of queries a request, it wins up to 11 keys
    in context per key selected; with one query a request, up to 3."""
    if keys_TK is None:
        return True
    many_queries = q_THL.shape[0] >= 16 * table_BN.shape[0]
    num_keys = table_BN.shape[1] * latent_PZL.shape[1]
    if q_THL.is_cpu and len(end_T):
        # It goes request by request, so few long ones do not decide. Of a whole sequence, the mean is half.
        num_keys = min(num_keys, int(end_T.max()), int(end_T.float().mean()) * (2 if many_queries else 1))
    return num_keys <= (10 if many_queries else 3) * keys_TK.shape[1]


TABLE = Table(
    __name__,
    cuda=Impl("8 or 16 heads, and enough queries", on="hopper", when=_fits_cuda, gradient=False),
    triton=Impl("other numbers of heads and queries", on="triton", gradient=False),
    trained=Impl("16 bits", on="triton", when=_fits_trained, gradient=True, module="triton_trained"),
    grouped=Impl("few queries of each of many requests", on="cpu", when=_fits_grouped),
    masked=Impl("contexts a few times as long as selections", when=_fits_masked),
    chunked=Impl("gathers again for backward", gradient=True),
    gather=Impl("the definition", module="reference"),
    invariant=Impl("a result depends on its query and keys alone, bit for bit"),
    invariant_triton=Impl("the same on a GPU", on="triton", module="triton_invariant"),
)
