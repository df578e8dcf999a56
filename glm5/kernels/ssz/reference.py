"""SSZ: alternates between codes and scale from every start, then continues from the best until it converges.

    q = clamp(round(w / s), quant_min, quant_max)    s = sum h w q / sum h q^2    explained = (sum h w q)^2 / sum h q^2

`explained` is the part of sum h w^2 that is not error, for the codes it was computed from; the largest is best.
"""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import divided

_NOTHING = 1e-30  # sums of squares of codes that are all zero


def ssz(
    w_BOGI: Tensor,
    h_BGI: Tensor | None,
    quant_min: float,
    quant_max: float,
    starts: tuple[float, ...],
    steps: int,
    refine: int,
) -> Tensor:
    """Scale [B, O, G] in float32, or float64 for float64. 1 for rows of zeros."""
    w = w_BOGI.to(torch.promote_types(w_BOGI.dtype, torch.float32))
    h = None if h_BGI is None else h_BGI.to(w.dtype).unsqueeze(1)
    first = divided(w.abs().amax(-1), quant_max)
    first = first.masked_fill(first == 0, 1.0)
    hw, room = (w if h is None else w * h), torch.empty_like(w)
    best, most = first, torch.full_like(first, -torch.inf)

    def step(scale: Tensor) -> tuple[Tensor, Tensor]:
        # Codes found with a reciprocal may differ from a quotient's at ties, where either is as good.
        q = torch.mul(w, scale.reciprocal().unsqueeze(-1), out=room).round_().clamp_(quant_min, quant_max)
        hwq = (hw * q).sum(-1)
        hqq = (q.square_() if h is None else q.square_().mul_(h)).sum(-1).clamp_min_(_NOTHING)
        scale = hwq / hqq
        return torch.where(scale > 0, scale, torch.ones_like(scale)), scale * hwq

    for start in starts:
        scale = first * start
        for _ in range(steps):
            scale, explained = step(scale)
            better = explained > most
            most, best = torch.where(better, explained, most), torch.where(better, scale, best)
    for _ in range(refine):
        scale, explained = step(best)
        if w.is_cpu and not bool((explained > most).any()):
            break  # nothing would change any more
        better = explained > most
        most, best = torch.where(better, explained, most), torch.where(better, scale, best)
    return torch.where(most > 0, best, first)
