"""quantized_linear and quantized_experts at the shapes of one rank, compared with FP8 experts:
`python -m glm5.bench.kernels.quantized`.

Linear layers are w8a8. Experts are w4a8 per channel with int8 activations, w4a8 in groups of 128 with e4m3 activations,
w4a16 and w8a8. Routing is uniform, as in experts.py. There is no shared expert, so FP8 experts are measured again here
without one.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.experts import routed_rows
from glm5.bench.kernels.shapes import (
    ACTIVE,
    EXPERT_INNER,
    EXPERTS,
    HIDDEN,
    RANKS,
    Weight,
    generator,
    quantized_linears,
    random_rows,
    random_weight,
)
from glm5.bench.kernels.table import main
from glm5.kernels.block_scaled import FP8, BlockScaled, num_blocks
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.quantized_experts import quantized_experts
from glm5.kernels.quantized_linear import cuda, quantized_linear
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.token_quant import token_quant
from glm5.testing.numerics import rel_rms

# Rounding the result to bfloat16 is 1.7e-3. Experts: h is rounded to bfloat16, then quantized, where codes may differ.
LINEAR_BUDGET, EXPERTS_BUDGET, FP8_BUDGET = 3e-3, 2e-2, 6e-2
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
LINEAR_TOKENS = (1, 8, 16, 32, 64, 128, 512, 2048)
W8A8, FP8_ROWS = WeightFormat("int8", None, "int8"), WeightFormat("fp8", None, "fp8")
EXPERT_FORMS = (
    WeightFormat("int4", None, "int8"),
    WeightFormat("int4", 128, "fp8"),
    WeightFormat("int4", 128, None),
    W8A8,
)
_RMS = {"int8": 74.0, "int4": 4.6, "fp8": 130.0}  # of uniformly distributed codes
Stack = tuple[QuantizedWeight, QuantizedWeight] | tuple[BlockScaled, BlockScaled]
Run = Callable[[Tensor, QuantizedWeight], Tensor]


def random_codes(gen: torch.Generator, weight_format: WeightFormat, *shape: int) -> QuantizedWeight:
    """A random weight whose products with rows of unit scale have about unit scale."""
    *lead, width = shape
    codes = torch.randint(
        0, 256, (*lead, width // weight_format.per_byte), dtype=torch.uint8, device="cuda", generator=gen
    )
    if weight_format.weight == "fp8":
        codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # NaN
    scale = torch.rand(*lead, weight_format.num_scales(width), device="cuda", generator=gen) + 0.5
    dtype = {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}[weight_format.weight]
    return QuantizedWeight(codes.view(dtype), scale / (_RMS[weight_format.weight] * width**0.5), weight_format)


def linear_case(
    weight_format: WeightFormat, weight: Weight, tokens: int, ranks: int, run: Run = quantized_linear, variant: str = ""
) -> Case:
    """A linear layer on `tokens` rows, by `run`."""

    def inputs(i: int) -> tuple[Tensor, QuantizedWeight]:
        gen = generator(i)
        return random_rows(gen, tokens, weight.cols), random_codes(gen, weight_format, weight.rows, weight.cols)

    def make(i: int) -> Launch:
        x, w = inputs(i)
        return lambda: run(x, w)

    def error() -> float:
        x, w = inputs(10**6)
        return rel_rms(run(x, w), _exact_linear(x, w))

    moved = weight.rows * (weight.cols // weight_format.per_byte + 4 * weight_format.num_scales(weight.cols))
    moved += 2 * tokens * (weight.rows + weight.cols)
    flops = 2 * tokens * weight.rows * weight.cols
    shape = f"{weight.name} {weight.rows}x{weight.cols} tp{ranks} M={tokens}"
    return Case(
        "quantized_linear",
        shape,
        make,
        error,
        LINEAR_BUDGET,
        moved,
        flops,
        _unit(weight_format),
        f"{weight_format} {variant}".rstrip(),
    )


def experts_case(weight_format: WeightFormat | None, tokens: int, ranks: int) -> Case:
    """Experts of a layer on `tokens` tokens; None: in FP8, block-scaled, by `grouped_experts`."""
    inner = EXPERT_INNER // ranks

    def run(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        gate_up, down = _stack(weight_format, inner)
        if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
            return quantized_experts(x, gate_up, down, weight, expert)
        assert isinstance(gate_up, BlockScaled)
        assert isinstance(down, BlockScaled)
        return grouped_experts(x, gate_up, down, weight, expert)

    def make(i: int) -> Launch:
        inputs = routed_rows(generator(i), tokens)
        return lambda: run(*inputs)

    def error() -> float:
        inputs = routed_rows(generator(10**6), tokens)
        return rel_rms(run(*inputs), _exact(_stack(weight_format, inner), *inputs))

    chosen = EXPERTS * (1 - (1 - ACTIVE / EXPERTS) ** tokens)
    if weight_format is None:
        matrix, budget = 3 * inner * HIDDEN + 12 * num_blocks(inner) * num_blocks(HIDDEN), FP8_BUDGET
    else:
        scales = 2 * inner * weight_format.num_scales(HIDDEN) + HIDDEN * weight_format.num_scales(inner)
        matrix, budget = 3 * inner * HIDDEN // weight_format.per_byte + 4 * scales, EXPERTS_BUDGET
    moved = int(chosen * matrix) + 4 * tokens * HIDDEN
    flops = 2 * tokens * ACTIVE * 3 * inner * HIDDEN
    shape = f"F={inner} tp{ranks} M={tokens}"
    unit = "fp8" if weight_format is None else _unit(weight_format)
    return Case(
        "quantized_experts",
        shape,
        make,
        error,
        budget,
        moved,
        flops,
        unit,
        "fp8-block" if weight_format is None else str(weight_format),
    )


def _unit(weight_format: WeightFormat) -> Literal["fp8", "bf16"]:
    """int8 products run as fast as FP8's."""
    return "fp8" if weight_format.act else "bf16"


