"""Rotary position embedding, interleaved pairs."""

import torch
from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.rope import complex as _complex
from glm5.kernels.rope import reference as _reference
from glm5.kernels.triton_support import chosen

_COMPLEX = (torch.float32, torch.float64)  # of which torch has complex numbers

TABLE = Table(
    __name__,
    triton=Impl("one pass", on="triton"),
    complex=Impl("one complex product", when=lambda x: x.dtype in _COMPLEX),
    reference=Impl("the definition"),
)


def rope_table(positions_T: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, [T, dim/2] each, rounded to `dtype` (model spec 3.2).

    Raises ValueError for an odd `dim`: dimensions rotate in pairs.
    """
    if dim % 2:
        raise ValueError(f"rope_table: dimensions rotate in pairs, got dim={dim}; give an even number")
    return _reference.rope_table(positions_T, dim, theta, dtype)


def cached_freqs_cis(positions_T: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Tensor | None:
    """`freqs_cis` of `rope_table` from a cached table, on a CPU; None elsewhere."""
    if not positions_T.is_cpu or torch.is_grad_enabled() or dtype not in _COMPLEX:
        return None
    return _complex.freqs_cis_at(positions_T, dim, theta, dtype)


def freqs_cis(cos_TR2: Tensor, sin_TR2: Tensor) -> Tensor | None:
    """cos + i sin (freqs_cis), if torch has complex numbers of the dtype, else None. `rope` can reuse it."""
    return torch.complex(cos_TR2, sin_TR2) if cos_TR2.dtype in _COMPLEX else None


def rope(
    x: Tensor,
    cos_TR2: Tensor,
    sin_TR2: Tensor,
    cis_TR2: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """`x` [T, R] or [T, H, R] rotated pair by pair (x[2j], x[2j+1]), pairs kept in place, in x.dtype.

    `cis_TR2`: `freqs_cis` of the same table, for repeated rotations.
    """
    return TABLE.module(impl, x).rope(x, cos_TR2, sin_TR2, cis_TR2)


def rope_part(x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, cis_TR2: Tensor | None, start: int, stop: int) -> Tensor:
    """`x` [T, width] or [T, H, width] with its dimensions `start` to `stop` rotated, the others unchanged.

    Without a gradient x is mutated and returned; the caller must not use it afterwards.
    """
    if torch.is_grad_enabled():
        return torch.cat([x[..., :start], rope(x[..., start:stop], cos_TR2, sin_TR2, cis_TR2), x[..., stop:]], dim=-1)
    part = x[..., start:stop]
    if cis_TR2 is not None and part.is_cpu and _complex.fits(part):
        part.view(cis_TR2.dtype).mul_(cis_TR2 if x.dim() == 2 else cis_TR2.unsqueeze(1))
    elif chosen(part) and part.stride(-1) == 1:
        TABLE.module("triton", part).rotate(part, cos_TR2, sin_TR2, part)
    else:
        part.copy_(rope(part, cos_TR2, sin_TR2, cis_TR2))
    return x
