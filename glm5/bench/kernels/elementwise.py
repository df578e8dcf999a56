"""Ops between the matrix products (router, norms, quantization, rope): `python -m glm5.bench.kernels.elementwise`."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.shapes import ACTIVE, EXPERTS, HEADS, HIDDEN, ROPE, TOKENS, generator, random_rows
from glm5.bench.kernels.table import main
from glm5.kernels.act_quant import act_quant
from glm5.kernels.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.router import router
from glm5.testing.numerics import rel_rms

OPTIONS: dict[str, Any] = {
    "top_k": ACTIVE,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scaling_factor": 2.5,
}


def _case(
    op: str,
    tokens: int,
    inputs: Callable[[torch.Generator], tuple[Any, ...]],
    run: Callable[..., Any],
    error: Callable[..., float],
    budget: float,
    moved: int,
    variant: str = "",
) -> Case:
    def make(i: int) -> Launch:
        given = inputs(generator(i))
        return lambda: run(*given)

    def of_fresh_inputs() -> float:
        given = inputs(generator(10**6))
        return error(run(*given), *given)

    return Case(op, f"M={tokens}", make, of_fresh_inputs, budget, moved, variant=variant)


def router_case(tokens: int, run: Callable[..., Any] | None = None, variant: str = "") -> Case:
    """Scores and chosen experts. The error is the share of tokens with other experts, near ties excluded, plus the
    relative RMS of the weights."""

    def inputs(gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        bias = torch.randn(EXPERTS, device="cuda", generator=gen) * 0.01
        return random_rows(gen, tokens, HIDDEN), random_rows(gen, EXPERTS, HIDDEN) * HIDDEN**-0.5, bias

    def error(got: tuple[Tensor, Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> float:
        want = router(x.double(), weight.double(), bias.double(), **OPTIONS, impl="reference")
        best = ((x.double() @ weight.double().T).sigmoid() + bias.double()).topk(ACTIVE + 1, dim=-1).values
        clear = best[:, -2] - best[:, -1] > 1e-5
        same = (got[1] == want[1]).all(-1)
        return float((clear & ~same).float().mean()) + rel_rms(got[0][same], want[0][same])

    moved = 2 * HIDDEN * (EXPERTS + tokens) + 8 * tokens * ACTIVE
    run = run or (lambda x, w, b: router(x, w, b, **OPTIONS))
    return _case("router", tokens, inputs, run, error, 1e-5, moved, variant)


def norm_case(tokens: int, *, quantize: bool) -> Case:
    """Residual add and norm, with the norm in FP8 beside it or not."""

    def inputs(gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(random_rows(gen, *shape) for shape in ((tokens, HIDDEN), (tokens, HIDDEN), (HIDDEN,)))  # pyright: ignore[reportReturnType]

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (add_rms_norm_quantized if quantize else add_rms_norm)(x, residual, weight, 1e-5)

    def error(got: tuple[Tensor, ...], x: Tensor, residual: Tensor, weight: Tensor) -> float:
        want = add_rms_norm_quantized(x, residual, weight, 1e-5, impl="reference")
        return max(rel_rms(g.float(), w.float()) for g, w in zip(got, want, strict=False))

    moved = tokens * HIDDEN * (9 if quantize else 8)
    return _case("add_rms_norm" + (" + fp8" if quantize else ""), tokens, inputs, run, error, 3e-3, moved)


def quant_case(tokens: int) -> Case:
    """act_quant of the hidden state."""

    def error(got: tuple[Tensor, ...], x: Tensor) -> float:
        want = act_quant(x, impl="reference")
        return float(not all(torch.equal(g.float(), w.float()) for g, w in zip(got, want, strict=True)))

    return _case(
        "act_quant", tokens, lambda gen: (random_rows(gen, tokens, HIDDEN),), act_quant, error, 0.5, 3 * tokens * HIDDEN
    )


def rope_case(tokens: int) -> Case:
    """The rotated slice of the queries of an eighth of the heads."""

    def inputs(gen: torch.Generator) -> tuple[Tensor, ...]:
        table = rope_table(torch.arange(tokens, device="cuda"), ROPE, 1e6, torch.bfloat16)
        return random_rows(gen, tokens, HEADS // 8, 256)[..., -ROPE:], *table

    def error(got: Tensor, *given: Tensor) -> float:
        return float(not torch.equal(got, rope(*given, impl="reference")))

    return _case("rope", tokens, inputs, rope, error, 0.5, 4 * tokens * HEADS // 8 * ROPE)


def cases() -> Iterator[Case]:
    """Every op at every number of tokens."""
    for tokens in TOKENS:
        yield router_case(tokens)
        yield norm_case(tokens, quantize=False)
        yield norm_case(tokens, quantize=True)
        yield quant_case(tokens)
        yield rope_case(tokens)


if __name__ == "__main__":
    sys.exit(command(lambda: main(list(cases()))))
