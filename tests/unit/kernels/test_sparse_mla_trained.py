"""Sparse attention with its gradient in Triton, under its interpreter where there is no GPU: against the definition in
float64, added up in one order and in any."""

import pytest
import torch

from glm5.kernels.add_rows import add_rows
from glm5.kernels.sparse_mla import sparse_mla
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import DTYPES, interpreted
from tests.support.paged import make_keys, make_pool, make_where

H, C, R, K, SCALE = 3, 20, 8, 6, 0.3
# Inputs are rounded before both runs. float32: sums in another order, measured 4e-7; float16 rounds p, ds and results.
BUDGET = {torch.float32: 3e-6, torch.float16: 3e-3}
NAMES = ["one query, one key", "ragged packed", "chunked prefill beside decode", "decode with padding"]


def found(case, keys, where, impl: str, dtype: torch.dtype, grads) -> list[torch.Tensor]:
    """Result, lse and both gradients."""
    q, pool = (one.to(dtype).clone().requires_grad_() for one in case)
    out, lse = sparse_mla(q, pool, keys, *where.args, scale=SCALE, value_dim=C, impl=impl)
    seen = lse.isfinite()
    torch.autograd.backward([out, lse], [grads[0].to(dtype), grads[1].to(lse.dtype).masked_fill(~seen, 0.0)])
    return [out, lse.masked_fill(~seen, 0.0), q.grad, pool.grad]


def make(name: str, gen: torch.Generator, dtype: torch.dtype):
    where = make_where(name, gen)
    num = where.num_queries
    q = torch.randn(num, H, C + R, generator=gen).to(dtype)
    pool = make_pool(where, C + R, gen, dtype).nan_to_num(0.0)
    grads = torch.randn(num, H, C, generator=gen).to(dtype), torch.randn(num, H, generator=gen)
    return (q, pool), make_keys(where, K, gen), where, grads


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_float64(name, dtype, gen):
    """float32: atomic additions; float16: in the order of queries."""
    in_order = dtype == torch.float16
    case, keys, where, grads = make(name, gen, dtype)
    want = found(case, keys, where, "gather", torch.float64, grads)
    torch.use_deterministic_algorithms(mode=in_order)
    got = found(case, keys, where, "trained", dtype, grads)
    assert [one.dtype for one in got] == [dtype, torch.float32, dtype, dtype]
    assert max(rel_rms(a, b) for a, b in zip(got, want, strict=True)) < BUDGET[dtype]


@interpreted
def test_budget_notices_a_key_less_and_another_scale(gen):
    case, keys, where, grads = make("ragged packed", gen, torch.float32)
    want = found(case, keys, where, "gather", torch.float64, grads)
    keys = keys.clone()
    keys[-1, 0] = -1
    got = found(case, keys, where, "trained", torch.float32, grads)
    assert min(rel_rms(a, b) for a, b in zip(got, want, strict=True)) > 10 * BUDGET[torch.float32]


@interpreted
def test_rows_are_added_where_they_belong(gen):
    to, rows = torch.randn(7, 5, generator=gen), torch.randn(30, 5, generator=gen)
    slots = torch.randint(-1, 6, (30,), generator=gen).int()
    rows[slots < 0] = float("nan")
    want, got = to.double(), to.clone()
    add_rows(want, slots, rows.double(), impl="reference")
    add_rows(got, slots, rows, impl="triton")
    assert rel_rms(got, want) < BUDGET[torch.float32]
    assert torch.equal(got[6], to[6])
