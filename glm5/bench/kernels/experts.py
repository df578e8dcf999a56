"""grouped_experts with the shared expert, at the shapes of one rank: `python -m glm5.bench.kernels.experts`.

Routing is uniform: each token chooses 8 of 256 experts. Bytes count the expected number of distinct experts.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.shapes import (
    ACTIVE,
    EXPERT_INNER,
    EXPERTS,
    HIDDEN,
    RANKS,
    TOKENS,
    generator,
    random_rows,
    random_weight,
)
from glm5.bench.kernels.table import main
from glm5.kernels.block_scaled import BlockScaled, num_blocks
from glm5.kernels.grouped_experts import SharedExpert, grouped_experts
from glm5.testing.numerics import rel_rms

Run = Callable[[Tensor, BlockScaled, BlockScaled, Tensor, Tensor, SharedExpert], Tensor]

# Relative RMS against float64 from unquantized inputs. Few tokens: h and the result are rounded to bfloat16. More: x
# and h are FP8.
BUDGET_FEW, BUDGET_MANY = 5e-3, 6e-2
FEW_TOKENS = 32


class Stack(NamedTuple):
    """Weights of one rank."""

    gate_up: BlockScaled
    down: BlockScaled


@cache
def _stack(inner: int) -> Stack:
    gen = generator(inner)
    gate_up = random_weight(gen, EXPERTS, 2 * inner, HIDDEN, scale_rows=2 * num_blocks(inner))
    return Stack(gate_up, random_weight(gen, EXPERTS, HIDDEN, inner))


def _shared(gen: torch.Generator, inner: int) -> SharedExpert:
    gate, up = random_weight(gen, inner, HIDDEN), random_weight(gen, inner, HIDDEN)
    return SharedExpert(gate, up, random_weight(gen, HIDDEN, inner))


def routed_rows(gen: torch.Generator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens [T, D], the weights of their experts [T, A] and the experts [T, A]."""
    x = random_rows(gen, tokens, HIDDEN)
    weight, expert = torch.rand(tokens, EXPERTS, device="cuda", generator=gen).topk(ACTIVE, dim=-1)
    return x, weight / weight.sum(-1, keepdim=True) * 2.5, expert.int().sort(dim=-1).values


def _default(x: Tensor, gate_up: BlockScaled, down: BlockScaled, w: Tensor, e: Tensor, shared: SharedExpert) -> Tensor:
    return grouped_experts(x, gate_up, down, w, e, shared=shared)


def experts_case(tokens: int, ranks: int, run: Run = _default, variant: str = "") -> Case:
    """`run` on `tokens` tokens."""
    inner = EXPERT_INNER // ranks

    def make(i: int) -> Launch:
        gen = generator(i)
        x, weight, expert = routed_rows(gen, tokens)
        shared = _shared(gen, inner)
        stack = _stack(inner)
        return lambda: run(x, *stack, weight, expert, shared)

    def error() -> float:
        gen = generator(10**6)
        x, weight, expert = routed_rows(gen, tokens)
        shared = _shared(gen, inner)
        got = run(x, *_stack(inner), weight, expert, shared)
        return rel_rms(got, _exact(x, _stack(inner), weight, expert, shared))

    chosen = EXPERTS * (1 - (1 - ACTIVE / EXPERTS) ** tokens) + 1
    matrix = 3 * inner * HIDDEN + 12 * num_blocks(inner) * num_blocks(HIDDEN)
    moved = int(chosen * matrix) + 4 * tokens * HIDDEN
    flops = 2 * tokens * (ACTIVE + 1) * 3 * inner * HIDDEN
    budget = BUDGET_FEW if tokens <= FEW_TOKENS else BUDGET_MANY
    return Case("grouped_experts", f"F={inner} tp{ranks} M={tokens}", make, error, budget, moved, flops, "fp8", variant)


def _exact(x: Tensor, stack: Stack, weight: Tensor, expert: Tensor, shared: SharedExpert) -> Tensor:
    wide = x.double()
    gate, up = stack.gate_up.split_gate_up()
    out = _mlp(wide, *shared)
    for e in range(EXPERTS):
        share = torch.where(expert == e, weight, 0.0).double().sum(-1)
        rows = share.nonzero()[:, 0]
        if len(rows):
            ws = (BlockScaled(w.data[e], w.scale[e]) for w in (gate, up, stack.down))
            out.index_add_(0, rows, _mlp(wide[rows], *ws) * share[rows, None])
    return out


def _mlp(x: Tensor, *weights: Tensor | BlockScaled) -> Tensor:
    gate, up, down = (w.dequantize(torch.float64) for w in weights if isinstance(w, BlockScaled))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def cases() -> Iterator[Case]:
    """Every number of tokens."""
    for ranks in RANKS:
        for tokens in TOKENS:
            yield experts_case(tokens, ranks)


if __name__ == "__main__":
    sys.exit(command(lambda: main(list(cases()))))
