"""Selection and attention, at the shapes of one rank: `python -m glm5.bench.kernels.attention`.

Each query belongs to another request, except in prompts. Pages of requests are random pages of a pool that is several
times the L2 cache; selected keys are random. Bytes count the keys that are read, once for each request.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glm5.bench.command import command
from glm5.bench.kernels.case import Case, Launch
from glm5.bench.kernels.shapes import (
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    KV_LORA,
    QK_HEAD,
    RANKS,
    ROPE,
    V_HEAD,
    generator,
    random_rows,
)
from glm5.bench.kernels.table import main
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool, quantize_keys, quantize_latents
from glm5.kernels.index_score import index_score
from glm5.kernels.paging import read_pages
from glm5.kernels.prompt_attention import prompt_attention
from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.top_k import top_k
from glm5.testing.numerics import rel_rms

TOP_K, PAGE, PAGES = 2048, 64, 1 << 14
QUERIES = (1, 8, 32, 64, 128)
FORM = LatentFormat(KV_LORA, ROPE)
# Relative RMS against float64 on the rounded inputs. Probabilities, results and dequantized FP8 latents are bfloat16.
ATTENTION_BUDGET, SCORE_BUDGET = 5e-3, 1e-5
Where = tuple[Tensor, Tensor, Tensor]


@cache
def _latents(kind: str) -> Pool:
    pool = torch.empty(PAGES, PAGE, KV_LORA + ROPE, dtype=torch.bfloat16, device="cuda").normal_(generator=generator(0))
    if kind == "bf16":
        return pool
    rows = [quantize_latents(part.flatten(0, 1), FORM).unflatten(0, part.shape[:2]) for part in pool.split(1024)]
    return Fp8Latents(torch.cat(rows), FORM)


@cache
def _index_keys(kind: str) -> Pool:
    pool = torch.empty(PAGES, PAGE, INDEX_DIM, dtype=torch.bfloat16, device="cuda").normal_(generator=generator(1))
    if kind == "bf16":
        return pool
    data, scale = quantize_keys(pool.flatten(0, 1))
    return Fp8Keys(data.unflatten(0, pool.shape[:2]), scale.view(pool.shape[:2]))


def _plain(pool: Pool, pages: Tensor) -> Tensor:
    return read_pages(pool, pages).double()


def _where(gen: torch.Generator, requests: int, queries: int, keys: int) -> Where:
    """(page table, request of each query, end of its keys) of requests with `keys` keys and queries at the last
    ones."""
    table = torch.randint(PAGES, (requests, keys // PAGE), generator=gen, device="cuda", dtype=torch.int32)
    row = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(queries)
    end = torch.arange(keys - queries, keys, device="cuda", dtype=torch.int32).repeat(requests) + 1
    return table, row, end


def _chosen(gen: torch.Generator, queries: int, keys: int) -> Tensor:
    order = torch.rand(queries, keys, generator=gen, device="cuda").argsort(-1)
    return order[:, :TOP_K].int().sort(-1).values.contiguous()


def attention_case(
    kind: str, heads: int, requests: int, queries: int, keys: int, selected: bool, tiling: Any = None
) -> Case:
    """Attention of `queries` queries of each of `requests` requests with `keys` keys; `tiling` as in the kernel."""
    opts: dict[str, Any] = {"scale": QK_HEAD**-0.5, "value_dim": KV_LORA}
    run: Callable[..., tuple[Tensor, Tensor]] = sparse_mla
    if tiling is not None:
        from glm5.kernels.sparse_mla import triton

        run = partial(triton.sparse_mla, tile=tiling)

    def inputs(i: int, requests: int, queries: int) -> tuple[Tensor, Tensor | None, Where]:
        gen = generator(i)
        q = random_rows(gen, requests * queries, heads, KV_LORA + ROPE)
        return q, _chosen(gen, len(q), keys) if selected else None, _where(gen, requests, queries, keys)

    def make(i: int) -> Launch:
        (q, chosen, at), pool = inputs(i, requests, queries), _latents(kind)
        return lambda: run(q, pool, chosen, *at, **opts)

    def error() -> float:
        q, chosen, (table, *at) = inputs(0, min(requests, 4), min(queries, 64))
        got = run(q, _latents(kind), chosen, table, *at, **opts)[0]
        exact = _plain(_latents(kind), table.flatten())
        own = torch.arange(table.numel(), device="cuda", dtype=torch.int32).view_as(table)
        return rel_rms(got, sparse_mla(q.double(), exact, chosen, own, *at, impl="gather", **opts)[0])

    row_bytes = FORM.num_bytes if kind == "fp8" else 2 * (KV_LORA + ROPE)
    seen = TOP_K if selected else keys
    num_rows = requests * min(keys, seen * queries)
    per_query = 2 * heads * (2 * KV_LORA + ROPE)
    pairs = requests * queries * (seen if selected else keys - (queries - 1) / 2)
    size = num_rows * row_bytes + requests * queries * per_query
    flops = int(pairs * heads * 2 * (2 * KV_LORA + ROPE))
    shape = f"{kind} H={heads} {requests}x{queries} of {keys}{' selected' if selected else ''}"
    return Case("sparse_mla", shape, make, error, ATTENTION_BUDGET, size, flops, "bf16")


def selection_case(kind: str, requests: int, queries: int, keys: int, tiling: Any = None) -> Case:
    """Selection for `queries` queries of each of `requests` requests with `keys` keys; `tiling`: of the scores."""
    scale = INDEX_DIM**-0.5
    run: Callable[..., Tensor] = select_keys
    if tiling is not None:
        from glm5.kernels.select_keys import triton

        run = partial(triton.select_keys, tiling=tiling)

    def inputs(i: int, requests: int, queries: int) -> tuple[Tensor, Tensor, Where]:
        gen, num = generator(i), requests * queries
        q, w = random_rows(gen, num, INDEX_HEADS, INDEX_DIM), random_rows(gen, num, INDEX_HEADS)
        return q, w, _where(gen, requests, queries, keys)

    def make(i: int) -> Launch:
        (q, w, at), pool = inputs(i, requests, queries), _index_keys(kind)
        return lambda: run(q, pool, w, *at, top_k=TOP_K, scale=scale)

    def error() -> float:
        q, w, (table, *at) = inputs(0, min(requests, 2), min(queries, 16))
        score = index_score(q, _index_keys(kind), w, table, *at, scale=scale)
        keys_TK = run(q, _index_keys(kind), w, table, *at, top_k=TOP_K, scale=scale)
        if not torch.equal(keys_TK, top_k(score, TOP_K, impl="reference")):
            return float("inf")
        exact = _plain(_index_keys(kind), table.flatten())
        own = torch.arange(table.numel(), device="cuda", dtype=torch.int32).view_as(table)
        want = index_score(q.double(), exact, w.double(), own, *at, scale=scale, impl="reference")
        return rel_rms(score[want.isfinite()], want[want.isfinite()])

    num = requests * queries
    row_bytes = INDEX_DIM + 4 if kind == "fp8" else 2 * INDEX_DIM
    size = requests * keys * row_bytes + num * (2 * INDEX_HEADS * (INDEX_DIM + 1) + 4 * TOP_K)
    flops = int(num * (keys - (queries - 1) / 2) * INDEX_HEADS * 2 * INDEX_DIM)
    return Case("select_keys", f"{kind} {requests}x{queries} of {keys}", make, error, SCORE_BUDGET, size, flops, "bf16")


def prompt_case(heads: int, requests: int, tokens: int, impl: Literal["auto", "triton", "cudnn"] = "auto") -> Case:
    """Causal attention of prompts with expanded keys and values; cuDNN's keys include the rotated part."""
    nope = QK_HEAD - ROPE

    def inputs(i: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        gen, num = generator(i), requests * tokens
        q, kv = random_rows(gen, num, heads, QK_HEAD), random_rows(gen, num, heads, nope + V_HEAD)
        first = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(tokens) * tokens
        return q, kv[..., :nope], random_rows(gen, num, ROPE), kv[..., nope:], first

    def launch(q: Tensor, k: Tensor, rope: Tensor, v: Tensor, first: Tensor) -> Launch:
        kernel = None if impl == "cudnn" else impl
        if kernel is not None:
            return lambda: prompt_attention(q, k, rope, v, first, scale=QK_HEAD**-0.5, impl=kernel)[0]
        k = torch.cat([k, rope[:, None].expand(-1, heads, -1)], dim=-1)
        q, k, v = (x.unflatten(0, (requests, -1)).transpose(1, 2).contiguous() for x in (q, k, v))

        def run() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=QK_HEAD**-0.5)
            return out.transpose(1, 2).flatten(0, 1)

        return run

    def error() -> float:
        q, k, rope, v, first = inputs(0, min(tokens, 512))
        exact = q.double(), k.double(), rope.double(), v.double(), first
        want = prompt_attention(*exact, scale=QK_HEAD**-0.5, impl="reference")[0]
        return rel_rms(launch(q, k, rope, v, first)(), want)

    size = 2 * requests * tokens * (heads * (2 * QK_HEAD + 2 * V_HEAD) + ROPE)
    flops = requests * tokens * (tokens + 1) // 2 * heads * 2 * (QK_HEAD + V_HEAD)
    shape, variant = f"H={heads} {requests}x{tokens}", "" if impl == "auto" else impl
    return Case(
        "prompt_attention",
        shape,
        lambda i: launch(*inputs(i, tokens)),
        error,
        ATTENTION_BUDGET,
        size,
        flops,
        "bf16",
        variant,
    )


