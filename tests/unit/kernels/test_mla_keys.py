"""Rows of pools as Triton writes them, and the inputs of latent attention in one launch, under Triton's interpreter
where there is no GPU: against the operations one after the other."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.fp8_pool import Fp8Latents, LatentFormat
from glm5.kernels.mla_keys import HeadWeights, IndexKeys, PlainLatents, mla_keys, mla_keys_quantized
from glm5.kernels.paging import read_pages
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.row_codes import quantize
from glm5.kernels.store_rows import store_rows
from glm5.testing.numerics import rel_rms
from tests.unit.kernels.test_pools import fp8_keys, fp8_latents, strided

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Q, C, R, I, T, P, Z, EPS = 40, 24, 8, 16, 5, 6, 4, 1e-5
# Sums of a row may be taken in another order: measured 1e-7. Rotated values of FP8 latents are bfloat16, which the
# interpreter rounds wrongly: one unit in its last place, 2^-8; measured 9e-4.
BUDGET, FP8_BUDGET = 1e-6, 2.0**-8


def on_device(pool):
    if isinstance(pool, tuple):
        return type(pool)(*(part if isinstance(part, LatentFormat) else part.to(DEVICE) for part in pool))
    return pool.to(DEVICE)


def make_pool(kind: str, width: int, gen: torch.Generator, dtype: torch.dtype):
    pool = torch.randn(P, Z, width, generator=gen)
    if kind == "plain":
        return strided(pool.to(dtype))
    return fp8_keys(pool) if kind == "key" else fp8_latents(pool, LatentFormat(width - R, R))


@pytest.mark.parametrize("kind", ["plain", "key", "latent"])
@pytest.mark.parametrize("width", [C + R, 130 + R])
def test_rows_are_stored_as_the_definition_stores_them(width, kind, gen):
    pool = make_pool(kind, width, gen, torch.float32)
    rows = torch.randn(T, width, generator=gen) * torch.tensor([1e-6, 1.0, 100.0, 1e-3, 3.0])[:, None]
    slots = torch.randperm(P * Z, generator=gen)[:T]
    here, there = on_device(pool), pool
    if DEVICE == "cpu":
        here = make_pool(kind, width, gen, torch.float32)
        parts = zip(here, pool, strict=True) if isinstance(pool, tuple) else [(here, pool)]
        for own, its in parts:
            if isinstance(own, torch.Tensor):
                own.copy_(its)
    store_rows(here, slots.to(DEVICE), rows.to(DEVICE), impl="triton")
    store_rows(there, slots, rows, impl="reference")
    if isinstance(there, Fp8Latents):
        at = there.format.rope_at
        assert torch.equal(here.row[..., :at].cpu(), there.row[..., :at])
    got, want = (read_pages(pool, torch.arange(P, device=d)).cpu() for pool, d in ((here, DEVICE), (there, "cpu")))
    assert rel_rms(got, want) < (FP8_BUDGET if kind == "latent" else 1e-30)


def make_case(kind: str, dtype: torch.dtype, gen: torch.Generator):
    qkv, x = (torch.randn(T, width, generator=gen).to(dtype) for width in (Q + C + R, I + 3))
    weights = [torch.randn(width, generator=gen).to(dtype) for width in (Q, C, I, I)]
    table = rope_table(torch.arange(T) * 7, R, 1e4, dtype)
    slots = torch.randperm(P * Z, generator=gen)[:T]
    pools = (make_pool(k, w, gen, dtype) for k, w in (("latent", C + R), ("key", I)))
    latents, keys = pools if kind == "fp8" else (make_pool("plain", w, gen, dtype) for w in (C + R, I))
    return qkv, x[:, :I], weights, table, slots, latents, keys


def run(case, index: bool, impl: str, device: str = "cpu", plain: PlainLatents | None = None):
    qkv, x, weights, table, slots, latents, keys = case
    q_w, kv_w, w, b = (weight.to(device) for weight in weights)
    extra = IndexKeys(x.to(device), w, b, 1e-6, keys) if index else None
    where = *(t.to(device) for t in table), slots.to(device), latents, extra
    return mla_keys_quantized(qkv.to(device), q_w, kv_w, EPS, *where, plain=plain, impl=impl)


def test_the_definition(gen):
    qkv, x, weights, table, slots, latents, keys = case = make_case("plain", torch.float64, gen)
    plain = PlainLatents(qkv.new_empty(T, C), qkv.new_empty(T, R))
    q, _, _ = run(case, index=True, impl="reference", plain=plain)
    assert torch.equal(latents.flatten(0, 1)[slots], torch.cat(plain, dim=-1))
    assert torch.equal(q, rms_norm(qkv[:, :Q], weights[0], EPS, impl="reference"))
    assert torch.equal(latents.flatten(0, 1)[slots, :C], rms_norm(qkv[:, Q:-R], weights[1], EPS, impl="reference"))
    assert torch.equal(latents.flatten(0, 1)[slots, C:], rope(qkv[:, -R:], *table, impl="reference"))
    normed = torch.nn.functional.layer_norm(x, (I,), weights[2], weights[3], 1e-6)
    turned = rope(normed[:, :R], *table, impl="reference")
    assert torch.equal(keys.flatten(0, 1)[slots], torch.cat([turned, normed[:, R:]], dim=-1))


@pytest.mark.parametrize("index", [True, False], ids=["with index", "without"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("plain", torch.float32), ("plain", torch.float16), ("fp8", torch.float32)]
)
def test_one_launch_is_the_same(kind, dtype, index, gen, seed):
    gen_again = torch.Generator().manual_seed(seed)
    want_case, got_case = make_case(kind, dtype, gen), make_case(kind, dtype, gen_again)
    got_case = *got_case[:5], on_device(got_case[5]), on_device(got_case[6])
    plain = [PlainLatents(*(torch.empty(T, n, dtype=dtype, device=d) for n in (C, R))) for d in ("cpu", DEVICE)]
    want, got = run(want_case, index, "reference", plain=plain[0]), run(got_case, index, "triton", DEVICE, plain[1])
    for own, its in zip((*got, *plain[1]), (*want, *plain[0]), strict=True):
        assert rel_rms(own.cpu().double(), its.double()) < BUDGET
    for place in (5, 6):
        its, own = (
            read_pages(pool, torch.arange(P, device=d)).cpu()
            for pool, d in ((want_case[place], "cpu"), (got_case[place], DEVICE))
        )
        seen = its.isfinite()
        assert rel_rms(own[seen], its[seen]) < (FP8_BUDGET if kind == "fp8" else BUDGET)
    qkv, _, weights, *_ = want_case
    wrong = rms_norm(qkv[:, :Q], 1.01 * weights[0], EPS)  # the control
    assert rel_rms(wrong, want[0]) > 10 * BUDGET


def test_without_quantization(gen):
    qkv, x, weights, table, slots, latents, keys = make_case("plain", torch.float32, gen)
    extra = IndexKeys(x, weights[2], weights[3], 1e-6, keys)
    where = *table, slots, latents, extra
    q = mla_keys(qkv, weights[0], weights[1], EPS, *where, impl="reference")
    data, scale = act_quant(q)
    for own, its in zip(mla_keys_quantized(qkv, weights[0], weights[1], EPS, *where), (q, data, scale), strict=True):
        assert torch.equal(own.float(), its.float())


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["blocks", "int8"])
def test_codes_of_the_query_latent(impl, kind, gen):
    qkv, _, weights, table, slots, latents, _ = make_case("plain", torch.float32, gen)
    qkv[1] = 0
    given = *(w.to(DEVICE) for w in weights[:2]), EPS, *(t.to(DEVICE) for t in table), slots.to(DEVICE)
    got = mla_keys_quantized(qkv.to(DEVICE), *given, on_device(latents), None, kind, impl=impl)
    for own, right in zip(got[1:], quantize(got[0], kind), strict=True):
        assert own.dtype == right.dtype
        assert torch.equal(own.float(), right.float())


def test_unknown_implementation(gen):
    with pytest.raises(ValueError, match="mla_keys: unknown impl 'fast', expected one of auto, triton, reference"):
        run(make_case("plain", torch.float32, gen), index=False, impl="fast")


@pytest.mark.parametrize("width", [40, 2048 + 64])
def test_weights_of_index_heads_come_along(gen, width):
    qkv, x, weights, table, slots, latents, keys = make_case("plain", torch.float32, gen)
    x_TD, w_JD = torch.randn(T, width + 3, generator=gen)[:, :width], torch.randn(6, width, generator=gen)
    out = torch.full((T, 6), torch.nan, device=DEVICE)
    heads = HeadWeights(x_TD.to(DEVICE), w_JD.to(DEVICE), out)
    extra = IndexKeys(x.to(DEVICE), *(w.to(DEVICE) for w in weights[2:]), 1e-6, on_device(keys), heads)
    norms = [weight.to(DEVICE) for weight in weights[:2]]
    where = *(t.to(DEVICE) for t in table), slots.to(DEVICE), on_device(latents), extra
    mla_keys(qkv.to(DEVICE), *norms, EPS, *where, impl="triton")
    assert rel_rms(out.cpu(), x_TD @ w_JD.T) < BUDGET
