"""GLM-5's sizes and the shapes of one rank's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8, BlockScaled, num_blocks

HIDDEN, Q_LORA, KV_LORA, ROPE = 6144, 2048, 512, 64
HEADS, QK_HEAD, V_HEAD = 64, 256, 256
INDEX_HEADS, INDEX_DIM = 32, 128
EXPERTS, ACTIVE, EXPERT_INNER, DENSE_INNER = 256, 8, 2048, 12288

TOKENS = (1, 8, 32, 64, 128, 2048)
RANKS = (8, 4)


@dataclass(frozen=True)
class Weight:
    """A linear layer's part on one rank: [rows, cols]."""

    name: str
    rows: int
    cols: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.cols + 4 * num_blocks(self.rows) * num_blocks(self.cols)


def linears(ranks: int) -> list[Weight]:
    """The FP8 linear layers of a decoder layer. Replicated ones are listed for 8 ranks only."""
    sharded = [
        Weight("q_b", HEADS * QK_HEAD // ranks, Q_LORA),
        Weight("o", HIDDEN, HEADS * V_HEAD // ranks),
        Weight("dense gate", 2 * DENSE_INNER // ranks, HIDDEN),
        Weight("dense down", HIDDEN, DENSE_INNER // ranks),
    ]
    replicated = [
        Weight("q_a+kv_a", Q_LORA + KV_LORA + ROPE, HIDDEN),
        Weight("index q_b", INDEX_HEADS * INDEX_DIM, Q_LORA),
    ]
    return replicated + sharded if ranks == RANKS[0] else sharded


def quantized_linears(ranks: int) -> list[Weight]:
    """The quantized linear layers of a decoder layer; layers of the same input are fused
    (engine/runner/fused/fused_linear.py). The indexer's wk is not quantized. q_b is not fused where no keys are
    selected.
    """
    heads = HEADS * QK_HEAD // ranks
    return [
        Weight("q_a+kv_a", Q_LORA + KV_LORA + ROPE, HIDDEN),
        Weight("q_b", heads, Q_LORA),
        Weight("q_b+index q_b", heads + INDEX_HEADS * INDEX_DIM, Q_LORA),
        Weight("o", HIDDEN, HEADS * V_HEAD // ranks),
        Weight("shared gate+up", 2 * EXPERT_INNER // ranks, HIDDEN),
        Weight("shared down", HIDDEN, EXPERT_INNER // ranks),
        Weight("dense gate+up", 2 * DENSE_INNER // ranks, HIDDEN),
        Weight("dense down", HIDDEN, DENSE_INNER // ranks),
    ]


def generator(seed: int) -> torch.Generator:
    """A random generator of the current CUDA device."""
    return torch.Generator("cuda").manual_seed(seed + 1)


def random_weight(gen: torch.Generator, *shape: int, scale_rows: int | None = None) -> BlockScaled:
    """Uniform e4m3 codes; products with inputs of unit scale have unit scale. `scale_rows`: of a fused weight."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=gen)
    codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # NaN
    *lead, rows, cols = shape
    grid = (*lead, scale_rows or num_blocks(rows), num_blocks(cols))
    scale = torch.rand(grid, device="cuda", generator=gen) + 0.5
    return BlockScaled(codes.view(FP8), scale / (130 * cols**0.5))  # 130: root mean square of e4m3's values


def random_rows(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed."""
    return torch.randn(*shape, device="cuda", generator=gen).to(dtype)
