"""The routed experts' sum, and the shared expert's part, over block-scaled FP8 weights: three ways by number of tokens.

    1..VECTOR_TOKENS    matrix-vector products, two kernels      (triton_few.py)
    ..PAIR_TOKENS       matrix units, x as it is, three kernels  (triton_few.py)
    more                FP8 matrix units, six kernels            (triton_many.py, triton_rows.py)

Terms are not rounded to x's dtype before they are summed, except in the third way, and the sum runs in float32: nearer
to float64 than the reference.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.act_quant.triton import act_quant
from glm5.kernels.block_scaled import BLOCK, FP8, BlockScaled, num_blocks
from glm5.kernels.grouped_experts import triton_few as few
from glm5.kernels.grouped_experts import triton_many as many
from glm5.kernels.grouped_experts import triton_rows as by_rows
from glm5.kernels.grouped_experts.shared import SharedExpert
from glm5.kernels.triton_support import dependent_launch

VECTOR_TOKENS = 4
PAIR_TOKENS = 32
_CHUNK = 128  # pairs that one program of the plan places
_HELD_BLOCKS = 4  # of h, that a program keeps for all of its outputs


class Weights(NamedTuple):
    """Data and scale of the stacks and of the shared expert; without one, the stacks stand in and are not read."""

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
    """How the kernels cut their work: values of h and outputs of a tile, rows of a tile, tiles of a program."""

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
    """Of rows, that the second product takes at a time; 0: as many as the first."""


def tiling_for(num_tokens: int, num_pairs: int, num_experts: int, inner: int) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200 at GLM-5's sizes (docs/performance.md)."""
    blocks = num_blocks(inner)
    wide = blocks > 2
    if num_tokens <= VECTOR_TOKENS and blocks <= _HELD_BLOCKS:
        if wide:
            return Tiling("vector", block_f=2, up_warps=4, block_d=8, up_tiles=1 if num_tokens == 1 else 2)
        return Tiling("vector", block_f=4, up_warps=2, block_d=8)
    if num_tokens <= PAIR_TOKENS:
        return Tiling("pairs", 64, 4, block_d=64, down_tiles=8, up_stages=6 if wide or num_tokens <= 16 else 4)
    rows = num_pairs // num_experts
    if rows >= 16:
        return Tiling("rows", 128, 8, 64, 4, down_tiles=16, up_stages=4, block_t=128, down_t=64)
    block_t = min(32, max(16, triton.next_power_of_2(rows + rows // 2)))
    return Tiling("tiles", 128, 8, 128, 8, down_tiles=8, up_stages=5 if block_t == 16 else 3, block_t=block_t)


def sizes_of(sizes: tuple[int, int, int]) -> str:
    """Under which an entry of `kernels/tuned` is found."""
    num_experts, width, inner = sizes
    return f"E={num_experts} D={width} F={inner}"


def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """[T, D] in x's dtype. Raises ValueError for weights that are not BlockScaled."""
    weights = _weights(gate_up_proj, down_proj, shared)
    num_experts, width, inner = weights.sizes
    if not len(x_TD):
        return torch.empty_like(x_TD)
    tiling = tiling or tuned.find(Tiling, "grouped_experts", sizes_of(weights.sizes), len(x_TD), x_TD.device)
    tiling = tiling or tiling_for(len(x_TD), expert_TA.numel(), num_experts, inner)
    x_TD, weight_TA, expert_TA = x_TD.contiguous(), weight_TA.contiguous(), expert_TA.contiguous()
    if tiling.way == "vector":
        return _vector(x_TD, weights, weight_TA, expert_TA, tiling)
    run = _pairs if tiling.way == "pairs" else _tiles
    y = run(x_TD, weights, weight_TA, expert_TA, tiling)
    out_TD = torch.empty_like(x_TD)
    few.combine[(len(x_TD), triton.cdiv(width, 1024))](
        y,
        out_TD,
        len(x_TD),
        width,
        A=expert_TA.shape[1],
        SHARED=weights.has_shared,
        BLOCK_D=1024,
        **dependent_launch(x_TD.device),
    )
    return out_TD


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
    """The terms [T * A + T, D] in float32."""
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


def _tiles(x_TD: Tensor, weights: Weights, weight_TA: Tensor, expert_TA: Tensor, tiling: Tiling) -> Tensor:
    """The terms [T * A + T, D] in x's dtype."""
    num_experts, width, inner = weights.sizes
    num_tokens, active = expert_TA.shape
    num_pairs, block_t, device = num_tokens * active, tiling.block_t, x_TD.device
    options = dependent_launch(device)
    x_fp8, x_scale = act_quant(x_TD)
    order, tiles = tiles_by_expert(expert_TA, num_experts, block_t)
    rows = num_pairs + num_tokens
    shared_tiles = triton.cdiv(num_tokens, block_t) if weights.has_shared else 0
    whole = tiling.block_f == BLOCK  # then the kernel that makes h quantizes it
    h = torch.empty(rows, inner, dtype=FP8 if whole else x_TD.dtype, device=device)
    h_scale = torch.empty(num_blocks(inner) if whole else 0, rows, dtype=torch.float32, device=device)
    is_wide = tiling.way == "rows"
    gate_up, down = (by_rows.gate_up_rows, by_rows.down_rows) if is_wide else (many.gate_up_tiles, many.down_tiles)
    down_t = tiling.down_t or block_t
    parts, cut = (block_t // down_t, {"TILE_T": block_t, "BLOCK_T": down_t}) if is_wide else (1, {"BLOCK_T": block_t})
    gate_up[(triton.cdiv(inner, tiling.block_f), len(tiles) + shared_tiles)](
        x_fp8,
        x_scale,
        order,
        tiles,
        *weights.up_side(),
        h,
        h_scale,
        num_tokens,
        width,
        inner,
        num_blocks(width),
        rows,
        shared_tiles,
        A=active,
        BLOCK_T=block_t,
        BLOCK_F=tiling.block_f,
        STAGES=tiling.up_stages,
        num_warps=tiling.up_warps,
        **options,
    )
    if not whole:
        h, scale = act_quant(h)
        h_scale = scale.T
    y = torch.empty(rows, width, dtype=x_TD.dtype, device=device)
    down[(triton.cdiv(width, tiling.block_d * tiling.down_tiles), (len(tiles) + shared_tiles) * parts)](
        h,
        h_scale,
        order,
        tiles,
        weight_TA,
        *weights.down_side(),
        y,
        num_tokens,
        width,
        inner,
        rows,
        shared_tiles,
        A=active,
        **cut,
        BLOCK_D=tiling.block_d,
        BLOCKS=num_blocks(inner),
        TILES=tiling.down_tiles,
        HELD=num_blocks(inner) <= _HELD_BLOCKS,
        STAGES=tiling.down_stages,
        num_warps=tiling.down_warps,
        **options,
    )
    return y


def tiles_by_expert(expert_TA: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts [T * A], and as many tiles [.., 3] as there may have to be."""
    device, num_pairs = expert_TA.device, expert_TA.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(min(num_pairs, num_experts + num_pairs // block_t), 3, dtype=torch.int32, device=device)
    chunks, experts = triton.cdiv(num_pairs, _CHUNK), triton.next_power_of_2(num_experts + 1)
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    ranks = torch.empty_like(order)
    options = dependent_launch(device)
    many.count[(chunks,)](expert_TA, counts, ranks, num_pairs, EXPERTS=experts, CHUNK=_CHUNK, num_warps=8, **options)
    many.plan[(chunks,)](
        expert_TA,
        counts,
        ranks,
        order,
        tiles,
        num_pairs,
        chunks,
        len(tiles),
        E=num_experts,
        EXPERTS=experts,
        BLOCK_T=block_t,
        CHUNK=_CHUNK,
        num_warps=8,
        **options,
    )
    return order, tiles


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
