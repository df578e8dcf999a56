"""Causal attention of packed sequences by torch's own GPU kernels: nothing of size T x T exists, forward or backward.

Sequences of equal length are a batch for cuDNN; others use FlashAttention's varlen kernel, which is slower. Both need
values as wide as keys, so the narrower one is padded with zeros.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_WIDTH = 256
_EVEN = 8  # widths are multiples of it: rows of 16 bytes


def sequence_attention(
    q_THX: Tensor, k_THX: Tensor, v_THV: Tensor, lengths: list[int], *, scale: float
) -> tuple[Tensor, Tensor]:
    """As `reference.sequence_attention`; no gradient flows through lse."""
    value_width = v_THV.shape[-1]
    width = -(-max(q_THX.shape[-1], value_width) // _EVEN) * _EVEN
    q_THX, k_THX, v_THX = (_filled_up(x, width) for x in (q_THX, k_THX, v_THV))
    # cuDNN does not say in which order its backward adds up.
    alike = min(lengths) == max(lengths) and not torch.are_deterministic_algorithms_enabled()
    run = _batched if alike else _packed
    out_THX, lse_TH = run(q_THX, k_THX, v_THX, lengths, scale)
    return out_THX[..., :value_width], lse_TH


def _batched(q_THX: Tensor, k_THX: Tensor, v_THX: Tensor, lengths: list[int], scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q_THX, k_THX, v_THX))
    kwargs = {"attn_bias": None, "compute_log_sumexp": True, "is_causal": True, "scale": scale}
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, **kwargs)[:2]
    lse_BHT = lse.view(len(lengths), q.shape[1], -1)
    return out.transpose(1, 2).flatten(0, 1), lse_BHT.transpose(1, 2).flatten(0, 1)


def _packed(q_THX: Tensor, k_THX: Tensor, v_THX: Tensor, lengths: list[int], scale: float) -> tuple[Tensor, Tensor]:
    start_B1 = _starts(tuple(lengths), q_THX.device)
    packed = (start_B1, start_B1, max(lengths), max(lengths))
    kwargs = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "scale": scale}
    out_THX, lse_HT = torch.ops.aten._flash_attention_forward(q_THX, k_THX, v_THX, *packed, **kwargs)[:2]
    return out_THX, lse_HT.T


@lru_cache(maxsize=8)
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative sequence lengths, cached for all layers."""
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)


def _filled_up(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
