"""fp8_linear at the shapes of one rank: `python -m glm5.bench.kernels.linear`."""

import sys
from collections.abc import Callable, Iterator

from torch import Tensor

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.shapes import RANKS, TOKENS, Weight, generator, linears, random_rows, random_weight
from glm5.bench.kernels.table import main
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.fp8_linear import fp8_linear
from glm5.testing.numerics import rel_rms

Run = Callable[[Tensor, BlockScaled], Tensor]

# Relative RMS against the exact product of the quantized operands. Rounding the result to bfloat16 alone is 1.7e-3.
BUDGET = 3e-3
FEW_ROWS = 16  # above this all implementations quantize x, below only some; quantizing x is an error of 2.5e-2


def linear_case(weight: Weight, tokens: int, ranks: int, run: Run = fp8_linear, variant: str = "") -> Case:
    """`run` on `tokens` rows."""

    def make(i: int) -> Launch:
        gen = generator(i)
        w, x = random_weight(gen, weight.rows, weight.cols), random_rows(gen, tokens, weight.cols)
        return lambda: run(x, w)

    def error() -> float:
        gen = generator(10**6)
        w, x = random_weight(gen, weight.rows, weight.cols), random_rows(gen, tokens, weight.cols)
        exact = w.dequantize(x.double().dtype)
        got = run(x, w)
        x_fp8, scale = act_quant(x, impl="reference")
        dequantized = x_fp8.double().unflatten(-1, (-1, 128)) * scale.double().unsqueeze(-1)
        quantized = rel_rms(got, dequantized.flatten(-2) @ exact.T)
        return min(quantized, rel_rms(got, x.double() @ exact.T)) if tokens <= FEW_ROWS else quantized

    moved = weight.num_bytes + 2 * tokens * (weight.rows + weight.cols)
    flops = 2 * tokens * weight.rows * weight.cols
    shape = f"{weight.name} {weight.rows}x{weight.cols} tp{ranks} M={tokens}"
    return Case("fp8_linear", shape, make, error, BUDGET, moved, flops, "fp8", variant)


def cases() -> Iterator[Case]:
    """Every linear layer at every number of rows."""
    for ranks in RANKS:
        for weight in linears(ranks):
            for tokens in TOKENS:
                yield linear_case(weight, tokens, ranks)


if __name__ == "__main__":
    sys.exit(command(lambda: main(list(cases()))))
