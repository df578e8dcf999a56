"""coded_experts: gate and up in one kernel, down in another, codes widened in registers; two ways by number of tokens.

    ..PAIR_TOKENS    a program stands for a (token, choice) pair and does all pairs of its expert, if it is the first
    more             pairs are sorted by expert first, and a program does a tile of them (as in grouped_experts)

Rows are prepared by `prepare_rows` before either product: x once, what an expert makes of it again. Terms of the sum
are float32, added up in the order of a token's choices.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.coded import Coded
from glm5.kernels.coded_linear.triton import block_k_of
from glm5.kernels.grouped_experts.triton import tiles_by_expert
from glm5.kernels.grouped_experts.triton_few import combine
from glm5.kernels.token_quant.triton import prepare_rows
from glm5.kernels.triton_codes import weight_times_rows
from glm5.kernels.triton_fp8 import let_later_begin, wait_for_earlier
from glm5.kernels.triton_support import dependent_launch

PAIR_TOKENS = 32


class Tiling(NamedTuple):
    """`pairs`: the first way. Values of h and outputs of a tile, its rows, inputs of a step, loads under way."""

    pairs: bool = True
    block_f: int = 32
    block_d: int = 64
    block_t: int = 16
    block_k: int = 128
    stages: int = 4
    warps: int = 4


def tiling_for(num_tokens: int, num_pairs: int, num_experts: int) -> Tiling:
    """Guesses; nothing of this has been measured on a GPU yet."""
    if num_tokens <= PAIR_TOKENS:
        return Tiling()
    rows = num_pairs // num_experts
    block_t = min(128, max(16, triton.next_power_of_2(rows + rows // 2)))
    return Tiling(pairs=False, block_f=64, block_d=128, block_t=block_t, stages=3, warps=8 if block_t > 32 else 4)


@triton.jit
def _first_of_expert(expert_ptr, p, num_pairs, PAIRS: tl.constexpr):
    """(expert of pair p, how many pairs have it: 0 if p is not the first of them)."""
    j = tl.arange(0, PAIRS)
    expert = tl.load(expert_ptr + p)
    same = (tl.load(expert_ptr + j, mask=j < num_pairs, other=-1) == expert).to(tl.int32)
    return expert, tl.where(tl.sum(tl.where(j < p, same, 0)) > 0, 0, tl.sum(same))


@triton.jit
def _pairs_of(expert_ptr, expert, first, num_pairs, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Pairs of `expert`, from the `first`-th on: [BLOCK_T]."""
    j = tl.arange(0, PAIRS)
    same = (tl.load(expert_ptr + j, mask=j < num_pairs, other=-1) == expert).to(tl.int32)
    rank = tl.cumsum(same) - 1
    chosen = (rank[None, :] == (first + tl.arange(0, BLOCK_T))[:, None]) & (same[None, :] > 0)
    return tl.sum(tl.where(chosen, j[None, :], 0), 1)


