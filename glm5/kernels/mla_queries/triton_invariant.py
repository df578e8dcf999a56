"""mla_queries by Triton's kernel under the tiling for the rows of a pass, however many there are."""

import torch
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.invariant import PASS_ROWS_GPU
from glm5.kernels.mla_queries import triton


def mla_queries(q_THX: Tensor, w_HNC: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, early: Tensor | None = None) -> Tensor:
    """As `reference.mla_queries`; a row's result depends on no other."""
    return triton.mla_queries(q_THX, w_HNC, cos_TR2, sin_TR2, _tiling(*w_HNC.shape, q_THX.device), early)


def _tiling(H: int, N: int, C: int, device: torch.device) -> triton.Tiling:
    tiling = tuned.find(triton.Tiling, "mla_queries", f"H={H} N={N} C={C}", PASS_ROWS_GPU, device)
    # Not torch.bmm, whose order of sums is its own.
    return tiling if tiling is not None and tiling.outputs else triton.tiling_for(PASS_ROWS_GPU)
