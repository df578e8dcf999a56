"""Ops before and after sparse attention on one rank: `python -m glm5.bench.kernels.preparation`."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.linear import FEW_ROWS
from glm5.bench.kernels.shapes import (
    HEADS,
    INDEX_DIM,
    KV_LORA,
    Q_LORA,
    QK_HEAD,
    RANKS,
    ROPE,
    TOKENS,
    V_HEAD,
    generator,
    random_rows,
)
from glm5.bench.kernels.table import main
from glm5.kernels.block_scaled import FP8
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool
from glm5.kernels.mla_keys import IndexKeys, mla_keys_quantized
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.mla_values import mla_values, mla_values_quantized
from glm5.kernels.rope import rope_table
from glm5.testing.numerics import rel_rms

PAGE, NOPE = 64, QK_HEAD - ROPE
FORM = LatentFormat(KV_LORA, ROPE)
BUDGET = 4e-3  # bfloat16 results against float64
Keys = tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor, Pool, IndexKeys]


def _table(tokens: int) -> tuple[Tensor, Tensor]:
    return rope_table(torch.arange(tokens, device="cuda") * 17, ROPE, 1e6, torch.bfloat16)


def _keys(gen: torch.Generator, kind: str, tokens: int) -> Keys:
    pages = -(-tokens // PAGE)
    latents: Pool = random_rows(gen, pages, PAGE, KV_LORA + ROPE)
    keys: Pool = random_rows(gen, pages, PAGE, INDEX_DIM)
    if kind == "fp8":
        latents = Fp8Latents(torch.zeros(pages, PAGE, FORM.num_bytes, dtype=torch.uint8, device="cuda"), FORM)
        data = torch.zeros(pages, PAGE, INDEX_DIM, dtype=torch.uint8, device="cuda").view(FP8)
        keys = Fp8Keys(data, torch.zeros(pages, PAGE, device="cuda"))
    weights = [random_rows(gen, width) for width in (Q_LORA, KV_LORA, INDEX_DIM, INDEX_DIM)]
    slot = torch.randperm(pages * PAGE, device="cuda", generator=gen)[:tokens]
    index = IndexKeys(random_rows(gen, tokens, INDEX_DIM), weights[2], weights[3], 1e-6, keys)
    qkv = random_rows(gen, tokens, Q_LORA + KV_LORA + ROPE)
    return qkv, weights[0], weights[1], 1e-5, *_table(tokens), slot, latents, index


def keys_case(kind: str, tokens: int) -> Case:
    """Norms, rotation, quantization, both cache writes."""

    def make(i: int) -> Launch:
        case = _keys(generator(i), kind, tokens)
        return lambda: mla_keys_quantized(*case)

    def error() -> float:
        case = _keys(generator(0), kind, min(tokens, 128))
        return rel_rms(mla_keys_quantized(*case)[0], mla_keys_quantized(*case, impl="reference")[0])

    read = 2 * (Q_LORA + KV_LORA + ROPE + INDEX_DIM) + 2 * ROPE
    written = 3 * Q_LORA + (FORM.num_bytes + INDEX_DIM + 4 if kind == "fp8" else 2 * (KV_LORA + ROPE + INDEX_DIM))
    return Case("mla_keys", f"{kind} M={tokens}", make, error, BUDGET, tokens * (read + written))


def queries_case(heads: int, tokens: int, tiling: Any = None) -> Case:
    """Absorption and rotation; `tiling` as in the kernel."""
    run: Callable[..., Tensor] = mla_queries
    if tiling is not None:
        from glm5.kernels.mla_queries import triton

        run = partial(triton.mla_queries, tiling=tiling)

    def inputs(i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gen = generator(i)
        q, w = random_rows(gen, tokens, heads, QK_HEAD), random_rows(gen, heads, NOPE, KV_LORA)
        return q, w, *_table(tokens)

    def make(i: int) -> Launch:
        case = inputs(i)
        return lambda: run(*case)

    def error() -> float:
        case = inputs(0)
        return rel_rms(run(*case), mla_queries(*(x.double() for x in case), impl="reference"))

    size = 2 * heads * NOPE * KV_LORA + 2 * tokens * heads * (QK_HEAD + KV_LORA + ROPE)
    flops = 2 * tokens * heads * NOPE * KV_LORA
    return Case("mla_queries", f"H={heads} M={tokens}", make, error, BUDGET, size, flops, "bf16")


def output_case(heads: int, tokens: int) -> Case:
    """Values of heads from latents; above `FEW_ROWS` tokens also quantized to FP8."""

    def inputs(i: int) -> tuple[Tensor, Tensor]:
        gen = generator(i)
        return random_rows(gen, tokens, heads, KV_LORA), random_rows(gen, heads, KV_LORA, V_HEAD)

    def make(i: int) -> Launch:
        x, w = inputs(i)
        return (lambda: mla_values_quantized(x, w)) if tokens > FEW_ROWS else lambda: mla_values(x, w)

    def error() -> float:
        x, w = inputs(0)
        return rel_rms(mla_values(x, w), mla_values(x.double(), w.double()))

    size = 2 * heads * KV_LORA * V_HEAD + 2 * tokens * heads * (KV_LORA + V_HEAD)
    flops = 2 * tokens * heads * KV_LORA * V_HEAD
    return Case("mla_values", f"H={heads} M={tokens}", make, error, BUDGET, size, flops, "bf16")


def cases() -> Iterator[Case]:
    """Every number of tokens."""
    for kind in ("bf16", "fp8"):
        for tokens in TOKENS:
            yield keys_case(kind, tokens)
    for ranks in RANKS:
        for tokens in TOKENS:
            yield queries_case(HEADS // ranks, tokens)
            yield output_case(HEADS // ranks, tokens)


if __name__ == "__main__":
    sys.exit(command(lambda: main(list(cases()))))