@cache
def _stack(weight_format: WeightFormat | None, inner: int) -> Stack:
    gen = generator(inner)
    if weight_format is None:
        gate_up = random_weight(gen, EXPERTS, 2 * inner, HIDDEN, scale_rows=2 * num_blocks(inner))
        return gate_up, random_weight(gen, EXPERTS, HIDDEN, inner)
    return random_codes(gen, weight_format, EXPERTS, 2 * inner, HIDDEN), random_codes(
        gen, weight_format, EXPERTS, HIDDEN, inner
    )


def _exact_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    rows = x.double()
    if weight.format.act is not None:
        codes, scale = token_quant(x, weight.format.act, impl="reference")
        rows = codes.double() * scale.double()[:, None]
    return rows @ weight.dequantize(torch.float64).T


def _exact(stack: Stack, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    gate_up, down = stack
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(EXPERTS):
        share = torch.where(expert == e, weight, 0.0).double().sum(-1)
        rows = share.nonzero()[:, 0]
        if not len(rows):
            continue
        if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
            gate, up = _exact_linear(x[rows], gate_up.of(e)).chunk(2, dim=-1)
            y = _exact_linear((F.silu(gate) * up).to(x.dtype), down.of(e))
        else:
            assert isinstance(gate_up, BlockScaled)
            assert isinstance(down, BlockScaled)
            halves = [BlockScaled(w.data[e], w.scale[e]) for w in (*gate_up.split_gate_up(), down)]
            g, u, d = (w.dequantize(torch.float64) for w in halves)
            y = (F.silu(x[rows].double() @ g.T) * (x[rows].double() @ u.T)) @ d.T
        out.index_add_(0, rows, y * share[rows, None])
    return out


def cases() -> Iterator[Case]:
    """Experts of every format at every number of tokens, beside FP8's; linear layers in int8 by each implementation."""
    for ranks in RANKS:
        for weight_format in (None, *EXPERT_FORMS):
            for tokens in TOKENS:
                yield experts_case(weight_format, tokens, ranks)
    for ranks in RANKS:
        for weight in quantized_linears(ranks):
            for tokens in LINEAR_TOKENS:
                for impl in ("triton", "cuda") if tokens <= cuda.MAX_TOKENS else ("triton",):
                    yield linear_case(W8A8, weight, tokens, ranks, partial(quantized_linear, impl=impl), impl)
    for weight in quantized_linears(RANKS[0]):
        for tokens in (1, 16, 64, 1024):
            yield linear_case(FP8_ROWS, weight, tokens, RANKS[0])


if __name__ == "__main__":
    sys.exit(command(lambda: main(list(cases()))))
