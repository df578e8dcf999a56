"""What prepares sparse attention, at GLM-5's shapes: rows of pools bit for bit, norms and rotation to a rounding."""

import pytest
import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool
from glm5.kernels.mla_keys import IndexKeys, PlainLatents, mla_keys_quantized
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.mla_values import mla_values, mla_values_quantized
from glm5.kernels.paging import read_pages
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.row_codes import quantize
from glm5.kernels.select_keys import select_keys
from glm5.kernels.store_rows import store_rows
from glm5.kernels.swiglu import swiglu, swiglu_quantized
from glm5.kernels.token_quant import token_quant
from glm5.testing.numerics import rel_rms

pytestmark = pytest.mark.gpu

Q, C, R, I, P, Z = 2048, 512, 64, 128, 40, 64
TOKENS = [1, 8, 128, 2048]
# Sums of a row in another order: now and then a value falls to the other side of a midpoint, 2^-9 of bfloat16, and of
# FP8 then 2^-4. The control is a weight that is 1 % off.
BUDGET, FP8_BUDGET, REPEATS = 5e-4, 5e-3, 20


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def random(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, device="cuda").bfloat16()


def make_pool(kind: str, width: int) -> Pool:
    """Every bit set, in pages with something between them."""

    def pages(num_bytes: int) -> Tensor:
        return torch.full((P, Z * num_bytes + 32), 255, dtype=torch.uint8, device="cuda")[:, 16:-16].unflatten(
            1, (Z, -1)
        )

    if kind == "bfloat16":
        return pages(2 * width).view(torch.bfloat16)
    if width == I:
        return Fp8Keys(pages(I).view(torch.float8_e4m3fn), pages(4).view(torch.float32).squeeze(-1))
    form = LatentFormat(C, R)
    return Fp8Latents(pages(form.num_bytes), form)


def memory(pool: Pool) -> list[Tensor]:
    parts = [pool] if isinstance(pool, Tensor) else [part for part in pool if isinstance(part, Tensor)]
    return [part.contiguous().view(torch.uint8) for part in parts]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("width", [I, C + R])
def test_rows_are_stored_bit_for_bit(width, kind, gen):
    rows = random(gen, 500, width) * torch.logspace(-5, 2, 500, device="cuda")[:, None]
    slots = torch.randperm(P * Z, generator=gen, device="cuda")[:500]
    pools = [make_pool(kind, width) for _ in range(2)]
    for pool, impl in zip(pools, ("triton", "reference"), strict=True):
        store_rows(pool, slots, rows.bfloat16(), impl=impl)
    for got, want in zip(*(memory(pool) for pool in pools), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_inputs_of_attention(tokens, kind, gen):
    qkv, x = random(gen, tokens, Q + C + R), random(gen, tokens, I + 32)[:, :I]
    weights = [random(gen, width) for width in (Q, C, I, I)]
    table = rope_table(torch.arange(tokens, device="cuda") * 31, R, 1e6, torch.bfloat16)
    slots = torch.randperm(P * Z, generator=gen, device="cuda")[:tokens]
    every = torch.arange(P, device="cuda")

    def run(impl: str, weight: Tensor = weights[0]) -> tuple[list[Tensor], list[Tensor]]:
        latents, keys = make_pool(kind, C + R), make_pool(kind, I)
        extra = IndexKeys(x, weights[2], weights[3], 1e-6, keys)
        plain = PlainLatents(qkv.new_empty(tokens, C), qkv.new_empty(tokens, R))
        given = qkv, weight, weights[1], 1e-5, *table, slots, latents, extra
        results = [*mla_keys_quantized(*given, plain=plain, impl=impl), torch.cat(plain, dim=1)]
        return results, [read_pages(pool, every).flatten(0, 1)[slots] for pool in (latents, keys)]

    (q, q_fp8, scale, plain), pools = run("triton")
    (want_q, want_fp8, want_scale, want_plain), want_pools = run("reference")
    assert rel_rms(q, want_q) < BUDGET
    assert rel_rms(plain, want_plain) < BUDGET
    wide = [
        data.double() * s.double().repeat_interleave(128, -1) for data, s in ((q_fp8, scale), (want_fp8, want_scale))
    ]
    assert rel_rms(*wide) < FP8_BUDGET
    for got, want in zip(pools, want_pools, strict=True):
        assert rel_rms(got, want) < (FP8_BUDGET if kind == "fp8" else BUDGET)
    for _ in range(REPEATS):
        again, again_pools = run("triton")
        for one, other in zip([*again, *again_pools], [q, q_fp8, scale, plain, *pools], strict=True):
            assert torch.equal(one.float(), other.float())
    assert rel_rms(run("triton", weights[0] * 1.01)[0][0], want_q) > 4 * BUDGET


@pytest.mark.parametrize("tokens", TOKENS)
def test_int8_codes_of_the_query_latent(tokens, gen):
    qkv, weights = random(gen, tokens, Q + C + R), [random(gen, width) for width in (Q, C)]
    table = rope_table(torch.arange(tokens, device="cuda") * 31, R, 1e6, torch.bfloat16)
    slots = torch.randperm(P * Z, generator=gen, device="cuda")[:tokens]
    given = qkv, *weights, 1e-5, *table, slots, make_pool("fp8", C + R), None
    q, codes, scale = mla_keys_quantized(*given, "int8", impl="triton")
    assert rel_rms(q, mla_keys_quantized(*given, impl="reference")[0]) < BUDGET
    for own, its in zip((codes, scale), token_quant(q.cpu(), "int8"), strict=True):
        assert torch.equal(own.cpu(), its)


# Against float64: results and rotated products are rounded to bfloat16, 2^-9.
PRODUCT_BUDGET = 4e-3


@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 130, 2048])
def test_queries_of_attention(tokens, num_heads, gen):
    q, w_k = random(gen, tokens, num_heads, 256), random(gen, num_heads, 192, C) * 0.07
    table = rope_table(torch.arange(tokens, device="cuda") * 31, R, 1e6, torch.bfloat16)
    want = mla_queries(*(x.double() for x in (q, w_k, *table)), impl="reference")
    got = mla_queries(q, w_k, *table, impl="triton")
    assert rel_rms(got, want) < PRODUCT_BUDGET
    wrong = mla_queries(q, w_k * 1.02, *table, impl="triton")[..., :C]  # the control
    assert rel_rms(wrong, want[..., :C]) > 3 * PRODUCT_BUDGET
    for _ in range(REPEATS):
        assert torch.equal(mla_queries(q, w_k, *table, impl="triton"), got)


