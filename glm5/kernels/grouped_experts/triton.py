"""The sum over routed experts and the shared expert with block-scaled FP8 weights: four kernels by number of tokens.

    1..VECTOR_TOKENS    matrix-vector products, two kernels      (triton_few.py)
    ..FEW_TOKENS       matrix units, x as it is, three kernels  (triton_few.py)
    a few an expert     FP8 matrix units, four kernels           (triton_tiles.py)
    more                likewise, tiles found by a plan, five    (plan.py, triton_rows.py)

The sum runs in float32. Outputs are rounded to x's dtype before only in the last two. So results are more accurate than
the reference.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.act_quant.triton import act_quant
from glm5.kernels.block_scaled import BLOCK, FP8, BlockScaled, num_blocks
from glm5.kernels.fp8_linear.triton import with_column_scale
from glm5.kernels.grouped_experts import triton_few as few
from glm5.kernels.grouped_experts import triton_rows as by_rows
from glm5.kernels.grouped_experts import triton_tiles as by_tiles
from glm5.kernels.grouped_experts.expert_outputs import FEW_TOKENS, ExpertOutputs, combine
from glm5.kernels.grouped_experts.plan import tiles_by_expert
from glm5.kernels.grouped_experts.shared import SharedExpert
from glm5.kernels.row_codes import Quantized
from glm5.kernels.triton_support import dependent_launch

VECTOR_TOKENS = 4
_MAX_SEARCHED_PAIRS = 2048  # pairs that a program searches for those of its expert
_HELD_BLOCKS = 4  # of h, up to which a program keeps h in registers for all of its outputs


class Weights(NamedTuple):
    """Weights of the routed experts and of the shared expert; without one, `shared` is a placeholder that is not
    read."""

    gate_up: BlockScaled
    down: BlockScaled
    shared: SharedExpert
    has_shared: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, D, F)."""
        return self.down.data.shape  # pyright: ignore[reportReturnType]

    def up_side(self) -> tuple[Tensor, ...]:
        """Arguments of the kernels that compute h."""
        return *self.gate_up, *_pair(self.shared.gate), *_pair(self.shared.up)

    def down_side(self) -> tuple[Tensor, ...]:
        """Arguments of the kernels that read h."""
        return *self.down, *_pair(self.shared.down)


class Tiling(NamedTuple):
    """Tile sizes of the kernels: values of h, outputs and rows of a tile, and tiles of a program."""

    way: str
    block_f: int
    up_warps: int
    block_d: int
    down_warps: int = 4
    up_tiles: int = 1
    down_tiles: int = 1
    up_stages: int = 4
    down_stages: int = 3
    block_t: int = 8
    down_t: int = 0
    """Rows of a tile of the second product; 0: as in the first."""


