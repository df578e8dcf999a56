"""Muon over shards: ranks that each hold some rows, simulated in one process, update as one that holds all."""

from itertools import pairwise

import pytest
import torch

from glm5.train.optim.exchange import Exchange, RowSplit, plan_matrices
from glm5.train.optim.newton_schulz import flops, orthogonalize

EXACT = 1e-12  # float64, products over the same rows in other batches


def chunked(count, parts, unit=1):
    size = -(-count // parts)
    edges = [min(i * size, count) * unit for i in range(parts + 1)]
    return [[(a, b)] if b > a else [] for a, b in pairwise(edges)]


def run(tensors, cuts, size):
    """Every rank's updates, joined; and the ranks."""
    ranks = [Exchange(cuts, rank, size, lambda parts: parts) for rank in range(size)]
    given = [
        {
            name: torch.cat([tensors[name][a:b] for a, b in cut.spans[rank]] or [tensors[name][:0]])
            for name, cut in cuts.items()
        }
        for rank in range(size)
    ]
    out = [one.outgoing(own) for one, own in zip(ranks, given, strict=True)]
    done = [
        one.orthogonal(own, [out[src][one._rank] for src in range(size)], orthogonalize)
        for one, own in zip(ranks, given, strict=True)
    ]
    back = [one.returning(own, made) for one, own, made in zip(ranks, given, done, strict=True)]
    placed = [
        one.placed(own, [back[src][one._rank] for src in range(size)], made)
        for one, own, made in zip(ranks, given, done, strict=True)
    ]
    joined = {}
    for name, cut in cuts.items():
        joined[name] = torch.full_like(tensors[name], float("nan"))
        for rank in range(size):
            at = 0
            for a, b in cut.spans[rank]:
                joined[name][a:b] = placed[rank][name][at : at + b - a]
                at += b - a
    return joined, ranks


def whole(tensor, rows):
    """Each matrix by itself."""
    parts, at, turn = [], 0, 0
    while at < len(tensor):
        num_rows = rows[turn % len(rows)]
        parts.append(orthogonalize(tensor[at : at + num_rows]))
        at, turn = at + num_rows, turn + 1
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("heads", "rows", "size"),
    [(20, (12,), 8), (20, (8, 6), 8), (5, (4, 3), 3), (3, (5,), 8), (5, (4, 4), 2)],
    ids=["20 heads on 8", "20 heads of two matrices on 8", "5 on 3", "fewer heads than ranks", "between two of a head"],
)
def test_shards_update_as_the_whole(heads, rows, size):
    gen = torch.Generator().manual_seed(heads)
    total = heads * sum(rows)
    tensors = {
        "heads": torch.randn(total, 9, generator=gen, dtype=torch.float64),
        "matrix": torch.randn(21, 10, generator=gen, dtype=torch.float64),
    }
    cuts = {
        "heads": RowSplit(total, 9, rows, chunked(total, size)),
        "matrix": RowSplit(21, 10, (21,), chunked(21, size)),
    }
    got, ranks = run(tensors, cuts, size)
    assert ranks[0].names == set(cuts)
    for name, cut in cuts.items():
        assert (got[name] - whole(tensors[name], cut.rows)).abs().max() < EXACT, name
    wrong = whole(tensors["heads"], (total,))
    assert (got["heads"] - wrong).abs().max() > 1e-2, "heads orthogonalised together are something else"


def test_twenty_heads_on_eight_ranks_are_owned_whole_and_evenly():
    rows, cols, size = 12, 9, 8
    matrices = plan_matrices({"heads": RowSplit(20 * rows, cols, (rows,), chunked(20 * rows, size))}, size)
    assert len(matrices) == 20
    load = [sum(flops(rows, cols) for one in matrices if one.owner == rank) for rank in range(size)]
    assert max(load) <= 3 * flops(rows, cols)
    assert {len(one.pieces) for one in matrices} == {1, 2}, "2.5 heads a rank: some lie in two shards"
    sent = sum(
        Exchange({"heads": RowSplit(20 * rows, cols, (rows,), chunked(20 * rows, size))}, rank, size, list).bytes_sent(
            8
        )
        for rank in range(size)
    )
    gathered_by_all = 20 * rows * cols * 8 * (size - 1)
    assert sent < 0.2 * gathered_by_all


def test_shards_on_borders_of_heads_and_experts_exchange_nothing():
    cuts = {
        "heads": RowSplit(64, 9, (5, 3), chunked(8, 4, 8)),
        "experts by rows": RowSplit(
            8 * 6, 9, (3, 3), [[(e * 6 + 3 * r, e * 6 + 3 * r + 3) for e in range(8)] for r in (0, 1)]
        ),
    }

    def never(_parts):
        pytest.fail("something was exchanged")

    assert not Exchange({"heads": cuts["heads"]}, 0, 4, never).updates({}, orthogonalize)
    assert Exchange({"heads": cuts["heads"]}, 0, 4, never).bytes_sent(4) == 0
    assert Exchange({"e": cuts["experts by rows"]}, 0, 2, never).bytes_sent(4) == 0


def test_rows_of_every_expert_on_every_rank():
    """A stack of fewer experts than ranks, cut along its rows in the middle of matrices."""
    tensor = torch.randn(2 * 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spans = [[(e * 8 + 2 * r, e * 8 + 2 * r + 2) for e in range(2)] for r in range(4)]
    got, _ = run({"experts": tensor}, {"experts": RowSplit(16, 5, (4, 4), spans)}, 4)
    assert (got["experts"] - whole(tensor, (4, 4))).abs().max() < EXACT
