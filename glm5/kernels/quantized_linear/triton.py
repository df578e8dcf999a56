"""quantized_linear: MMA on codes unpacked in registers; weights are rows, tokens are columns of the tile.

For few tokens, a tile of 16 columns reads each weight once, with one program per tile of rows. For w8a8 with one scale
per row, `split` programs each compute a slice of the inputs, and the last to arrive sums the exact int32 results.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.quantized_linear.tiling import Tiling, measured_for, tiling_for
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.row_codes import Quantized
from glm5.kernels.token_quant.triton import prepare_rows
from glm5.kernels.triton_codes import integer_sums, num_steps, unit, weight_times_rows
from glm5.kernels.triton_fp8 import last_to_arrive, pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import NUM_ARRIVALS, arrivals, dependent_launch


def block_k_of(weight: QuantizedWeight, block_k: int) -> int:
    """Inputs of a step, which may not cross groups."""
    return 64 if weight.format.group is not None and weight.format.group % block_k else block_k


@triton.jit
def _quantized_linear(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    T,
    O,
    cols,
    scale_cols,
    QUANTIZED: tl.constexpr,
    INT4: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = t < T
    row = tl.minimum(o, O - 1).to(tl.int64)
    column = tl.where(here, t, 0).to(tl.int64)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    rows = (x_ptr, column, here)
    at = column[:, None] * O + o[None, :]
    known = here[:, None] & (o < O)[None, :]
    if SPLIT == 1:
        weight = (w_ptr, scale_ptr, scale_cols)
        y = weight_times_rows(weight, row, rows, cols, INT4, GROUP, INTEGER, BLOCK_K, PARTS, BLOCK_T, STAGES)
        _store(y, x_scale_ptr, out_ptr, column, at, known, QUANTIZED)
    else:
        steps = num_steps(cols, INT4, BLOCK_K, PARTS)
        share = tl.cdiv(steps, SPLIT)
        first = tl.program_id(2) * share
        last = min(first + share, steps)
        sums = integer_sums(w_ptr, row, rows, cols, first, last, INT4, BLOCK_K, PARTS, BLOCK_T, STAGES)
        size = tl.cast(T, tl.int64) * O
        tl.store(partial_ptr + tl.program_id(2) * size + at, tl.trans(sums), mask=known)
        if last_to_arrive(arrivals_ptr, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), SPLIT):
            total = tl.zeros([BLOCK_T, BLOCK_O], tl.int32)
            for i in tl.static_range(SPLIT):
                total += tl.load(partial_ptr + i * size + at, mask=known, other=0, cache_modifier=".cg")
            y = tl.trans(total).to(tl.float32) * tl.load(scale_ptr + row)[:, None] * unit(x_ptr, INT4)
            _store(y, x_scale_ptr, out_ptr, column, at, known, QUANTIZED)


@triton.jit
def _store(y, x_scale_ptr, out_ptr, column, at, known, QUANTIZED: tl.constexpr):
    """Store a tile [BLOCK_O, BLOCK_T], transposed and times its tokens' scales."""
    if QUANTIZED:
        y *= tl.load(x_scale_ptr + column)[None, :]
    tl.store(out_ptr + at, tl.trans(y).to(out_ptr.dtype.element_ty), mask=known)


def quantized_linear(
    x_TD: Tensor, weight: QuantizedWeight, tiling: Tiling | None = None, *, x_quantized: Quantized | None = None
) -> Tensor:
    """[T, O] in x's dtype."""
    codes, scale, weight_format = weight.check()
    num_rows = len(codes)
    out_TO = torch.empty(len(x_TD), num_rows, dtype=x_TD.dtype, device=x_TD.device)
    if not out_TO.numel():
        return out_TO
    tiling = tiling or measured_for(x_TD, weight)
    if tiling is None or tiling.cluster:
        tiling = tiling_for(len(x_TD), num_rows)
    tiles, split = (triton.cdiv(num_rows, tiling.block_o), triton.cdiv(len(x_TD), tiling.block_t)), tiling.split
    assert split == 1 or (
        weight_format.act == "int8" and weight_format.group is None and math.prod(tiles) <= NUM_ARRIVALS
    ), f"{tiling=}"
    assert x_quantized is None or weight_format.weight != "int4", "those come in halves"
    rows, x_scale = x_quantized or prepare_rows(x_TD, weight_format.act, halves=weight_format.weight == "int4")
    partial = torch.empty(split if split > 1 else 0, *out_TO.shape, dtype=torch.int32, device=x_TD.device)
    _quantized_linear[(*tiles, split)](
        rows,
        x_scale if x_scale is not None else rows,
        codes.view(torch.int8) if weight_format.weight == "int4" else codes,
        scale,
        out_TO,
        partial,
        arrivals(x_TD.device),
        len(x_TD),
        num_rows,
        codes.shape[-1],
        scale.shape[-1],
        QUANTIZED=x_scale is not None,
        INT4=weight_format.weight == "int4",
        GROUP=weight_format.group or 0,
        INTEGER=weight_format.act == "int8",
        BLOCK_O=tiling.block_o,
        BLOCK_T=tiling.block_t,
        BLOCK_K=block_k_of(weight, tiling.block_k),
        PARTS=tiling.parts,
        STAGES=tiling.stages,
        SPLIT=split,
        num_warps=tiling.warps,
        **dependent_launch(x_TD.device),
    )
    return out_TO
