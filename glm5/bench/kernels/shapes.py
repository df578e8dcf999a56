"""GLM-5's sizes, and what one rank has of them, for the cases."""

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
    """The FP8 linear layers of a decoder layer; those that every rank has whole are listed under 8."""
    sharded = [
        Weight("q_b", HEADS * QK_HEAD // ranks, Q_LORA),
        Weight("o", HIDDEN, HEADS * V_HEAD // ranks),
        Weight("dense gate", 2 * DENSE_INNER // ranks, HIDDEN),
        Weight("dense down", HIDDEN, DENSE_INNER // ranks),
    ]
    whole = [Weight("q_a+kv_a", Q_LORA + KV_LORA + ROPE, HIDDEN), Weight("index q_b", INDEX_HEADS * INDEX_DIM, Q_LORA)]
    return whole + sharded if ranks == RANKS[0] else sharded


def quantized_linears(ranks: int) -> list[Weight]:
    """The products of a decoder layer whose linear layers are codes, those of one input as one
    (engine/runner/fused/fused_linear.py). The indexer's wk has no codes, and q_b is alone where no keys are selected.
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
    """Of the current CUDA device."""
    return torch.Generator("cuda").manual_seed(seed + 1)


def random_weight(gen: torch.Generator, *shape: int, scale_rows: int | None = None) -> BlockScaled:
    """Every e4m3 value alike; products with inputs of unit scale have unit scale. `scale_rows`: of two weights."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=gen)
    codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # the two that are no numbers
    *lead, rows, cols = shape
    grid = (*lead, scale_rows or num_blocks(rows), num_blocks(cols))
    scale = torch.rand(grid, device="cuda", generator=gen) + 0.5
    return BlockScaled(codes.view(FP8), scale / (130 * cols**0.5))  # 130: root mean square of e4m3's values


def random_rows(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed."""
    return torch.randn(*shape, device="cuda", generator=gen).to(dtype)
