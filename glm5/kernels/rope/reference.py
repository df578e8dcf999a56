"""Rotary position embedding over interleaved pairs (model spec 3.2).

    angle[t, j] = position[t] * theta^(-2j / R)
    (a, b) = (x[2j], x[2j+1])  ->  (a cos - b sin, b cos + a sin), written back in place of the pair

Angles are float32 and cos/sin are rounded to the model's dtype, in which the rotation is done.
"""

from functools import lru_cache

import torch
from torch import Tensor


def rope_table(positions_T: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [T, R/2] in `dtype`. Angles are float32 (float64 for dtype float64)."""
    frequency_R2 = _frequencies(dim, theta, torch.promote_types(dtype, torch.float32), positions_T.device)
    angle_TR2 = positions_T[:, None] * frequency_R2
    return angle_TR2.cos().to(dtype), angle_TR2.sin().to(dtype)


@lru_cache(maxsize=16)
def _frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """theta^(-2j / R), [R/2]. Kept, as a decoding step asks several times, and it takes longer than the angles."""
    with torch.inference_mode(mode=False):
        return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)


def rope(x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, _cis_TR2: Tensor | None = None) -> Tensor:
    """Rotated `x`, [T, R] or [T, H, R], same shape and dtype."""
    if x.dim() == 3:
        cos_TR2, sin_TR2 = cos_TR2.unsqueeze(1), sin_TR2.unsqueeze(1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos_TR2 - b * sin_TR2, b * cos_TR2 + a * sin_TR2], dim=-1).flatten(-2)