def top_k_case(rows: int, keys: int) -> Case:
    """Top-k of precomputed scores."""

    def scores(i: int, rows: int) -> Tensor:
        return torch.randn(rows, keys, generator=generator(i), device="cuda")

    def make(i: int) -> Launch:
        score = scores(i, rows)
        return lambda: top_k(score, TOP_K)

    def error() -> float:
        score = scores(0, min(rows, 4))
        return 0.0 if torch.equal(top_k(score, TOP_K), top_k(score, TOP_K, impl="reference")) else float("inf")

    return Case("top_k", f"{rows} of {keys}", make, error, SCORE_BUDGET, 4 * rows * (keys + TOP_K))


def cases() -> Iterator[Case]:
    """Decoding at every batch, then prompts."""
    for kind in ("bf16", "fp8"):
        for ranks in RANKS:
            for requests in QUERIES:
                yield attention_case(kind, HEADS // ranks, requests, 1, 4096, selected=True)
            yield attention_case(kind, HEADS // ranks, 32, 1, TOP_K, selected=False)
            yield attention_case(kind, HEADS // ranks, 1, 2048, TOP_K, selected=False)
            yield attention_case(kind, HEADS // ranks, 1, 2048, 8192, selected=True)
            if kind == "bf16":
                for requests, tokens in ((1, 512), (1, 1024), (1, 2048), (4, 2048)):
                    for impl in ("auto", "triton", "cudnn"):
                        yield prompt_case(HEADS // ranks, requests, tokens, impl)
        for requests in QUERIES:
            yield selection_case(kind, requests, 1, 2304)
        for requests, keys in ((1, 8192), (1, 32768), (1, 131072), (32, 32768)):
            yield selection_case(kind, requests, 1, keys)
        yield selection_case(kind, 1, 2048, 4096)
        yield selection_case(kind, 1, 2048, 32768)
    for rows, keys in ((1, 2304), (1, 8192), (1, 32768), (1, 131072), (128, 2304), (128, 32768)):
        yield top_k_case(rows, keys)


if __name__ == "__main__":
    sys.exit(command(lambda: main(list(cases()))))
