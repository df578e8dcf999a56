"""Selection and attention in Triton at GLM-5's shapes: against float64, the same in 20 runs, in CUDA graphs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool, quantize_keys, quantize_latents
from glm5.kernels.index_score import index_score
from glm5.kernels.paging import read_pages
from glm5.kernels.prompt_attention import prompt_attention, prompt_attention_quantized
from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.top_k import top_k
from glm5.testing.numerics import rel_rms

pytestmark = pytest.mark.gpu

C, R, J, I, K, Z = 512, 64, 32, 128, 2048, 64
FORM = LatentFormat(C, R)
# (queries, keys) per request, the queries being the last ones.
CASES = {
    "one key": [(1, 1)],
    "decode around the edges of blocks": [(1, n) for n in (1, 63, 64, 65, 2047, 2048, 2049, 5000)] + [(0, 1), (1, 0)],
    "drafts": [(4, 2050), (4, 4), (4, 6000)],
    "a prompt and its rest": [(300, 300), (70, 2100), (1, 900)],
}
POOLS = ["bfloat16", "fp8"]
# Relative RMS; inputs are rounded before both runs. Attention rounds p, the result and widened FP8 latents to bfloat16,
# scores are sums of exact products in float32.
ATTENTION_BUDGET, SCORE_BUDGET = 5e-3, 1e-5
LSE_BUDGET = {"bfloat16": 1e-5, "fp8": 1e-2}
REPEATS = 20


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@contextmanager
def poisoned() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


def where(name: str, gen: torch.Generator) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """(number of pages, (page table, rows, ends)); pages are shuffled, unused entries point anywhere."""
    requests = CASES[name]
    width = max(1, *(-(-keys // Z) for _, keys in requests))
    num_pages = len(requests) * width + 3
    order = torch.randperm(num_pages, generator=gen, device="cuda").int()
    rows = [row for row, (queries, _) in enumerate(requests) for _ in range(queries)]
    ends = [keys - queries + i + 1 if keys else 0 for queries, keys in requests for i in range(queries)]
    table = order[: len(requests) * width].view(len(requests), width)
    return num_pages, (table, *(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (rows, ends)))


def in_larger_pages(part: Tensor) -> Tensor:
    """The same pages as a piece of larger ones, in the midst of NaN."""
    pages = torch.full((len(part), part[0].numel() + 64), math.nan, device="cuda").to(part.dtype)
    return pages[:, 32:-32].unflatten(1, part.shape[1:]).copy_(part)


def hide(pool: Tensor, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """NaN in every slot that no query sees."""
    table, row_T, end_T = at
    seen = torch.zeros(pool.shape[:2], dtype=torch.bool, device="cuda")
    for row in range(len(table)):
        end = int(end_T[row_T == row].max()) if (row_T == row).any() else 0
        s = torch.arange(end, device="cuda")
        seen[table[row, s // Z].long(), s % Z] = True
    return pool.masked_fill(~seen[..., None], math.nan)


def latents(kind: str, num_pages: int, at, gen: torch.Generator) -> tuple[Pool, Tensor]:
    """(what the kernel reads, the same in float64)."""
    pool = torch.randn(num_pages, Z, C + R, generator=gen, device="cuda", dtype=torch.bfloat16)
    if kind == "bfloat16":
        return in_larger_pages(hide(pool, at)), pool.double()
    rows = quantize_latents(pool.flatten(0, 1), FORM).unflatten(0, (num_pages, Z))
    exact = read_pages(Fp8Latents(rows, FORM), torch.arange(num_pages, device="cuda"))
    seen = hide(pool, at).isnan().any(-1, keepdim=True)
    return Fp8Latents(in_larger_pages(rows.masked_fill(seen, 255)), FORM), exact.double()


def index_keys(kind: str, num_pages: int, at, gen: torch.Generator) -> tuple[Pool, Tensor]:
    pool = torch.randn(num_pages, Z, I, generator=gen, device="cuda", dtype=torch.bfloat16)
    if kind == "bfloat16":
        return in_larger_pages(hide(pool, at)), pool.double()
    data, scale = (x.unflatten(0, (num_pages, Z)) for x in quantize_keys(pool.flatten(0, 1)))
    exact = read_pages(Fp8Keys(data, scale), torch.arange(num_pages, device="cuda"))
    unseen = hide(pool, at).isnan().any(-1, keepdim=True)
    hidden = data.view(torch.uint8).masked_fill(unseen, 255), scale.masked_fill(unseen[..., 0], math.nan)
    return Fp8Keys(in_larger_pages(hidden[0]).view(data.dtype), in_larger_pages(hidden[1])), exact.double()


def selection(at, gen: torch.Generator) -> Tensor:
    """K keys at random of what each query sees, ascending, then -1."""
    table, _, end_T = at
    s = torch.arange(max(K, table.shape[1] * Z), device="cuda")
    score = torch.rand(len(end_T), len(s), generator=gen, device="cuda")
    order = score.masked_fill(s >= end_T[:, None], 2.0).argsort(-1)
    keys = order[:, :K].masked_fill(order[:, :K] >= end_T[:, None], len(s)).sort(-1).values
    return keys.masked_fill(keys == len(s), -1).int()


def assert_same(got: Tensor, want: Tensor, budget: float) -> None:
    seen = want.isfinite()
    assert torch.equal(got.isfinite(), seen)
    assert rel_rms(got[seen], want[seen]) < budget


@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_attention(name, kind, num_heads, gen):
    num_pages, at = where(name, gen)
    q = torch.randn(len(at[1]), num_heads, C + R, generator=gen, device="cuda", dtype=torch.bfloat16)
    pool, exact = latents(kind, num_pages, at, gen)
    for impl, keys in product(("triton", "cuda"), (selection(at, gen), None)):
        if impl == "cuda" and keys is None and len(q) > len(at[0]):
            continue  # refused
        opts = {"scale": 0.0625, "value_dim": C, "impl": impl}
        want = sparse_mla(q.double(), exact, keys, *at, **opts | {"impl": "gather"})
        with poisoned():
            got = sparse_mla(q, pool, keys, *at, **opts)
        assert_same(got[0], want[0], ATTENTION_BUDGET)
        assert_same(got[1], want[1], LSE_BUDGET[kind])
        for _ in range(REPEATS):
            for again, first in zip(sparse_mla(q, pool, keys, *at, **opts), got, strict=True):
                assert torch.equal(again, first)
        wrong = sparse_mla(q, pool, keys, *at, **opts | {"scale": 0.0725})  # the control
        many = at[2] > 60
        assert not many.any() or rel_rms(wrong[0][many], want[0][many]) > 2 * ATTENTION_BUDGET


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_selection(name, kind, gen):
    num_pages, at = where(name, gen)
    q = torch.randn(len(at[1]), J, I, generator=gen, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(len(at[1]), J, generator=gen, device="cuda", dtype=torch.bfloat16)
    pool, exact = index_keys(kind, num_pages, at, gen)
    want = index_score(q.double(), exact, w.double(), *at, scale=0.088, impl="reference")
    with poisoned():
        score = index_score(q, pool, w, *at, scale=0.088)
        keys = select_keys(q, pool, w, *at, top_k=K, scale=0.088)
    assert_same(score, want, SCORE_BUDGET)
    assert torch.equal(keys, top_k(score, K, impl="reference"))
    if len(w) == 1:
        return
    w[:, -1] *= 1.01  # the control: one head of 32
    wrong, seen = index_score(q, pool, w, *at, scale=0.088), want.isfinite()
    assert rel_rms(wrong[seen], want[seen]) > 10 * SCORE_BUDGET


@pytest.mark.parametrize("name", CASES)
def test_selection_by_groups_is_the_same(name, gen):
    from glm5.kernels.select_keys.triton import select_keys as select

    num_pages, at = where(name, gen)
    q = torch.randn(len(at[1]), J, I, generator=gen, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(len(at[1]), J, generator=gen, device="cuda", dtype=torch.bfloat16)
    pool, _ = index_keys("fp8", num_pages, at, gen)
    first = select(q, pool, w, *at, top_k=K, scale=0.088)
    for _ in range(REPEATS):
        assert torch.equal(select(q, pool, w, *at, top_k=K, scale=0.088), first)
        for num_groups in (1, 1000):  # of 64 keys and of a few
            by_groups = select(q, pool, w, *at, top_k=K, scale=0.088, longest=100, num_groups=num_groups)
            assert torch.equal(by_groups, first)


@pytest.mark.parametrize("levels", [2, 300, 1 << 24])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (3, 2047), (3, 2048), (5, 2049), (9, 8191), (3, 40000), (1, 202752)])
def test_best_keys(T, S, levels, gen):
    score = torch.randint(levels, (T, S), generator=gen, device="cuda").float() - levels // 2
    score[torch.rand(T, S, generator=gen, device="cuda") < 0.3] = -math.inf
    for k in (1, 100, K):
        want = top_k(score, k, impl="reference")
        with poisoned():
            got = top_k(score, k, impl="triton")
        assert torch.equal(got, want)
        for _ in range(REPEATS):
            assert torch.equal(top_k(score, k, impl="triton"), got)


@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("lengths", [(1,), (128,), (300, 7, 129, 64), (1000,), (2200, 5)], ids=str)
def test_prompt_attention(lengths, impl, num_heads, gen):
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    first = torch.cat(
        [torch.full((n,), int(start)) for n, start in zip(lengths, starts, strict=True)] + [starts[-1:] + 5000]
    )
    first, num_tokens = first.int().cuda(), len(first)
    shapes = [(num_heads, 256), (num_heads, 192 + 256), (64,)]
    q, kv, rope = (torch.randn(num_tokens, *s, generator=gen, device="cuda", dtype=torch.bfloat16) for s in shapes)
    case = q, kv[..., :192], rope, kv[..., 192:]
    want = prompt_attention(*(x.double() for x in case), first, scale=0.0625, impl="reference")
    with poisoned():
        got = prompt_attention(*case, first, scale=0.0625, impl=impl)
    assert_same(got[0], want[0], ATTENTION_BUDGET)
    assert_same(got[1], want[1], LSE_BUDGET["bfloat16"])
    for _ in range(REPEATS):
        for again, once in zip(prompt_attention(*case, first, scale=0.0625, impl=impl), got, strict=True):
            assert torch.equal(again, once)
    out, *codes = prompt_attention_quantized(*case, first, scale=0.0625, impl=impl)
    assert out.shape == (num_tokens, num_heads * 256)
    for own, its in zip(codes, act_quant(got[0].flatten(1)), strict=True):
        assert torch.equal(own.float(), its.float())
    wrong = prompt_attention(*case, first, scale=0.0725, impl=impl)  # the control
    assert num_tokens < 60 or rel_rms(wrong[0], want[0]) > 2 * ATTENTION_BUDGET


def test_a_graph_serves_other_lengths(gen):
    """Captured once, with other pages, ends and queries each time: what a kernel reads is in its inputs' memory."""
    num_pages, at = where("drafts", gen)
    q = torch.randn(len(at[1]), 8, C + R, generator=gen, device="cuda", dtype=torch.bfloat16)
    q_index = torch.randn(len(at[1]), J, I, generator=gen, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(len(at[1]), J, generator=gen, device="cuda", dtype=torch.bfloat16)
    pool = torch.randn(num_pages, Z, C + R, generator=gen, device="cuda", dtype=torch.bfloat16)
    key_pool = torch.randn(num_pages, Z, I, generator=gen, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        keys = select_keys(q_index, key_pool, w, *at, top_k=K, scale=0.088)
        opts = {"scale": 0.0625, "value_dim": C}
        return keys, sparse_mla(q, pool, keys, *at, **opts)[0], sparse_mla(q, pool, None, *at, **opts)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        at[0].copy_(torch.randperm(num_pages, generator=gen, device="cuda")[: at[0].numel()].view_as(at[0]))
        at[2].copy_(torch.randint(0, 5000, at[2].shape, generator=gen, device="cuda"))
        q.normal_(generator=gen)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)
