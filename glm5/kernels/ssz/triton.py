"""ssz in one pass: a program holds some rows in registers for all its steps, where torch reads them for every one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements of a program, unless one row has more; at 8192 many short rows no longer fit registers


@triton.jit
def _step(w, hw, h, scale, quant_min, quant_max, WEIGHTED: tl.constexpr):
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # Small numbers are rounded to nearest even by adding 1.5 * 2^23; the ends are whole, so cutting first is the same.
    q = (tl.minimum(tl.maximum(w * inverse[:, None], quant_min), quant_max) + 12582912.0) - 12582912.0
    hwq = tl.sum(hw * q, axis=1)
    hqq = tl.sum(h * (q * q) if WEIGHTED else q * q, axis=1)
    found = tl.div_rn(hwq, tl.maximum(hqq, 1e-30))
    return tl.where(found > 0, found, 1.0), found * hwq


@triton.jit
def _ssz(
    w_ptr,
    h_ptr,
    starts_ptr,
    out_ptr,
    R,
    I,
    O,
    G,
    num_starts,
    quant_min,
    quant_max,
    STEPS: tl.constexpr,
    REFINE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDTH)
    inside = (r < R)[:, None] & (i < I)[None, :]
    w = tl.load(w_ptr + r[:, None] * I + i[None, :], mask=inside, other=0.0).to(tl.float32)
    h = w
    hw = w
    if WEIGHTED:
        of_h = (r // (O * G)) * G + r % G
        h = tl.load(h_ptr + of_h[:, None] * I + i[None, :], mask=inside, other=0.0)
        hw = h * w
    reach = tl.max(tl.abs(w), axis=1)
    first = tl.div_rn(reach, tl.zeros([ROWS], tl.float32) + quant_max)
    first = tl.where(first == 0, 1.0, first)
    best = first
    most = tl.full([ROWS], float("-inf"), tl.float32)
    for s in range(num_starts):
        scale = first * tl.load(starts_ptr + s)
        for _ in range(STEPS):
            scale, explained = _step(w, hw, h, scale, quant_min, quant_max, WEIGHTED)
            best = tl.where(explained > most, scale, best)
            most = tl.maximum(explained, most)
    for _ in range(REFINE):
        scale, explained = _step(w, hw, h, best, quant_min, quant_max, WEIGHTED)
        best = tl.where(explained > most, scale, best)
        most = tl.maximum(explained, most)
    tl.store(out_ptr + r, tl.where(most > 0, best, first), mask=r < R)


def ssz(
    w_BOGI: Tensor,
    h_BGI: Tensor | None,
    quant_min: float,
    quant_max: float,
    starts: tuple[float, ...],
    steps: int,
    refine: int,
) -> Tensor:
    """As `reference.ssz`; sums are added up in another order, so a scale may differ in its last bits."""
    if w_BOGI.dtype == torch.float64:
        raise ValueError("ssz[triton] computes in float32, got float64: use impl='reference'")
    B, O, G, I = w_BOGI.shape
    w = w_BOGI.contiguous()
    out_BOG = torch.empty(B, O, G, dtype=torch.float32, device=w.device)
    if not out_BOG.numel():
        return out_BOG
    h = w if h_BGI is None else h_BGI.float().expand(B, G, I).contiguous()
    width = triton.next_power_of_2(I)
    rows = min(max(1, _TILE // width), triton.next_power_of_2(B * O * G))
    _ssz[(triton.cdiv(B * O * G, rows),)](
        w,
        h,
        torch.tensor(starts, dtype=torch.float32, device=w.device),
        out_BOG,
        B * O * G,
        I,
        O,
        G,
        len(starts),
        quant_min,
        quant_max,
        STEPS=steps,
        REFINE=refine,
        WEIGHTED=h_BGI is not None,
        ROWS=rows,
        WIDTH=width,
        num_warps=8,
    )
    return out_BOG
