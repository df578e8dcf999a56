"""Groups of decoding requests: every query that sees a key is in one of them, alike ones together."""

import numpy as np
import pytest
import torch

from glm5.kernels import groups as grouping
from glm5.kernels.groups import FewQueries, few_queries
from glm5.kernels.select_keys import select_keys
from glm5.kernels.sparse_mla import sparse_mla
from tests.support.paged import CASES, PAGE_SIZE, make_where


@pytest.mark.parametrize("cut", ["as shipped", "one request a group"])
@pytest.mark.parametrize("name", CASES)
def test_every_query_that_sees_a_key_is_in_one_group(name, cut, gen, monkeypatch):
    if cut != "as shipped":
        monkeypatch.setattr(grouping, "_CACHED", 1)
    where = make_where(name, gen)
    rows, ends, seen = where.row_T.numpy(), where.end_T.numpy(), []
    for group in FewQueries(*where.args, PAGE_SIZE).groups(num_heads=4):
        seen += group.query_X.tolist()
        length = len(group.query_X) // len(group.row_G)
        assert np.array_equal(rows[group.query_X], np.repeat(group.row_G, length))
        assert 0 < ends[group.query_X].max() == group.num_keys <= group.num_pages * PAGE_SIZE
        assert group.whole == (group.query_X.tolist() == list(range(where.num_queries)))
        assert cut == "as shipped" or len(group.row_G) == 1
    assert len(seen) == len(set(seen))
    assert (ends[sorted(set(range(where.num_queries)) - set(seen))] == 0).all()


def test_requests_with_unlike_contexts_are_kept_apart():
    row_T = torch.arange(4).repeat_interleave(2).int()
    end_T = torch.tensor([10, 11, 4000, 4001, 12, 13, 4000, 4001]).int()
    few = FewQueries(torch.zeros(4, 63, dtype=torch.int32), row_T, end_T, 64)
    planned = [(group.row_G.tolist(), group.num_pages) for group in few.groups(num_heads=16)]
    assert planned == [([0, 2], 1), ([1, 3], 63)]


def test_what_they_are_for():
    table, end_T = torch.zeros(32, 100, dtype=torch.int32), torch.full((128,), 6400).int()
    assert few_queries(table, end_T, num_heads=16)
    assert not few_queries(table, end_T, num_heads=64)  # many keys: better in blocks
    assert not few_queries(table[:8], end_T // 64, num_heads=16)  # many queries: better cut
    assert not few_queries(table, end_T.to("meta"), num_heads=16)


def test_other_devices_are_refused():
    where = [torch.zeros(shape, dtype=torch.int32, device="meta") for shape in [(1, 1), (1,), (1,)]]
    q, pool, w = (torch.zeros(shape, device="meta") for shape in [(1, 2, 4), (1, 64, 4), (1, 2)])
    with pytest.raises(ValueError, match="needs tensors in host memory, got meta"):
        select_keys(q, pool, w, *where, top_k=1, scale=1.0, impl="grouped")
    with pytest.raises(ValueError, match="needs tensors in host memory, got meta"):
        sparse_mla(q, pool, None, *where, scale=1.0, value_dim=2, impl="grouped")
