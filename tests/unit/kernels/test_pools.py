"""Pools as a cache has them: strided by page, or in FP8. Every kernel reads them in place and reads the right thing."""

import pytest
import torch
from torch import Tensor

from glm5.kernels import fp8_pool
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool, quantize_keys, quantize_latents
from glm5.kernels.index_score import index_score
from glm5.kernels.paging import read_pages, read_rows
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.store_rows import store_rows
from glm5.testing.numerics import rel_rms
from tests.support.dispatch import largest_result
from tests.support.paged import CASES, PAGE_SIZE, Where, make_keys, make_pool, make_where

INDEX_IMPLS, MLA_IMPLS = ["reference", "tiled", "invariant"], ["gather", "masked", "grouped", "invariant"]
J, I, H, C, R, K, SCALE = 3, 6, 2, 5, 2, 5, 0.3
FORM = LatentFormat(C, R)
# The same values from other memory: the order of sums may differ, nothing else. float64; measured 3e-16.
BUDGET = 1e-14
# An e4m3 value has 4 significant bits: it is off by at most 2^-4 of itself, or 2^-10 of the scale below 2^-6 of it.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10
# Relative RMS of scores over FP8 keys of random normal values. An error uniform within half a step is 2^-3 / sqrt(12)
# = 0.036 of the power of two below the value, which is 0.72 of the value on average: 0.026. Measured 0.025 to 0.028;
# with one bit less 0.06 to 0.07.
E4M3_BUDGET = 0.031


def strided(pool: Tensor) -> Tensor:
    """The same pool as a piece of larger pages, in the midst of NaN."""
    num_pages, page_size, width = pool.shape
    pages = torch.full((num_pages, page_size * width + 7), float("nan")).to(pool.dtype)
    part = pages[:, 3 : 3 + page_size * width].unflatten(1, (page_size, width))
    return part.copy_(pool)


def fp8_keys(pool: Tensor) -> Fp8Keys:
    data, scale = quantize_keys(pool.flatten(0, 1))
    data = strided(data.view(torch.uint8).unflatten(0, pool.shape[:2])).view(fp8_pool.FP8)
    return Fp8Keys(data, strided(scale.view(*pool.shape[:2], 1)).squeeze(-1))


def fp8_latents(pool: Tensor, form: LatentFormat = FORM) -> Fp8Latents:
    rows = quantize_latents(pool.flatten(0, 1), form).unflatten(0, pool.shape[:2])
    pages = torch.full((len(rows), rows[0].numel() + 8), 255, dtype=torch.uint8)
    return Fp8Latents(pages[:, 4:-4].unflatten(1, rows.shape[1:]).copy_(rows), form)


def plain(pool: Fp8Keys | Fp8Latents) -> Tensor:
    """What a pool is read as, float64."""
    return read_pages(pool, torch.arange(pool.shape[0])).double()


def index_case(name: str, gen: torch.Generator) -> tuple[Where, Tensor, Tensor, Tensor]:
    where = make_where(name, gen)
    q, w = (torch.randn(where.num_queries, *s, generator=gen, dtype=torch.float64) for s in [(J, I), (J,)])
    return where, q, make_pool(where, I, gen, torch.float64), w


def mla_case(name: str, gen: torch.Generator) -> tuple[Where, Tensor, Tensor, Tensor]:
    where = make_where(name, gen)
    q = torch.randn(where.num_queries, H, C + R, generator=gen, dtype=torch.float64)
    return where, q, make_pool(where, C + R, gen, torch.float64), make_keys(where, K, gen)


def score(where: Where, q: Tensor, pool: Pool, w: Tensor, impl: str) -> Tensor:
    return index_score(q, pool, w, *where.args, scale=SCALE, impl=impl)


def attend(where: Where, q: Tensor, pool: Pool, keys: Tensor | None, impl: str) -> tuple[Tensor, Tensor]:
    return sparse_mla(q, pool, keys, *where.args, scale=SCALE, value_dim=C, impl=impl)


def visible_error(got: Tensor, want: Tensor) -> float:
    assert torch.equal(got.isfinite(), want.isfinite())
    return rel_rms(got[want.isfinite()], want[want.isfinite()])


@pytest.mark.parametrize("kind", ["strided", "keys", "latents"])
def test_rows_and_pages_are_those_of_the_pool(kind, gen):
    where = make_where("ragged packed", gen)
    pool = make_pool(where, C + R, gen, torch.float32).nan_to_num(3.0)
    if kind == "strided":
        pool, want = strided(pool), pool
    else:
        pool = fp8_keys(pool) if kind == "keys" else fp8_latents(pool)
        want = plain(pool).float()
    pages = torch.tensor([2, 0, 2])
    assert torch.equal(read_pages(pool, pages), want[pages])
    slots = torch.randint(len(want) * PAGE_SIZE, (3, 4), generator=gen)
    assert torch.equal(read_rows(pool, slots), want.flatten(0, 1)[slots])


