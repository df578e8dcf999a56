"""quantized_experts: one kernel for each of the expert's two products, with codes unpacked in registers.

    1..PAIR_TOKENS      a program per (token, choice) pair; the first pair of an expert computes all of its pairs
    more                pairs are sorted by expert, and a program computes a tile of them (as in grouped_experts)

`prepare_rows` quantizes x before the first product and h before the second. Outputs are summed in float32, in the order
of a token's choices. For few tokens with int4 codes, cuda.py is faster.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.grouped_experts.plan import tiles_by_expert
from glm5.kernels.grouped_experts.triton_few import combine
from glm5.kernels.quantized_linear.triton import block_k_of
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.token_quant.triton import prepare_rows
from glm5.kernels.triton_codes import int4_product, product, unit, weight_times_rows
from glm5.kernels.triton_fp8 import experts_of, pairs_of, pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch

PAIR_TOKENS = 32
BLOCK_K = 128  # inputs of one MMA step
_HELD = 512  # maximum width of h that a program keeps in registers for all of its outputs


class Tiling(NamedTuple):
    """How the kernels cut their work: values of h and outputs of a tile, rows of a tile, tiles of a program, products
    of a step of the first kernel, loads under way."""

    way: str = "pairs"
    block_f: int = 32
    up_warps: int = 4
    block_d: int = 64
    down_warps: int = 4
    block_t: int = 16
    parts: int = 2
    down_tiles: int = 8
    up_stages: int = 3
    down_stages: int = 3


def tiling_for(num_tokens: int, num_pairs: int, num_experts: int, weight_format: WeightFormat) -> Tiling:
    """What was fastest on an H200 at GLM-5's sizes (docs/performance-kernels.md)."""
    if num_tokens <= PAIR_TOKENS:
        if weight_format.act is None:
            return Tiling(block_t=8, parts=4)
        return Tiling(block_f=64 if 4 < num_tokens <= 8 else 32, parts=4 if num_tokens <= 4 else 2)
    rows = num_pairs // num_experts
    block_t = min(64, max(16, triton.next_power_of_2(rows + rows // 2)))
    if block_t == 16:
        return Tiling("tiles")
    wide = weight_format.act is None or (weight_format.act == "fp8" and rows >= 64)
    return Tiling(
        "tiles",
        block_f=64,
        block_t=block_t,
        parts=1 if wide else 2,
        up_stages=5 if wide else 3,
        down_tiles=24 if rows >= 16 else 16,
    )


@triton.jit
def _tile(expert_ptr, tile_ptr, num_pairs, FEW: tl.constexpr, PAIRS: tl.constexpr):
    """(all pairs' experts, where they are sought; its expert, position of its first pair, how many pairs) of this
    program; none for a pair that is not the first of its expert."""
    p = tl.program_id(1)
    experts = tl.zeros([PAIRS], tl.int32)
    if FEW:
        experts, expert, count = experts_of(expert_ptr, p, num_pairs, PAIRS)
        first = 0
    else:
        count = tl.load(tile_ptr + p * 3 + 2)
        expert = tl.load(tile_ptr + p * 3, mask=count > 0, other=0)
        first = tl.load(tile_ptr + p * 3 + 1, mask=count > 0, other=0)
    return experts, expert, first, count


@triton.jit
def _gate_up(
    x_ptr,
    x_scale_ptr,
    expert_ptr,
    order_ptr,
    tile_ptr,
    w_ptr,
    scale_ptr,
    h_ptr,
    num_pairs,
    F,
    cols,
    scale_cols,
    A: tl.constexpr,
    FEW: tl.constexpr,
    PAIRS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    INT4: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T * A, F] = silu(gate x) * up x, in h's dtype, pair by pair. Rows of gate and up are one operand."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    experts, expert, first, count = _tile(expert_ptr, tile_ptr, num_pairs, FEW, PAIRS)
    r = tl.arange(0, BLOCK_T)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    both = tl.arange(0, 2 * BLOCK_F)
    row = tl.minimum(tl.program_id(0) * BLOCK_F + both % BLOCK_F, F - 1) + both // BLOCK_F * F
    w_ptr += expert.to(tl.int64) * 2 * F * cols
    scale_ptr += expert.to(tl.int64) * 2 * F * scale_cols
    for begin in range(0, count, BLOCK_T):
        here = begin + r < count
        if FEW:
            pair = pairs_of(experts, expert, begin // BLOCK_T, BLOCK_T)
        else:
            pair = tl.load(order_ptr + first + begin + r, mask=here, other=0)
        token = (pair // A).to(tl.int64)
        weight, rows = (w_ptr, scale_ptr, scale_cols), (x_ptr, token, here)
        y = weight_times_rows(
            weight, row.to(tl.int64), rows, cols, INT4, GROUP, INTEGER, BLOCK_K, PARTS, BLOCK_T, STAGES
        )
        if QUANTIZED:
            y *= tl.load(x_scale_ptr + token)[None, :]
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, BLOCK_F, BLOCK_T]), [1, 2, 0]))
        h = gate / (1 + tl.exp(-gate)) * up
        at = h_ptr + pair.to(tl.int64)[:, None] * F + f[None, :]
        tl.store(at, tl.trans(h).to(h_ptr.dtype.element_ty), mask=here[:, None] & (f < F)[None, :])


@triton.jit
def _operands(x_ptr, column, here, block, cols, INT4: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inputs of one product, [K, T]: even and odd ones, or all of them, twice."""
    i = block * BLOCK_K + tl.arange(0, BLOCK_K)
    at = x_ptr + column[None, :] * cols
    if INT4:
        i = block * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        at = x_ptr + column[None, :] * (2 * cols)
    known = (i < cols)[:, None] & here[None, :]
    even = tl.load(at + i[:, None], mask=known, other=0.0)
    odd = tl.load(at + cols + i[:, None], mask=known, other=0.0) if INT4 else even
    return even, odd


@triton.jit
def _held_product(
    weight, row, xs, cols, INT4: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr
):
    """Weight rows [R] times operands that are held: [R, T] float32, in units."""
    w_ptr, scale_ptr, scale_cols = weight
    HALF: tl.constexpr = BLOCK_K // 2 if INT4 else BLOCK_K
    total = tl.zeros([row.shape[0], xs[0].shape[1]], tl.float32)
    for part in tl.static_range(PARTS):
        even, odd = xs[2 * part], xs[2 * part + 1]
        i = part * HALF + tl.arange(0, HALF)
        w = tl.load(w_ptr + row[:, None] * cols + i[None, :], mask=(i < cols)[None, :], other=0.0)
        y = int4_product(w, even, odd) if INT4 else product(w, even)
        group = tl.minimum(part * BLOCK_K // GROUP, scale_cols - 1) if GROUP else 0
        scale = tl.load(scale_ptr + row * scale_cols + group)
        total += y.to(tl.float32) * scale[:, None]
    return total


@triton.jit
def _down(
    h_ptr,
    h_scale_ptr,
    expert_ptr,
    order_ptr,
    tile_ptr,
    weight_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    num_pairs,
    D,
    cols,
    scale_cols,
    FEW: tl.constexpr,
    PAIRS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    INT4: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    HELD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T * A, D] = down(h) * weight. A program does TILES tiles of BLOCK_D outputs.

    HELD: h, if short, is read once for all of them, in PARTS products.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    experts, expert, first, count = _tile(expert_ptr, tile_ptr, num_pairs, FEW, PAIRS)
    r, d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    w_ptr += expert.to(tl.int64) * D * cols
    scale_ptr += expert.to(tl.int64) * D * scale_cols
    start = tl.program_id(0) * TILES
    stop = tl.minimum(start + TILES, tl.cdiv(D, BLOCK_D))
    for begin in range(0, count, BLOCK_T):
        here = begin + r < count
        if FEW:
            pair = pairs_of(experts, expert, begin // BLOCK_T, BLOCK_T)
        else:
            pair = tl.load(order_ptr + first + begin + r, mask=here, other=0)
        wide = pair.to(tl.int64)
        share = tl.load(weight_ptr + wide, mask=here, other=0.0) * unit(h_ptr, INT4)
        if QUANTIZED:
            share *= tl.load(h_scale_ptr + wide)
        weight = (w_ptr, scale_ptr, scale_cols)
        xs = ()
        if HELD:
            for part in tl.static_range(PARTS):
                even, odd = _operands(h_ptr, wide, here, part, cols, INT4, BLOCK_K)
                xs = xs + (even, odd)
        for step in tl.range(start, stop, num_stages=STAGES if HELD else 1):
            row = tl.minimum(step * BLOCK_D + d, D - 1).to(tl.int64)
            if HELD:
                y = _held_product(weight, row, xs, cols, INT4, GROUP, BLOCK_K, PARTS) * share[None, :]
            else:
                rows = (h_ptr, wide, here)
                y = weight_times_rows(weight, row, rows, cols, INT4, GROUP, INTEGER, BLOCK_K, PARTS, BLOCK_T, STAGES)
                y *= (share / unit(h_ptr, INT4))[None, :]
            at = y_ptr + wide[:, None] * D + (step * BLOCK_D + d)[None, :]
            tl.store(at, tl.trans(y).to(y_ptr.dtype.element_ty), mask=here[:, None] & (step * BLOCK_D + d < D)[None, :])


def quantized_experts(
    x_TD: Tensor,
    gate_up_proj: QuantizedWeight,
    down_proj: QuantizedWeight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    tiling: Tiling | None = None,
    *,
    plus_TD: Tensor | None = None,
) -> Tensor:
    """[T, D] in x's dtype."""
    gate_up_proj, down_proj = gate_up_proj.check(), down_proj.check()
    num_experts, width, _ = down_proj.codes.shape
    num_tokens = len(x_TD)
    if not num_tokens:
        return torch.empty_like(x_TD)
    if tiling is None:
        tiling = tiling_for(num_tokens, expert_TA.numel(), num_experts, gate_up_proj.format)
    x_TD, weight_TA, expert_TA = x_TD.contiguous(), weight_TA.float().contiguous(), expert_TA.int().contiguous()
    y = _outputs(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, tiling)
    out_TD = torch.empty_like(x_TD)
    combine[(num_tokens, triton.cdiv(width, 1024))](
        y,
        out_TD,
        num_tokens,
        width,
        A=expert_TA.shape[1],
        SHARED=False,
        BLOCK_D=1024,
        plus_ptr=None if plus_TD is None else plus_TD.contiguous(),
        **dependent_launch(x_TD.device),
    )
    return out_TD


def _outputs(
    x_TD: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling
) -> Tensor:
    """Outputs [T * A, D] in float32; in x's dtype for many tokens, where they dominate memory traffic."""
    num_experts, width, _ = down.codes.shape
    inner, num_pairs, few = down.width, expert_TA.numel(), tiling.way == "pairs"
    if few:
        order, tiles, num_tiles = expert_TA, expert_TA, num_pairs
    else:
        order, tiles = tiles_by_expert(expert_TA, num_experts, tiling.block_t)
        num_tiles = len(tiles) - 1
    common = {
        "FEW": few,
        "PAIRS": max(16, triton.next_power_of_2(num_pairs)) if few else 16,
        "BLOCK_T": tiling.block_t,
        **dependent_launch(x_TD.device),
    }
    rows, x_scale = prepare_rows(x_TD, gate_up.format.act, halves=gate_up.format.weight == "int4")
    h = torch.empty(num_pairs, inner, dtype=x_TD.dtype, device=x_TD.device)
    _gate_up[(triton.cdiv(inner, tiling.block_f), num_tiles)](
        rows,
        x_scale if x_scale is not None else rows,
        expert_TA,
        order,
        tiles,
        *_arguments(gate_up),
        h,
        num_pairs,
        inner,
        gate_up.codes.shape[-1],
        gate_up.scale.shape[-1],
        A=expert_TA.shape[1],
        **_meaning(gate_up),
        BLOCK_F=tiling.block_f,
        PARTS=tiling.parts,
        STAGES=tiling.up_stages,
        num_warps=tiling.up_warps,
        **common,
    )
    rows, h_scale = prepare_rows(h, down.format.act, halves=down.format.weight == "int4")
    y = torch.empty(num_pairs, width, dtype=torch.float32 if few else x_TD.dtype, device=x_TD.device)
    meaning = _meaning(down)
    _down[(triton.cdiv(width, tiling.block_d * tiling.down_tiles), num_tiles)](
        rows,
        h_scale if h_scale is not None else rows,
        expert_TA,
        order,
        tiles,
        weight_TA,
        *_arguments(down),
        y,
        num_pairs,
        width,
        down.codes.shape[-1],
        down.scale.shape[-1],
        **meaning,
        BLOCK_D=tiling.block_d,
        PARTS=triton.cdiv(inner, meaning["BLOCK_K"]) if inner <= _HELD else tiling.parts,
        TILES=tiling.down_tiles,
        HELD=inner <= _HELD,
        STAGES=tiling.down_stages,
        num_warps=tiling.down_warps,
        **common,
    )
    return y


def _arguments(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    codes, scale, weight_format = weight
    return codes.view(torch.int8) if weight_format.weight == "int4" else codes, scale


def _meaning(weight: QuantizedWeight) -> dict[str, int | bool]:
    weight_format = weight.format
    return {
        "QUANTIZED": weight_format.act is not None,
        "INT4": weight_format.weight == "int4",
        "GROUP": weight_format.group or 0,
        "INTEGER": weight_format.act == "int8",
        "BLOCK_K": block_k_of(weight, BLOCK_K),
    }
