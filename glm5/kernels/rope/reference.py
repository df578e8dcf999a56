"""Rotary position embedding over interleaved pairs (model spec 3.2).

    angle[t, j] = position[t] * theta^(-2j / R)
    (a, b) = (x[2j], x[2j+1])  ->  (a cos - b sin, b cos + a sin), written back in place of the pair

Angles are float32 and cos/sin are rounded to the model's dtype, in which the rotation is done.
"""

import torch
from torch import Tensor


def rope_table(positions_T: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [T, R/2] in `dtype`. Angles are float32 (float64 for dtype float64)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent_R2 = torch.arange(0, dim, 2, dtype=wide, device=positions_T.device) / dim
    angle_TR2 = positions_T.to(wide)[:, None] * (1.0 / theta**exponent_R2)
    return angle_TR2.cos().to(dtype), angle_TR2.sin().to(dtype)


def rope(x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor) -> Tensor:
    """Rotated `x`, [T, R] or [T, H, R], same shape and dtype."""
    if x.dim() == 3:
        cos_TR2, sin_TR2 = cos_TR2.unsqueeze(1), sin_TR2.unsqueeze(1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos_TR2 - b * sin_TR2, b * cos_TR2 + a * sin_TR2], dim=-1).flatten(-2)