@pytest.mark.parametrize("impl", INDEX_IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_scores_over_a_strided_pool(name, impl, gen):
    where, q, pool, w = index_case(name, gen)
    assert visible_error(score(where, q, strided(pool), w, impl), score(where, q, pool, w, impl)) < BUDGET


@pytest.mark.parametrize("impl", MLA_IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_a_strided_pool(name, impl, gen):
    where, q, pool, keys = mla_case(name, gen)
    for chosen in (keys, None) if impl != "invariant" else (keys,):
        wants = attend(where, q, pool, chosen, impl)
        for got, want in zip(attend(where, q, strided(pool), chosen, impl), wants, strict=True):
            assert visible_error(got, want) < BUDGET


@pytest.mark.parametrize("impl", ["tiled", "masked"])
def test_gradients_of_a_strided_pool(impl, gen):
    """Training has none, but what is differentiable is so for every stride."""
    if impl == "tiled":
        where, q, pool, w = index_case("ragged packed", gen)
        run = lambda pool: score(where, q, pool, w, impl)[~where.hidden()].square().sum()  # noqa: E731
    else:
        where, q, pool, keys = mla_case("ragged packed", gen)
        run = lambda pool: attend(where, q, pool, keys, impl)[0].square().sum()  # noqa: E731
    grads = []
    for leaf in (pool, strided(pool)):
        leaf.requires_grad_()
        run(leaf).backward()
        grads.append(leaf.grad)
    assert rel_rms(grads[1], grads[0]) < BUDGET


@pytest.mark.parametrize("impl", INDEX_IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_scores_over_fp8_keys(name, impl, gen):
    """Exactly those over the rounded keys, and as far from those over the keys themselves as rounding may take them."""
    where, q, pool, w = index_case(name, gen)
    keys = fp8_keys(pool)
    got = score(where, q, keys, w, impl)
    assert visible_error(got, score(where, q, plain(keys), w, impl)) < BUDGET
    want = score(where, q, pool, w, impl)
    error = torch.maximum(pool.abs() * RELATIVE, keys.scale.double().unsqueeze(-1) * ABSOLUTE)
    bound = index_score(q.abs(), error, w.abs(), *where.args, scale=SCALE, impl="reference")
    seen = want.isfinite()
    assert ((got - want).abs()[seen] <= bound[seen] * (1 + 1e-6)).all()


@pytest.mark.parametrize("impl", MLA_IMPLS)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_fp8_latents(name, impl, gen):
    """Likewise. Rounding moves logits by at most `shift` of the scale, so a probability by a factor e^(2 shift):

    |out' - out| <= e^(2 shift) sum_k p |error| + (e^(2 shift) - 1) sum_k p |latent|
    """
    where, q, pool, keys = mla_case(name, gen)
    latents = fp8_latents(pool)
    rounded = plain(latents)
    error = (rounded - pool).abs()
    values, scales = pool[..., :C].abs(), pool[..., :C].abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    seen = pool.isfinite()
    assert (error[..., :C] <= torch.maximum(values * RELATIVE, scales * ABSOLUTE) * (1 + 1e-6))[seen[..., :C]].all()
    assert (error[..., C:] <= pool[..., C:].abs() * 2.0**-8)[seen[..., C:]].all()  # bfloat16
    for chosen in (keys, None) if impl != "invariant" else (keys,):
        out, lse = attend(where, q, latents, chosen, impl)
        for got, want in zip((out, lse), attend(where, q, rounded, chosen, impl), strict=True):
            assert visible_error(got, want) < BUDGET
        exact, _ = attend(where, q, pool, chosen, impl)
        for t in range(where.num_queries):
            row, end = int(where.row_T[t]), int(where.end_T[t])
            read = [s for s in (range(end) if chosen is None else chosen[t].tolist()) if 0 <= s < end]
            if not read:
                continue
            slots = [int(where.page_table_BN[row, s // PAGE_SIZE]) * PAGE_SIZE + s % PAGE_SIZE for s in read]
            latent, off = pool.flatten(0, 1)[slots], error.flatten(0, 1)[slots]
            p = (q[t] @ latent.T * SCALE).softmax(-1)
            grow = (2 * SCALE * (q[t].abs() @ off.T).amax(-1, keepdim=True)).exp()
            bound = grow * (p @ off[:, :C]) + (grow - 1) * (p @ latent[:, :C].abs())
            assert ((out[t] - exact[t]).abs() <= bound * (1 + 1e-6)).all()


def large_case(gen: torch.Generator, width: int) -> Where:
    num_pages = 8
    table = torch.randperm(num_pages, generator=gen).int().view(1, -1)
    end_T = torch.full((40,), num_pages * PAGE_SIZE, dtype=torch.int32)
    return Where(table, torch.zeros_like(end_T), end_T, num_pages)


def one_bit_less(data: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(data.float())
    return torch.ldexp((mantissa * 8).round() / 8, exponent).to(data.dtype)


def test_e4m3_shows_in_scores_and_outputs_as_much_as_it_should(gen):
    where = large_case(gen, 128)
    q, key = torch.randn(40, 16, 128, generator=gen), torch.randn(where.num_pages, PAGE_SIZE, 128, generator=gen)
    w = torch.randn(40, 16, generator=gen)
    exact = index_score(q.double(), key.double(), w.double(), *where.args, scale=SCALE)
    keys = fp8_keys(key)
    assert rel_rms(index_score(q, keys, w, *where.args, scale=SCALE), exact) < E4M3_BUDGET
    coarse = keys._replace(data=one_bit_less(keys.data))
    assert rel_rms(index_score(q, coarse, w, *where.args, scale=SCALE), exact) > 1.8 * E4M3_BUDGET

    # Nearly uniform attention, so that the values decide.
    form = LatentFormat(256, 16)
    q = torch.randn(40, 4, 272, generator=gen) * 0.01
    latent = torch.randn(where.num_pages, PAGE_SIZE, 272, generator=gen)
    exact = sparse_mla(q.double(), latent.double(), None, *where.args, scale=SCALE, value_dim=256)[0]
    latents = fp8_latents(latent, form)
    assert rel_rms(sparse_mla(q, latents, None, *where.args, scale=SCALE, value_dim=256)[0], exact) < E4M3_BUDGET
    data = latents.row[..., :256].view(fp8_pool.FP8)
    latents.row[..., :256] = one_bit_less(data).view(torch.uint8)
    got = sparse_mla(q, latents, None, *where.args, scale=SCALE, value_dim=256)[0]
    assert rel_rms(got, exact) > 1.8 * E4M3_BUDGET


@pytest.mark.parametrize("kind", ["strided", "keys", "latents"])
def test_storing_touches_its_rows_only(kind, gen):
    where = make_where("ragged packed", gen)
    old, new = (torch.randn(where.num_pages, PAGE_SIZE, C + R, generator=gen) for _ in range(2))
    make = {"strided": strided, "keys": fp8_keys, "latents": fp8_latents}[kind]
    pool, want = make(old), make(new)
    slots = torch.randperm(where.num_pages * PAGE_SIZE, generator=gen)[:7]
    everything = pool if kind == "strided" else pool[0]
    before = everything.untyped_storage().nbytes()
    store_rows(pool, slots, new.flatten(0, 1)[slots])
    assert everything.untyped_storage().nbytes() == before
    mask = torch.zeros(where.num_pages * PAGE_SIZE, dtype=torch.bool)
    mask[slots] = True
    every = torch.arange(len(mask))
    got = read_rows(pool, every)
    assert torch.equal(got[mask], read_rows(want, every)[mask])
    assert torch.equal(got[~mask], read_rows(make(old), every)[~mask])


def test_rows_with_one_slot_leave_one_of_them(gen):
    pool = torch.zeros(2, PAGE_SIZE, 3)
    rows = torch.randn(3, 3, generator=gen)
    store_rows(pool, torch.tensor([5, 5, 5]), rows)
    assert any(torch.equal(pool[1, 1], row) for row in rows)
    assert pool.count_nonzero() == 3


@pytest.mark.parametrize("kind", ["strided", "keys", "latents"])
def test_a_pool_is_never_copied(kind, gen):
    """Nothing that an operation makes is larger than what it reads of a pool of 2,000 pages."""
    num_pages, page_size, width = 2000, 64, 40
    one = torch.randn(1, page_size, width, generator=gen)
    make = {"strided": strided, "keys": fp8_keys, "latents": lambda pool: fp8_latents(pool, LatentFormat(32, 8))}[kind]
    pool = make(one.expand(num_pages, -1, -1))
    table = torch.tensor([[5, 1999, 7], [1000, 3, 4]])
    row_T, end_T = torch.tensor([0, 0, 1]), torch.tensor([130, 131, 150])
    q, w = torch.randn(3, 4, width, generator=gen), torch.randn(3, 4, generator=gen)
    keys = torch.tensor([[0, 7, 128]] * 3)
    with largest_result() as largest:
        store_rows(pool, torch.tensor([64 * 1999 + 5, 3]), torch.randn(2, width, generator=gen))
        for impl in INDEX_IMPLS:
            index_score(q, pool, w, table, row_T, end_T, scale=SCALE, impl=impl)
        for impl in MLA_IMPLS:
            sparse_mla(q, pool, keys, table, row_T, end_T, scale=SCALE, value_dim=32, impl=impl)
    assert 0 < largest.num_bytes < 64 * page_size * width * 4, largest
    with largest_result() as largest:
        (pool if kind == "strided" else pool[0]).clone()
    assert largest.num_bytes > 64 * page_size * width * 4  # the control: this would have been seen


def test_unknown_implementation():
    with pytest.raises(ValueError, match="store_rows: unknown impl 'fast', expected one of auto, triton"):
        store_rows(torch.zeros(1, 4, 2), torch.tensor([0]), torch.ones(1, 2), impl="fast")
