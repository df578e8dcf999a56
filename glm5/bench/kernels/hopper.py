"""CUDA C++ against Triton for experts of prompts and linear layers of decoding, with inputs already quantized:
`python -m glm5.bench.kernels.hopper`.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.experts import BUDGET_MANY, experts_case
from glm5.bench.kernels.linear import linear_case
from glm5.bench.kernels.shapes import RANKS, linears
from glm5.bench.kernels.table import main
from glm5.kernels import fp8_linear, grouped_experts
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear import cuda as linear_cuda
from glm5.kernels.grouped_experts import SharedExpert

Quantized = Callable[[Tensor], tuple[Tensor, Tensor]]
_ROWS = (17, 32, 64, 128)


def _cached_quant() -> Quantized:
    """`act_quant` with a cache by tensor."""
    cached: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
        if id(x) not in cached:
            cached[id(x)] = x, act_quant(x)
        return cached[id(x)][1]

    return quantized


def _experts(tokens: int, ranks: int, impl: Literal["triton", "cuda"]) -> Case:
    quantized = _cached_quant()

    def run(x: Tensor, gate_up: BlockScaled, down: BlockScaled, w: Tensor, e: Tensor, shared: SharedExpert) -> Tensor:
        given = (x, gate_up, down, w, e)
        return grouped_experts.grouped_experts(*given, shared=shared, quantized=quantized(x), impl=impl)

    return replace(experts_case(tokens, ranks, run, impl), budget=BUDGET_MANY)


def cases() -> Iterator[Case]:
    """Experts of 256 to 8,192 tokens, and every linear layer of 17 to 128 rows with several splits."""
    for ranks in RANKS:
        for tokens in (256, 512, 1024, 2048, 4096, 8192):
            yield _experts(tokens, ranks, "triton")
            yield _experts(tokens, ranks, "cuda")
    for weight in linears(8):
        for tokens in _ROWS:
            quant = _cached_quant()

            def triton(x: Tensor, w: BlockScaled, quant: Quantized = quant) -> Tensor:
                return fp8_linear.fp8_linear(x, w, quant(x), impl="triton")

            yield linear_case(weight, tokens, 8, triton, "triton")
            default = linear_cuda.cut_for(weight.rows, weight.cols).shares
            for shares in sorted({default, max(1, default // 2), min(8, default + 2)}):

                def cuda(x: Tensor, w: BlockScaled, quant: Quantized = quant, shares: int = shares) -> Tensor:
                    return linear_cuda.fp8_linear(x, w, quant(x), linear_cuda.Cut(shares))

                yield linear_case(weight, tokens, 8, cuda, f"cuda {shares}")


def prepared(case: Case) -> Case:
    """The same case, each launch run once in advance, so that its rows are quantized."""

    def make(i: int) -> Launch:
        launch = case.make(i)
        launch()
        torch.cuda.synchronize()
        return launch

    return replace(case, make=make)


if __name__ == "__main__":
    sys.exit(command(lambda: main([prepared(case) for case in cases()])))
