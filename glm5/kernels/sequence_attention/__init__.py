"""Causal attention within each of the sequences that a training pass packs, over keys and values of every head."""

from typing import Literal

import torch
from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.sequence_attention.flash import MAX_WIDTH
from glm5.kernels.sequence_attention.flash import sequence_attention as _flash
from glm5.kernels.sequence_attention.reference import sequence_attention as _reference


def sequence_attention(
    q_THX: Tensor,
    k_THX: Tensor,
    v_THV: Tensor,
    lengths: list[int],
    *,
    scale: float,
    impl: Literal["auto", "reference", "flash"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] float32, natural log): token t sees its own sequence up to itself.

    Sequences of `lengths` tokens lie one after the other. Differentiable in q, k and v through `out`. `flash`: on a
    GPU, 16 bits, heads of up to 256 values; deterministic where torch is asked to be.
    """
    if impl == "auto":
        impl = "flash" if fits(q_THX, v_THV.shape[-1]) else "reference"
    if impl == "flash":
        return _flash(q_THX, k_THX, v_THV, lengths, scale=scale)
    if impl == "reference":
        return _reference(q_THX, k_THX, v_THV, lengths, scale=scale)
    raise unknown_impl("sequence_attention", impl, ("reference", "flash"))


def fits(q_THX: Tensor, value_width: int) -> bool:
    """Whether `flash` takes these queries, and values of this width."""
    is_half = q_THX.dtype in (torch.bfloat16, torch.float16)
    return q_THX.is_cuda and is_half and max(q_THX.shape[-1], value_width) <= MAX_WIDTH
