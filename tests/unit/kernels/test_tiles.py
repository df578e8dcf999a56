"""Cutting into tiles: every query once, views where pages allow, and results that do not depend on the cut."""

import pytest
import torch

from glm5.kernels import tiles as tiling
from glm5.kernels.attention_target import head_mean_probs
from glm5.kernels.index_score import index_score
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.tiles import TileReader, plan_tiles
from glm5.testing.numerics import rel_rms
from tests.support.paged import CASES, PAGE_SIZE, make_keys, make_pool, make_where

H, I, L, C = 2, 6, 6, 4
BUDGET = 1e-13  # float64 throughout: only the order of sums differs. Measured 5e-16.


@pytest.fixture(params=["as shipped", "cut small"])
def tile_size(request, monkeypatch):
    if request.param == "cut small":
        monkeypatch.setattr(tiling, "_MIN_QUERIES", 2)
        monkeypatch.setattr(tiling, "_MAX_QUERIES", 3)
        monkeypatch.setattr(tiling, "_CACHED", 40)


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_query_that_sees_a_key_is_in_one_tile(name, num_heads, gen):
    where = make_where(name, gen)
    seen = []
    for tile in plan_tiles(where.row_T, where.end_T, num_heads):
        queries = list(range(tile.start, tile.stop))
        seen += queries
        assert len(queries) == tile.length * len(tile.rows)
        for g, (row, end) in enumerate(zip(tile.rows, tile.ends, strict=True)):
            own = queries[g * tile.length : (g + 1) * tile.length]
            assert where.row_T[own].tolist() == [row] * tile.length
            assert end == where.end_T[own].max() > 0
    blind = where.end_T == 0
    assert seen == sorted(set(seen))
    assert blind[sorted(set(range(where.num_queries)) - set(seen))].all()


def test_long_runs_are_cut_and_short_ones_joined():
    row_T = torch.arange(3).repeat_interleave(torch.tensor([300, 1, 1]))
    end_T = torch.cat([torch.arange(1, 301), torch.tensor([50, 70])])
    cut = [(tile.start, tile.stop, tile.ends) for tile in plan_tiles(row_T, end_T, num_heads=4)]
    assert cut == [(0, 128, [128]), (128, 256, [256]), (256, 300, [300]), (300, 302, [50, 70])]


@pytest.mark.parametrize(
    ("table", "ends", "is_view"),
    [
        ([[0, 1], [2, 3]], [8, 8], True),
        ([[1, 2], [5, 6]], [8, 8], True),
        ([[1, 2], [5, 6]], [8, 7], False),  # a copy, so that what the second request does not own can be cleared
        ([[1, 0], [5, 6]], [8, 8], False),
        ([[1, 0], [5, 9]], [4, 4], True),  # one page each is always in order
        ([[5, 6], [1, 2]], [8, 8], False),
        ([[1, 2], [1, 2]], [8, 8], False),  # a shared prefix: gradients of both requests must arrive
        ([[1, 2], [2, 3]], [8, 8], False),
    ],
)
def test_reading_and_adding_back(table, ends, is_view, gen):
    pool = torch.randn(10, PAGE_SIZE, 3, generator=gen, dtype=torch.float64)
    table, ends = torch.tensor(table), torch.tensor(ends)
    reader = TileReader(table, PAGE_SIZE)
    (tile,) = plan_tiles(torch.arange(2), ends, num_heads=1)
    got = reader.read(pool, tile)
    assert (got.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()) == is_view
    want = pool[table].flatten(1, 2)[:, : tile.num_keys]
    want = want.masked_fill((torch.arange(tile.num_keys) >= ends[:, None])[..., None], 0.0)
    assert torch.equal(got, want)

    total, one_by_one = torch.zeros_like(pool), torch.zeros_like(pool)
    reader.add(total, tile, want)
    for row, keys in zip(table.tolist(), want, strict=True):
        for s, key in enumerate(keys):
            one_by_one[row[s // PAGE_SIZE], s % PAGE_SIZE] += key
    assert torch.equal(total, one_by_one)


def test_reads_a_pool_that_is_part_of_a_larger_one(gen):
    layers = torch.randn(3, 10, PAGE_SIZE, 3, generator=gen)
    reader = TileReader(torch.tensor([[1, 2], [5, 6]]), PAGE_SIZE)
    (tile,) = plan_tiles(torch.arange(2), torch.tensor([8, 8]), num_heads=1)
    assert torch.equal(reader.read(layers[2], tile), layers[2, [1, 2, 5, 6]].view(2, 8, 3))


@pytest.mark.usefixtures("tile_size")
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_cut(name, paged, gen):
    """Forward and backward of the three tiled ops against their references, on shuffled and on contiguous pages."""
    where = make_where(name, gen)
    keys_PZI, latent_PZL = (make_pool(where, width, gen, torch.float64) for width in (I, L))
    chosen = make_keys(where, 5, gen)
    if not paged:
        plain, keys_PZI = where.contiguous(keys_PZI)
        _, latent_PZL = where.contiguous(latent_PZL)
        where = plain
    q_TJI, w_TJ, q_THL = (
        torch.randn(where.num_queries, *shape, generator=gen, dtype=torch.float64) for shape in [(H, I), (H,), (H, L)]
    )

    def outcome(index_impl: str, mla_impl: str, target_impl: str) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q_TJI, keys_PZI, w_TJ, q_THL, latent_PZL)]
        score = index_score(*inputs[:3], *where.args, scale=0.3, impl=index_impl)
        loss, results = score[score.isfinite()].square().sum(), [score.nan_to_num(neginf=0.0)]
        for keys in (chosen, None):
            out, lse = sparse_mla(*inputs[3:], keys, *where.args, scale=0.3, value_dim=C, impl=mla_impl)
            loss = loss + out.square().sum() + lse[lse.isfinite()].square().sum()
            target = head_mean_probs(*inputs[3:], keys, lse.detach(), *where.args, scale=0.3, impl=target_impl)
            results += [out, lse.nan_to_num(neginf=0.0), target]
        loss.backward()
        return results + [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]

    got, want = outcome("tiled", "masked", "tiled"), outcome("reference", "gather", "reference")
    for g, w in zip(got, want, strict=True):
        assert rel_rms(g, w) < BUDGET