@triton.jit
def _tile(expert_ptr, tile_ptr, num_pairs, FEW: tl.constexpr, PAIRS: tl.constexpr):
    """(expert, position of its first pair, how many pairs) of this program."""
    p = tl.program_id(1)
    if FEW:
        expert, count = _first_of_expert(expert_ptr, p, num_pairs, PAIRS)
        first = 0
    else:
        count = tl.load(tile_ptr + p * 3 + 2)
        expert = tl.load(tile_ptr + p * 3, mask=count > 0, other=0)
        first = tl.load(tile_ptr + p * 3 + 1, mask=count > 0, other=0)
    return expert, first, count


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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T * A, F] = silu(gate x) * up x, in h's dtype, pair by pair."""
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    expert, first, count = _tile(expert_ptr, tile_ptr, num_pairs, FEW, PAIRS)
    r = tl.arange(0, BLOCK_T)
    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    gate_row = tl.minimum(f, F - 1).to(tl.int64)
    w_ptr += expert.to(tl.int64) * 2 * F * cols
    scale_ptr += expert.to(tl.int64) * 2 * F * scale_cols
    for begin in range(0, count, BLOCK_T):
        here = begin + r < count
        if FEW:
            pair = _pairs_of(expert_ptr, expert, begin, num_pairs, PAIRS, BLOCK_T)
        else:
            pair = tl.load(order_ptr + first + begin + r, mask=here, other=0)
        token = (pair // A).to(tl.int64)
        weight, rows = (w_ptr, scale_ptr, scale_cols), (x_ptr, token, here)
        gate = weight_times_rows(weight, gate_row, rows, cols, INT4, GROUP, INTEGER, BLOCK_K, BLOCK_T, STAGES)
        up = weight_times_rows(weight, gate_row + F, rows, cols, INT4, GROUP, INTEGER, BLOCK_K, BLOCK_T, STAGES)
        if QUANTIZED:
            x_scale = tl.load(x_scale_ptr + token)
            gate *= x_scale[None, :]
            up *= x_scale[None, :]
        h = gate / (1 + tl.exp(-gate)) * up
        at = h_ptr + pair.to(tl.int64)[:, None] * F + f[None, :]
        tl.store(at, tl.trans(h).to(h_ptr.dtype.element_ty), mask=here[:, None] & (f < F)[None, :])


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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T * A, D] float32 = down(h) * weight."""
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    expert, first, count = _tile(expert_ptr, tile_ptr, num_pairs, FEW, PAIRS)
    r = tl.arange(0, BLOCK_T)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.minimum(d, D - 1).to(tl.int64)
    w_ptr += expert.to(tl.int64) * D * cols
    scale_ptr += expert.to(tl.int64) * D * scale_cols
    for begin in range(0, count, BLOCK_T):
        here = begin + r < count
        if FEW:
            pair = _pairs_of(expert_ptr, expert, begin, num_pairs, PAIRS, BLOCK_T)
        else:
            pair = tl.load(order_ptr + first + begin + r, mask=here, other=0)
        wide = pair.to(tl.int64)
        w, rows = (w_ptr, scale_ptr, scale_cols), (h_ptr, wide, here)
        y = weight_times_rows(w, row, rows, cols, INT4, GROUP, INTEGER, BLOCK_K, BLOCK_T, STAGES)
        weight = tl.load(weight_ptr + wide, mask=here, other=0.0)
        if QUANTIZED:
            weight *= tl.load(h_scale_ptr + wide)
        at = y_ptr + wide[:, None] * D + d[None, :]
        tl.store(at, tl.trans(y * weight[None, :]), mask=here[:, None] & (d < D)[None, :])


def coded_experts(
    x_TD: Tensor,
    gate_up_proj: Coded,
    down_proj: Coded,
    weight_TA: Tensor,
    expert_TA: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """[T, D] in x's dtype."""
    num_experts, width, _ = down_proj.codes.shape
    inner, (num_tokens, active) = down_proj.width, expert_TA.shape
    num_pairs, options = expert_TA.numel(), dependent_launch(x_TD.device)
    if not num_tokens:
        return torch.empty_like(x_TD)
    tiling = tiling or tiling_for(num_tokens, num_pairs, num_experts)
    weight_TA, expert_TA = weight_TA.float().contiguous(), expert_TA.int().contiguous()
    if tiling.pairs:
        order, tiles, num_tiles = expert_TA, expert_TA, num_pairs
    else:
        order, tiles = tiles_by_expert(expert_TA, num_experts, tiling.block_t)
        num_tiles = len(tiles)
    common = {
        "FEW": tiling.pairs,
        "PAIRS": max(16, triton.next_power_of_2(num_pairs)) if tiling.pairs else 16,
        "BLOCK_T": tiling.block_t,
        "STAGES": tiling.stages,
        "num_warps": tiling.warps,
        **options,
    }
    rows, x_scale = prepare_rows(x_TD, gate_up_proj.form.act, halves=gate_up_proj.form.weight == "int4")
    h = torch.empty(num_pairs, inner, dtype=x_TD.dtype, device=x_TD.device)
    _gate_up[(triton.cdiv(inner, tiling.block_f), num_tiles)](
        rows,
        x_scale if x_scale is not None else rows,
        expert_TA,
        order,
        tiles,
        *_arguments(gate_up_proj),
        h,
        num_pairs,
        inner,
        gate_up_proj.codes.shape[-1],
        gate_up_proj.scale.shape[-1],
        A=active,
        **_meaning(gate_up_proj, tiling.block_k),
        BLOCK_F=tiling.block_f,
        **common,
    )
    rows, h_scale = prepare_rows(h, down_proj.form.act, halves=down_proj.form.weight == "int4")
    y = torch.empty(num_pairs, width, dtype=torch.float32, device=x_TD.device)
    _down[(triton.cdiv(width, tiling.block_d), num_tiles)](
        rows,
        h_scale if h_scale is not None else rows,
        expert_TA,
        order,
        tiles,
        weight_TA,
        *_arguments(down_proj),
        y,
        num_pairs,
        width,
        down_proj.codes.shape[-1],
        down_proj.scale.shape[-1],
        **_meaning(down_proj, tiling.block_k),
        BLOCK_D=tiling.block_d,
        **common,
    )
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    combine[(num_tokens, triton.cdiv(width, 1024))](
        y, out_TD, num_tokens, width, A=active, SHARED=False, BLOCK_D=1024, **options
    )
    return out_TD


def _arguments(weight: Coded) -> tuple[Tensor, Tensor]:
    codes, scale, form = weight.check()
    return codes.view(torch.int8) if form.weight == "int4" else codes, scale


def _meaning(weight: Coded, block_k: int) -> dict[str, int | bool]:
    form = weight.form
    return {
        "QUANTIZED": form.act is not None,
        "INT4": form.weight == "int4",
        "GROUP": form.group or 0,
        "INTEGER": form.act == "int8",
        "BLOCK_K": block_k_of(weight, block_k),
    }
