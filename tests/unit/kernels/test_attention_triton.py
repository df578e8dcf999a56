"""Selection and attention in Triton, under its interpreter where there is no GPU: against the definitions in float64.

float32 and float16 only: the interpreter computes products of bfloat16 wrongly. GLM-5's shapes are tests/gpu's.
"""

import math

import pytest
import torch

from glm5.kernels.fp8_pool import LatentFormat
from glm5.kernels.index_score import index_score
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.top_k import top_k
from glm5.testing.numerics import rel_rms
from tests.support.paged import make_keys, make_pool, make_where
from tests.unit.kernels.test_pools import fp8_keys, fp8_latents, plain, strided

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = ["chunked prefill beside decode", "decode with padding", "nothing"]
POOLS = [("strided", torch.float32), ("plain", torch.float16), ("fp8", torch.float32), ("fp8", torch.float16)]
# Inputs are rounded before both runs. Measured: float32 1.1e-7; float16 rounds p, the result and FP8 latents, 4e-4.
BUDGET = {torch.float32: 1e-6, torch.float16: 1e-3}
H, C, R, J, I, K, SCALE = 3, 5, 2, 3, 6, 4, 0.3


def on_device(x):
    if isinstance(x, tuple):
        return type(x)(*(part if isinstance(part, LatentFormat) else part.to(DEVICE) for part in x))
    return None if x is None else x.to(DEVICE)


def pools(kind, where, width, gen, dtype, fp8):
    """(what the kernel reads, the same in float64)."""
    pool = make_pool(where, width, gen, torch.float32).to(dtype)
    if kind == "fp8":
        pool = fp8(pool.float())
        return pool, plain(pool)
    return strided(pool) if kind == "strided" else pool, pool.double()


def close(got, want, budget) -> bool:
    got, seen = got.cpu(), want.isfinite()
    return torch.equal(got.isfinite(), seen) and rel_rms(got[seen], want[seen]) < budget


