"""What deterministic mode takes of Triton's kernels, under the interpreter: a row alone is, bit for bit, what it is
among others. tests/gpu/test_invariance_cuda.py asks the same of GLM-5's shapes."""

import numpy as np
import pytest
import torch

from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.router import router
from glm5.kernels.row_linear import row_linear
from glm5.testing.numerics import rel_rms
from tests.support.arranged_keys import Paged
from tests.support.experts import make_experts, plain
from tests.support.interpreter import DTYPES, interpreted

pytestmark = interpreted


@pytest.fixture(autouse=True)
def products_of_one_row(monkeypatch):
    """The interpreter's `tl.dot` is numpy's product. OpenBLAS gives rows of a tile other last bits on some processors,
    by their place in it (seen with AVX2 alone); einsum adds in one order for all."""
    monkeypatch.setattr(np, "matmul", lambda a, b, **how: np.einsum("...ij,...jk->...ik", a, b, **how))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("plain", torch.float16),
        *(pytest.param(layout, torch.float32, marks=pytest.mark.long) for layout in ("plain", "fp8")),
    ],
    ids=str,
)
def test_keys_and_attention_are_of_a_query_alone(layout, dtype, gen):
    case = Paged(gen, dtype, layout=layout)
    every = torch.arange(case.num_queries)
    keys = case.selection(every, "invariant_triton")
    want = case.attention(keys, every, "invariant_triton")
    # Places behind a query's last key are not looked at, and none of them has one.
    assert rel_rms(want[0], case.attention(keys, every, "gather")[0]) < 2e-3
    for count in (case.num_queries, 7, 2, 1):
        some = case.shuffled(count)
        order = some.argsort()
        assert torch.equal(case.selection(some, "invariant_triton"), keys[some[order]])
        for got, whole in zip(case.attention(keys, some, "invariant_triton"), want, strict=True):
            assert torch.equal(got, whole[some[order]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_router_sees_one_row(dtype, gen):
    """At every place of a pass, whoever stands beside it."""
    x, weight = torch.randn(32, 72, generator=gen).to(dtype), (torch.randn(24, 72, generator=gen) * 0.3).to(dtype)
    how = {"top_k": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scaling_factor": 2.5}
    bias = torch.randn(24, generator=gen)
    want = router(x, weight, bias, impl="invariant_triton", **how)
    for _ in range(3):
        order = torch.randperm(32, generator=gen)
        for got, whole in zip(router(x[order], weight, bias, impl="invariant_triton", **how), want, strict=True):
            assert torch.equal(got, whole[order])
    for row in (0, 5, 31):
        alone = torch.zeros_like(x).index_copy_(0, torch.tensor([9]), x[row : row + 1])
        for got, whole in zip(router(alone, weight, bias, impl="invariant_triton", **how), want, strict=True):
            assert torch.equal(got[9], whole[row])


@pytest.mark.parametrize(
    ("dtype", "with_shared"),
    [
        (torch.float16, True),
        pytest.param(torch.float16, False, marks=pytest.mark.long),
        *(pytest.param(torch.float32, shared, marks=pytest.mark.long) for shared in (True, False)),
    ],
    ids=str,
)
def test_experts_of_a_row_are_its_own(dtype, with_shared, gen):
    """Of rows in any number, of which many or few share an expert."""
    case = make_experts(40, 4, 2, 200, 72, gen).to("cpu", dtype)
    shared = case.shared if with_shared else None

    def run(rows):
        chosen = case.x[rows], case.gate_up, case.down, case.weight[rows], case.expert[rows]
        return grouped_experts(*chosen, shared=shared, impl="invariant_triton")

    want = run(torch.arange(40))
    for count in (1, 2, 9, 40):
        some = torch.randperm(40, generator=gen)[:count]
        assert torch.equal(run(some), want[some])
    nobodys = torch.arange(40) % 3 == 0
    case.expert[nobodys] = -1
    got = run(torch.arange(40))
    assert torch.equal(got[~nobodys], want[~nobodys])
    assert not got[nobodys].any()


@pytest.mark.long
def test_the_usual_tilings_do_show_their_batch(gen):
    """The control: of how many queries and rows something changes when they come alone."""
    queries, case = Paged(gen, torch.float32), make_experts(32, 4, 2, 200, 72, gen)
    every = torch.arange(queries.num_queries)
    keys = queries.selection(every, "invariant_triton")
    whole = queries.attention(keys, every, "triton")[0]
    attended = sum(
        not torch.equal(queries.attention(keys, every[t : t + 1], "triton")[0][0], whole[t]) for t in range(4)
    )
    together = grouped_experts(*case[:5], impl="triton")
    summed = 0
    for t in range(4):
        x, weight, expert = (rows[t : t + 1] for rows in (case.x, case.weight, case.expert))
        alone = grouped_experts(x, case.gate_up, case.down, weight, expert, impl="triton")
        summed += not torch.equal(alone[0], together[t])
    print(f"of 4 that differ: {attended} queries, {summed} rows of experts")
    assert attended
    assert summed


# The products' and the sums' own rounding, in the dtype of their results: of rows that are rounded once or twice.
PLAIN = {torch.float32: 1e-6, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_plain_product_is_its_own_among_any_number(dtype, gen):
    x, weight = torch.randn(150, 72, generator=gen).to(dtype), torch.randn(100, 72, generator=gen).to(dtype)
    want = row_linear(x, weight, impl="triton")
    assert rel_rms(want, x.double() @ weight.double().T) < PLAIN[dtype]
    for count in (1, 64):
        some = torch.randperm(150, generator=gen)[:count]
        assert torch.equal(row_linear(x[some], weight, impl="triton"), want[some])
    strided = torch.cat([x, x], dim=1)[:, :72]
    assert torch.equal(row_linear(strided, weight, impl="triton"), want)


HALF = pytest.param(torch.float16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_plain_experts_of_a_row_are_its_own_among_any_number(dtype, gen):
    case = plain(make_experts(12, 2, 1, 72, 40, gen), dtype)

    def run(rows, shared=case.shared):
        chosen = case.x[rows], case.gate_up, case.down, case.weight[rows], case.expert[rows]
        return grouped_experts(*chosen, shared=shared, impl="invariant_triton")

    want = run(torch.arange(12))
    assert rel_rms(want, grouped_experts(*case[:5], shared=case.shared, impl="reference").double()) < 2 * PLAIN[dtype]
    assert torch.equal(run(torch.tensor([7])), want[7:8])
    nobodys = torch.arange(12) % 3 == 0
    case.expert[nobodys] = -1
    got = run(torch.arange(12))
    assert torch.equal(got[~nobodys], want[~nobodys])
    assert not got[nobodys].any()


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_queries_and_routers_see_one_row_among_any_number(dtype, gen):
    q, w = torch.randn(70, 2, 40, generator=gen).to(dtype), torch.randn(2, 32, 48, generator=gen).to(dtype)
    cos, sin = (torch.randn(70, 4, generator=gen).to(dtype) for _ in range(2))
    x, weight = torch.randn(70, 72, generator=gen).to(dtype), torch.randn(24, 72, generator=gen).to(dtype)
    how = {"top_k": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scaling_factor": 2.5}

    def run(rows):
        chosen = router(x[rows], weight, torch.zeros(24), impl="invariant_triton", **how)
        return mla_queries(q[rows], w, cos[rows], sin[rows], impl="invariant_triton"), *chosen

    want = run(torch.arange(70))
    for count in (1,):
        some = torch.randperm(70, generator=gen)[:count]
        for got, whole in zip(run(some), want, strict=True):
            assert torch.equal(got, whole[some])
