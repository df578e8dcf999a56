"""Causal attention within each packed sequence of a training pass, with keys and values of every head."""

import torch
from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.sequence_attention.flash import MAX_WIDTH

TABLE = Table(
    __name__,
    flash=Impl("torch's fused attention, in 16 bits", on="gpu", when=lambda q_THX, v_THV: fits(q_THX, v_THV.shape[-1])),
    reference=Impl("the definition"),
)


def sequence_attention(
    q_THX: Tensor,
    k_THX: Tensor,
    v_THV: Tensor,
    lengths: list[int],
    *,
    scale: float,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] float32, natural log): token t sees its own sequence up to itself.

    Sequences of `lengths` tokens lie one after the other. Differentiable in q, k and v through `out`. `flash`: on a
    GPU, 16 bits, heads of up to 256 values; deterministic if torch's deterministic mode is on.
    """
    run = TABLE.module(impl, q_THX, v_THV).sequence_attention
    return run(q_THX, k_THX, v_THV, lengths, scale=scale)


def fits(q_THX: Tensor, value_width: int) -> bool:
    """Whether `flash` takes these queries, and values of this width."""
    is_half = q_THX.dtype in (torch.bfloat16, torch.float16)
    return q_THX.is_cuda and is_half and max(q_THX.shape[-1], value_width) <= MAX_WIDTH