@pytest.mark.parametrize(("kind", "dtype"), POOLS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention(name, kind, dtype, gen):
    where = make_where(name, gen)
    q = torch.randn(where.num_queries, H, C + R, generator=gen).to(dtype)
    pool, exact = pools(kind, where, C + R, gen, dtype, lambda pool: fp8_latents(pool, LatentFormat(C, R)))
    for keys in (make_keys(where, K, gen), None):
        opts = {"scale": SCALE, "value_dim": C}
        want = sparse_mla(q.double(), exact, keys, *where.args, impl="gather", **opts)
        at = [on_device(x) for x in (q, pool, keys, *where.args)]
        out, lse = sparse_mla(*at, impl="triton", **opts)
        assert out.dtype == dtype
        assert close(out, want[0], BUDGET[dtype])
        assert close(lse, want[1], BUDGET[dtype])


@pytest.mark.parametrize("num_shares", [1, 3])
@pytest.mark.parametrize("selected", [True, False])
def test_any_number_of_shares(selected, num_shares, gen):
    from glm5.kernels.sparse_mla.triton import sparse_mla as split

    where = make_where("decode with padding", gen)
    q, pool = torch.randn(where.num_queries, H, C + R, generator=gen), make_pool(where, C + R, gen, torch.float32)
    keys = make_keys(where, 40, gen) if selected else None
    opts = {"scale": SCALE, "value_dim": C}
    want = sparse_mla(q.double(), pool.double(), keys, *where.args, impl="gather", **opts)
    at = [on_device(x) for x in (q, pool, keys, *where.args)]
    for got, exact in zip(split(*at, num_shares=num_shares, **opts), want, strict=True):
        assert close(got, exact, BUDGET[torch.float32])


def test_budget_notices_one_percent_of_scale(gen):
    where = make_where("ragged packed", gen)
    q, pool = torch.randn(where.num_queries, H, C + R, generator=gen), make_pool(where, C + R, gen, torch.float32)
    want = sparse_mla(q.double(), pool.double(), None, *where.args, scale=SCALE, value_dim=C, impl="gather")[0]
    at = [on_device(x) for x in (q, pool, None, *where.args)]
    assert not close(sparse_mla(*at, scale=1.01 * SCALE, value_dim=C, impl="triton")[0], want, BUDGET[torch.float32])


@pytest.mark.parametrize(("kind", "dtype"), POOLS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_scores_and_selection(name, kind, dtype, gen):
    where = make_where(name, gen)
    q, w = (torch.randn(where.num_queries, *s, generator=gen).to(dtype) for s in [(J, I), (J,)])
    pool, exact = pools(kind, where, I, gen, dtype, fp8_keys)
    want = index_score(q.double(), exact, w.double(), *where.args, scale=SCALE, impl="reference")
    at = [on_device(x) for x in (q, pool, w, *where.args)]
    score = index_score(*at, scale=SCALE, impl="triton")
    assert close(score, want, BUDGET[torch.float32])
    wrong = index_score(at[0], at[1], at[2] * 1.01, *at[3:], scale=SCALE, impl="triton")
    assert not where.end_T.any() or not close(wrong, want, BUDGET[torch.float32])
    keys = select_keys(*at, top_k=K, scale=SCALE, impl="triton")
    assert torch.equal(keys.cpu(), top_k(score.cpu(), K, impl="reference"))


def test_queries_rotated_on_the_way(gen):
    from glm5.kernels.index_score.triton import score_visible

    where = make_where("chunked prefill beside decode", gen)
    q, w = (torch.randn(where.num_queries, *s, generator=gen) for s in [(J, I), (J,)])
    pool, turns = make_pool(where, I, gen, torch.float32), rope_table(torch.arange(len(q)) * 7, R, 1e4, torch.float32)
    turned = torch.cat([rope(q[..., :R], *turns), q[..., R:]], dim=-1)
    want = index_score(turned.double(), pool.double(), w.double(), *where.args, scale=SCALE, impl="reference")
    at = [on_device(x) for x in (q, pool, w, *where.args)]
    score = torch.full_like(want, -math.inf, dtype=torch.float32, device=DEVICE)
    score_visible(*at, score, scale=SCALE, rotation=tuple(x.to(DEVICE) for x in turns))
    assert close(score, want, BUDGET[torch.float32])
    for impl in ("triton", "reference"):
        given = at[0].clone(), *at[1:]
        keys = select_keys(*given, top_k=K, scale=SCALE, rotation=tuple(x.to(DEVICE) for x in turns), impl=impl)
        assert torch.equal(keys.cpu(), top_k(score.cpu(), K, impl="reference"))


@pytest.mark.parametrize("num_groups", [1, 4])
def test_selection_by_groups_of_keys(num_groups, gen):
    from glm5.kernels.select_keys.triton import select_keys as select

    where = make_where("chunked prefill beside decode", gen)
    q, w = (torch.randn(where.num_queries, *s, generator=gen) for s in [(J, I), (J,)])
    at = [on_device(x) for x in (q, make_pool(where, I, gen, torch.float32), w, *where.args)]
    keys = select(*at, top_k=2, scale=SCALE, longest=8, num_groups=num_groups)
    assert torch.equal(keys.cpu(), top_k(index_score(*at, scale=SCALE).cpu(), 2, impl="reference"))


def test_pieces_of_queries_are_cut_as_all_of_them(gen, monkeypatch):
    """A prompt's queries at a long context are looked at some at a time, and stay crowded: by one kernel."""
    from glm5.kernels.select_keys import triton as module

    num_queries, seen, score_visible = 18, [], module.score_visible
    q, w = torch.randn(num_queries, J, I, generator=gen), torch.randn(num_queries, J, generator=gen)
    pool, table = torch.randn(6, 8, I, generator=gen), torch.arange(6).view(2, 3).int()
    row, end = (torch.arange(num_queries) % 2).sort().values.int(), torch.arange(1, num_queries + 1).int()
    at = [on_device(x) for x in (q, pool, w, table, row, end)]
    want = select_keys(*at, top_k=K, scale=SCALE, impl="triton")

    def watched(*given, tiling, **options):
        seen.append((len(given[0]), tiling))
        score_visible(*given, tiling=tiling, **options)

    monkeypatch.setattr(module, "score_visible", watched)
    monkeypatch.setattr(module, "_SCORES", 7 * 24)
    assert torch.equal(select_keys(*at, top_k=K, scale=SCALE, impl="triton"), want)
    assert [length for length, _ in seen] == [7, 7, 4]
    assert {tiling.queries for _, tiling in seen} == {8}


@pytest.mark.parametrize("groups", [{}, {"num_groups": 60}, {"num_groups": 10}], ids=["none", "small", "large"])
@pytest.mark.parametrize(("T", "S", "k"), [(1, 1, 1), (1, 3, 4), (2, 200, 20), (0, 9, 4)])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_best_keys(T, S, k, levels, groups, gen, monkeypatch):
    from glm5.kernels.top_k import triton

    monkeypatch.setattr(triton, "_RUN", 16)  # several runs
    monkeypatch.setattr(triton, "_CHUNK", 32)  # several chunks
    score = (torch.randint(levels, (T, S), generator=gen) - levels // 2).float()
    score[torch.rand(T, S, generator=gen) < 0.2] = -math.inf
    longest = {"longest": 8} if groups else {}
    assert torch.equal(triton.top_k(score.to(DEVICE), k, **longest, **groups).cpu(), top_k(score, k, impl="reference"))


@pytest.mark.parametrize("longest", [1, 1 << 20])
@pytest.mark.parametrize(
    ("row", "k", "want"),
    [
        ([-0.0, 0.0, -0.0], 1, [0]),
        ([math.nan, 1.0, math.inf, -math.nan], 1, [0]),
        ([math.nan, 1.0, math.inf, -math.nan], 3, [0, 2, 3]),
        ([-math.inf] * 3, 2, [-1, -1]),
        ([1e-45, -1e-45, 0.0, 3e38, -3e38], 3, [0, 2, 3]),
    ],
)
def test_the_order_of_scores(row, k, want, longest):
    from glm5.kernels.top_k.triton import top_k as best

    assert best(torch.tensor([row], device=DEVICE), k, longest=longest, num_groups=2).tolist() == [want]


def test_what_it_does_not_take_is_refused(gen):
    where = make_where("ragged packed", gen)
    at = [on_device(x) for x in where.args]
    pool = make_pool(where, 8, gen, torch.float32)
    keys, latents = fp8_keys(pool), fp8_latents(pool, LatentFormat(6, 2))
    q = torch.randn(where.num_queries, H, 8, generator=gen)
    opts = {"scale": SCALE, "impl": "triton"}
    with pytest.raises(ValueError, match=r"sparse_mla\[triton\] reads latents, got a pool of index keys"):
        sparse_mla(q, keys, None, *at, value_dim=6, **opts)
    with pytest.raises(ValueError, match="needs value_dim = 6 of this pool, got 5"):
        sparse_mla(q, latents, None, *at, value_dim=5, **opts)
    with pytest.raises(ValueError, match=r"index_score\[triton\] reads index keys, got a pool of latents"):
        index_score(q, latents, q[..., 0], *at, **opts)
    with pytest.raises(ValueError, match=r"top_k\[triton\] compares float32, got float64 scores"):
        top_k(torch.zeros(1, 4, dtype=torch.float64), 2, impl="triton")
    with pytest.raises(ValueError, match=r"top_k\[triton\] takes k up to 16384, got 20000"):
        top_k(torch.zeros(1, 30000), 20000, impl="triton")
