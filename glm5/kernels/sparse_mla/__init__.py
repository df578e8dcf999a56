"""Latent attention over the keys that an indexer picked."""

from typing import Literal

import torch
from torch import Tensor

from glm5.kernels import triton_support
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import few_queries
from glm5.kernels.sparse_mla import cuda
from glm5.kernels.sparse_mla.chunked import sparse_mla as _chunked
from glm5.kernels.sparse_mla.grouped import sparse_mla as _grouped
from glm5.kernels.sparse_mla.invariant import sparse_mla as _invariant
from glm5.kernels.sparse_mla.masked import sparse_mla as _masked
from glm5.kernels.sparse_mla.reference import sparse_mla as _gather

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
    impl: Literal["auto", "gather", "chunked", "masked", "grouped", "invariant", "triton", "cuda", "trained"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over its selected visible keys (None: over all visible keys).

    `keys_TK`: logical keys, distinct within a row; -1 and keys >= end_T are ignored. Returns (out [T, H, value_dim] in
    q's dtype, lse [T, H] float32, natural log), differentiable in q and latent, except over FP8; a row with nothing to
    read gives zeros and -inf. `gather` (the reference) reads K latents per query; `chunked` is the same and gathers
    again for backward, which is for training at long contexts; `masked` multiplies with the whole context. `grouped`:
    for few queries of each of many requests, on a CPU; no gradient. `invariant`: gathers, for one T and K a row's
    result depends on its query and keys alone, bit for bit; no gradient, and `keys_TK` must be given. `triton`: on a
    GPU, up to float32; no gradient. `cuda`: on Hopper, for few heads and queries in bfloat16; no gradient.
    `trained`: on a GPU, up to 64 heads and float32, differentiable; what is gathered exists block by block only.
    """
    if impl == "auto":
        impl = _cheaper(q_THL, latent_PZL, keys_TK, page_table_BN, end_T, value_dim)
    if impl == "gather":
        run = _gather
    elif impl == "chunked":
        run = _chunked
    elif impl == "masked":
        run = _masked
    elif impl == "grouped":
        run = _grouped
    elif impl == "invariant":
        run = _invariant
    elif impl == "triton":
        from glm5.kernels.sparse_mla.triton import sparse_mla as run
    elif impl == "cuda":
        run = cuda.sparse_mla
    elif impl == "trained":
        from glm5.kernels.sparse_mla.triton_trained import sparse_mla as run
    else:
        allowed = ("gather", "chunked", "masked", "grouped", "invariant", "triton", "cuda", "trained")
        raise unknown_impl("sparse_mla", impl, allowed)
    return run(q_THL, latent_PZL, keys_TK, page_table_BN, row_T, end_T, scale=scale, value_dim=value_dim)


def _cheaper(
    q_THL: Tensor, latent_PZL: Pool, keys_TK: Tensor | None, page_table_BN: Tensor, end_T: Tensor, value_dim: int
) -> Literal["gather", "chunked", "masked", "grouped", "triton", "cuda", "trained"]:
    """Which implementation is faster, from shapes; on a CPU also from the contexts' lengths.

    Measured on one core (4 heads, latents of 80 values): with hundreds of queries a request, `masked` wins up to 11
    keys in context per key selected; with one query a request, up to 3.
    """
    if triton_support.chosen(q_THL, *(() if isinstance(latent_PZL, tuple) else (latent_PZL,))):
        num_queries = len(q_THL)
        is_faster = num_queries >= _FP8_CUDA
        if isinstance(latent_PZL, Tensor):
            is_faster = num_queries >= _CUDA and (num_queries <= _MOST or q_THL.shape[1] < _MANY_HEADS)
        refused = not is_faster or cuda.refusal(q_THL, latent_PZL, keys_TK, page_table_BN, value_dim)
        return "triton" if refused else "cuda"
    is_trained = q_THL.element_size() == 2 and q_THL.shape[1] <= _TRAINED_HEADS and keys_TK is not None
    if is_trained and isinstance(latent_PZL, Tensor) and triton_support.runs_on(q_THL, latent_PZL):
        return "trained"
    crowded = q_THL.shape[0] >= 16 * page_table_BN.shape[0]
    if not torch.is_grad_enabled() and few_queries(page_table_BN, end_T, q_THL.shape[1]):
        return "grouped"
    if keys_TK is None:
        return "masked"
    num_keys = page_table_BN.shape[1] * latent_PZL.shape[1]
    if q_THL.device.type == "cpu" and len(end_T):
        # `masked` goes request by request, so few long ones do not decide. Of a whole sequence, the mean is half.
        num_keys = min(num_keys, int(end_T.max()), int(end_T.float().mean()) * (2 if crowded else 1))
    if num_keys <= (10 if crowded else 3) * keys_TK.shape[1]:
        return "masked"
    learns = (
        torch.is_grad_enabled() and isinstance(latent_PZL, Tensor) and (q_THL.requires_grad or latent_PZL.requires_grad)
    )
    return "chunked" if learns else "gather"