@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 130])
def test_values_of_heads(tokens, num_heads, gen):
    x, w_v = random(gen, tokens, num_heads, C), random(gen, num_heads, C, 256) * 0.04
    want = mla_values(x.double(), w_v.double(), impl="reference")
    got = mla_values_quantized(x, w_v, impl="triton")
    assert rel_rms(mla_values(x, w_v, impl="triton"), want) < PRODUCT_BUDGET
    assert rel_rms(got[0], want) < PRODUCT_BUDGET
    assert rel_rms(mla_values(x, w_v * 1.02, impl="triton"), want) > 3 * PRODUCT_BUDGET  # the control
    for part, quantized in zip(got[1:], act_quant(got[0]), strict=True):
        assert torch.equal(part.float(), quantized.float())
    for _ in range(REPEATS):
        for again, first in zip(mla_values_quantized(x, w_v, impl="triton"), got, strict=True):
            assert torch.equal(again.float(), first.float())


@pytest.mark.parametrize("kind", ["blocks", "int8"])
@pytest.mark.parametrize("shape", [(1, 512), (16, 3072), (64, 512), (300, 12288)], ids=str)
def test_gated_unit(shape, kind, gen):
    gate_up = random(gen, shape[0], 2 * shape[1])
    want = swiglu(gate_up.double(), impl="reference")
    out, *codes = swiglu_quantized(gate_up, kind, impl="triton")
    assert rel_rms(out, want) < PRODUCT_BUDGET
    assert rel_rms(out * 1.02, want) > 3 * PRODUCT_BUDGET  # the control
    for own, its in zip(codes, quantize(out.cpu(), kind), strict=True):
        assert torch.equal(own.float().cpu(), its.float())
    for _ in range(REPEATS):
        for again, first in zip(swiglu_quantized(gate_up, kind, impl="triton"), (out, *codes), strict=True):
            assert torch.equal(again.float(), first.float())


def test_queries_are_made_while_keys_are_selected(gen):
    """In a graph, as in a step: what comes early is what comes in turn."""
    pool, w_k = random(gen, P, Z, I), random(gen, 8, 192, C)
    table = torch.arange(P, device="cuda", dtype=torch.int32).view(2, -1)
    row, end = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ((0, 0, 1), (1, 700, 1280)))
    turns = rope_table(torch.arange(3, device="cuda") * 31, R, 1e6, torch.bfloat16)
    q, index, w = random(gen, 3, 8, 256), random(gen, 3, 32, I), random(gen, 3, 32)
    where, opts = (table, row, end), {"top_k": 512, "scale": 0.09}

    def step() -> tuple[Tensor, Tensor]:
        queries, its_index = q * 2, index * 2  # kernels that must have ended
        early = torch.empty(3, 8, C + R, dtype=torch.bfloat16, device="cuda")
        keys = select_keys(its_index, pool, w, *where, **opts, rotation=turns)
        return keys, mla_queries(queries, w_k, *turns, early=early)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(REPEATS):
        q.normal_(generator=gen)
        index.normal_(generator=gen)
        graph.replay()
        turned = torch.cat([rope(index[..., :R] * 2, *turns), index[..., R:] * 2], dim=-1)
        assert torch.equal(got[0], select_keys(turned, pool, w, *where, **opts))
        assert torch.equal(got[1], mla_queries(q * 2, w_k, *turns))