def tiling_for(num_tokens: int, num_pairs: int, num_experts: int, inner: int) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200, GLM-5's sizes (docs/performance-kernels.md)."""
    blocks = num_blocks(inner)
    wide = blocks > 2
    if num_tokens <= VECTOR_TOKENS and blocks <= _HELD_BLOCKS:
        if wide:
            return Tiling("vector", block_f=2, up_warps=4, block_d=8, up_tiles=1 if num_tokens == 1 else 2)
        return Tiling("vector", block_f=4, up_warps=2, block_d=8)
    if num_tokens <= FEW_TOKENS:
        return Tiling("pairs", 64, 4, block_d=64, down_tiles=8, up_stages=6 if wide or num_tokens <= 16 else 4)
    rows = num_pairs // num_experts
    if rows >= 16 or num_pairs > _MAX_SEARCHED_PAIRS:
        return Tiling("rows", 128, 8, 64, 4, down_tiles=16, up_stages=4, block_t=128, down_t=64)
    block_t = min(32, max(16, triton.next_power_of_2(rows + rows // 2)))
    return Tiling("tiles", 128, 8, 128, 8, down_tiles=8, up_stages=5 if block_t == 16 else 3, block_t=block_t)


def sizes_of(sizes: tuple[int, int, int]) -> str:
    """The key of an entry in `kernels/tuned`."""
    num_experts, width, inner = sizes
    return f"E={num_experts} D={width} F={inner}"


def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    quantized: Quantized | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """[T, D] in x's dtype. `quantized`: `act_quant` of x, if the caller has it.

    Raises ValueError for weights that are not BlockScaled.
    """
    weights = _weights(gate_up_proj, down_proj, shared)
    if not len(x_TD):
        return torch.empty_like(x_TD)
    tiling = tiling or _tiling(x_TD, weights, expert_TA)
    x_TD, weight_TA, expert_TA = x_TD.contiguous(), weight_TA.contiguous(), expert_TA.contiguous()
    if tiling.way == "vector":
        return _vector(x_TD, weights, weight_TA, expert_TA, tiling)
    if tiling.way == "pairs":
        y = _pairs(x_TD, weights, weight_TA, expert_TA, tiling)
    else:
        y = _many(x_TD, weights, weight_TA, expert_TA, tiling, quantized)
    out_TD = torch.empty_like(x_TD)
    combine(y, out_TD, expert_TA.shape[1], has_shared=weights.has_shared)
    return out_TD


def expert_outputs(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    quantized: Quantized | None = None,
) -> ExpertOutputs | None:
    """The summands of `grouped_experts` for many tokens; None for few tokens, which use other kernels."""
    weights = _weights(gate_up_proj, down_proj, shared)
    tiling = _tiling(x_TD, weights, expert_TA)
    if tiling.way in ("vector", "pairs"):
        return None
    y = _many(x_TD.contiguous(), weights, weight_TA.contiguous(), expert_TA.contiguous(), tiling, quantized)
    num_tokens, active = expert_TA.shape
    return ExpertOutputs(y, num_tokens, active, weights.has_shared)


def _tiling(x_TD: Tensor, weights: Weights, expert_TA: Tensor) -> Tiling:
    num_experts, _, inner = weights.sizes
    known = tuned.find(Tiling, "grouped_experts", sizes_of(weights.sizes), len(x_TD), x_TD.device)
    return known or tiling_for(len(x_TD), expert_TA.numel(), num_experts, inner)


def _many(
    x_TD: Tensor, weights: Weights, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling, quantized: Quantized | None
) -> Tensor:
    """Outputs [T * A + T, D] in x's dtype."""
    run = _tiles if tiling.way == "tiles" and expert_TA.numel() <= _MAX_SEARCHED_PAIRS else _rows
    return run(x_TD, weights, weight_TA, expert_TA, tiling, quantized)


def _vector(x_TD: Tensor, weights: Weights, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling) -> Tensor:
    _, width, inner = weights.sizes
    num_tokens, active = expert_TA.shape
    slots = active + weights.has_shared
    h = torch.empty(num_tokens, slots, inner, dtype=torch.float32, device=x_TD.device)
    groups = min(4 * tiling.up_warps, triton.next_power_of_2(num_blocks(width)))
    few.gate_up_vector[(triton.cdiv(inner, tiling.block_f * tiling.up_tiles), num_tokens, slots)](
        x_TD,
        expert_TA,
        *weights.up_side(),
        h,
        width,
        inner,
        num_blocks(width),
        A=active,
        SHARED=weights.has_shared,
        BLOCK_F=tiling.block_f,
        TILES=tiling.up_tiles,
        GROUPS=groups,
        STEPS=triton.cdiv(width, groups * BLOCK),
        num_warps=max(1, groups // 4),
        **dependent_launch(x_TD.device),
    )
    out_TD = torch.empty_like(x_TD)
    few.down_vector[(triton.cdiv(width, tiling.block_d * tiling.down_tiles), num_tokens)](
        h,
        weight_TA,
        expert_TA,
        *weights.down_side(),
        out_TD,
        width,
        inner,
        A=active,
        PAIRS=triton.next_power_of_2(active),
        SHARED=weights.has_shared,
        BLOCK_D=tiling.block_d,
        TILES=tiling.down_tiles,
        BLOCKS=triton.next_power_of_2(num_blocks(inner)),
        num_warps=tiling.down_warps,
        **dependent_launch(x_TD.device),
    )
    return out_TD


def _pairs(x_TD: Tensor, weights: Weights, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling) -> Tensor:
    """Outputs [T * A + T, D] in float32."""
    _, width, inner = weights.sizes
    num_tokens, active = expert_TA.shape
    slots = num_tokens * active + (triton.cdiv(num_tokens, 8) if weights.has_shared else 0)
    rows = num_tokens * (active + 1)
    h = torch.empty(rows, inner, dtype=x_TD.dtype, device=x_TD.device)
    y = torch.empty(rows, width, dtype=torch.float32, device=x_TD.device)
    common = {"A": active, "PAIRS": max(16, triton.next_power_of_2(num_tokens * active))}
    few.gate_up_pairs[(triton.cdiv(inner, tiling.block_f), slots)](
        x_TD,
        expert_TA,
        *weights.up_side(),
        h,
        num_tokens,
        width,
        inner,
        num_blocks(width),
        **common,
        BLOCK_F=tiling.block_f,
        STAGES=tiling.up_stages,
        num_warps=tiling.up_warps,
        **dependent_launch(x_TD.device),
    )
    few.down_pairs[(triton.cdiv(width, tiling.block_d * tiling.down_tiles), slots)](
        h,
        weight_TA,
        expert_TA,
        *weights.down_side(),
        y,
        num_tokens,
        width,
        inner,
        **common,
        BLOCKS=num_blocks(inner),
        BLOCK_D=tiling.block_d,
        TILES=tiling.down_tiles,
        HELD=num_blocks(inner) <= _HELD_BLOCKS,
        STAGES=tiling.down_stages,
        num_warps=tiling.down_warps,
        **dependent_launch(x_TD.device),
    )
    return y


class _Rows(NamedTuple):
    """Buffers of h, which its kernel quantizes if a program computes complete blocks of it, and of the outputs
    [T * A + T, D] in x's dtype."""

    h: Tensor
    h_scale: Tensor
    y: Tensor

    @classmethod
    def like(cls, x_TD: Tensor, active: int, inner: int, *, whole: bool) -> "_Rows":
        (num_tokens, width), device = x_TD.shape, x_TD.device
        rows = num_tokens * active + num_tokens
        h = torch.empty(rows, inner, dtype=FP8 if whole else x_TD.dtype, device=device)
        scale = torch.empty(num_blocks(inner) if whole else 0, rows, dtype=torch.float32, device=device)
        return cls(h, scale, torch.empty(rows, width, dtype=x_TD.dtype, device=device))

    def quantized(self) -> tuple[Tensor, Tensor]:
        """h and its column-major scale."""
        if self.h.dtype == FP8:
            return self.h, self.h_scale
        h, scale = act_quant(self.h)
        return h, scale.T


def _tiles(
    x_TD: Tensor, weights: Weights, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling, quantized: Quantized | None
) -> Tensor:
    """Outputs [T * A + T, D] in x's dtype."""
    num_experts, width, inner = weights.sizes
    (num_tokens, active), block_t, options = expert_TA.shape, tiling.block_t, dependent_launch(x_TD.device)
    x_fp8, x_scale = with_column_scale(*(quantized or act_quant(x_TD)))
    made = _Rows.like(x_TD, active, inner, whole=tiling.block_f == BLOCK)
    shared_tiles = triton.cdiv(num_tokens, block_t) if weights.has_shared else 0
    count = torch.empty(num_experts, dtype=torch.int32, device=x_TD.device)
    found = torch.empty(num_experts, num_tokens * active, dtype=torch.int32, device=x_TD.device)
    by_tiles.gate_up_tiles[(triton.cdiv(inner, tiling.block_f), num_experts + shared_tiles)](
        x_fp8,
        x_scale,
        expert_TA,
        *weights.up_side(),
        made.h,
        made.h_scale,
        count,
        found,
        num_tokens,
        width,
        inner,
        num_blocks(width),
        shared_tiles,
        A=active,
        PAIRS=max(16, triton.next_power_of_2(num_tokens * active)),
        BLOCK_T=block_t,
        BLOCK_F=tiling.block_f,
        STAGES=tiling.up_stages,
        num_warps=tiling.up_warps,
        **options,
    )
    by_tiles.down_tiles[(triton.cdiv(width, tiling.block_d * tiling.down_tiles), num_experts + shared_tiles)](
        *made.quantized(),
        count,
        found,
        weight_TA,
        *weights.down_side(),
        made.y,
        num_tokens,
        width,
        inner,
        shared_tiles,
        A=active,
        BLOCK_T=block_t,
        BLOCK_D=tiling.block_d,
        BLOCKS=num_blocks(inner),
        TILES=tiling.down_tiles,
        HELD=num_blocks(inner) <= _HELD_BLOCKS,
        STAGES=tiling.down_stages,
        num_warps=tiling.down_warps,
        **options,
    )
    return made.y


def _rows(
    x_TD: Tensor, weights: Weights, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling, quantized: Quantized | None
) -> Tensor:
    """As `_tiles`."""
    num_experts, width, inner = weights.sizes
    (num_tokens, active), block_t, options = expert_TA.shape, tiling.block_t, dependent_launch(x_TD.device)
    x_fp8, x_scale = with_column_scale(*(quantized or act_quant(x_TD)))
    order, tiles = tiles_by_expert(expert_TA, num_experts, block_t)
    made = _Rows.like(x_TD, active, inner, whole=tiling.block_f == BLOCK)
    shared_tiles = triton.cdiv(num_tokens, block_t) if weights.has_shared else 0
    num_tiles = len(tiles) - 1
    by_rows.gate_up_rows[(triton.cdiv(inner, tiling.block_f), num_tiles + shared_tiles)](
        x_fp8,
        x_scale,
        order,
        tiles,
        *weights.up_side(),
        made.h,
        made.h_scale,
        num_tokens,
        width,
        inner,
        num_blocks(width),
        len(made.h),
        shared_tiles,
        A=active,
        BLOCK_T=block_t,
        BLOCK_F=tiling.block_f,
        STAGES=tiling.up_stages,
        num_warps=tiling.up_warps,
        **options,
    )
    down_t = tiling.down_t or block_t
    programs = (num_tiles + shared_tiles) * (block_t // down_t)
    by_rows.down_rows[(triton.cdiv(width, tiling.block_d * tiling.down_tiles), programs)](
        *made.quantized(),
        order,
        tiles,
        weight_TA,
        *weights.down_side(),
        made.y,
        num_tokens,
        width,
        inner,
        len(made.h),
        shared_tiles,
        A=active,
        TILE_T=block_t,
        BLOCK_T=down_t,
        BLOCK_D=tiling.block_d,
        BLOCKS=num_blocks(inner),
        TILES=tiling.down_tiles,
        HELD=num_blocks(inner) <= _HELD_BLOCKS,
        STAGES=tiling.down_stages,
        num_warps=tiling.down_warps,
        **options,
    )
    return made.y


def _weights(gate_up: Tensor | BlockScaled, down: Tensor | BlockScaled, shared: SharedExpert | None) -> Weights:
    if not isinstance(gate_up, BlockScaled) or not isinstance(down, BlockScaled):
        raise ValueError("grouped_experts[triton] needs BlockScaled weights, got plain ones; use impl='reference'")
    _, width, inner = down.data.shape
    if width * inner % 16:
        raise ValueError(
            f"grouped_experts[triton] needs experts at multiples of 16 bytes, got [{width}, {inner}] of them"
        )
    own = SharedExpert(gate_up, gate_up, down) if shared is None else shared
    return Weights(gate_up, down, own, shared is not None)


def _pair(weight: Tensor | BlockScaled) -> tuple[Tensor, Tensor]:
    if not isinstance(weight, BlockScaled):
        raise ValueError("grouped_experts[triton] needs a BlockScaled shared expert, got plain weights")
    return weight.data, weight.scale
