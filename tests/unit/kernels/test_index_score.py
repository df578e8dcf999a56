"""Every implementation of index_score agrees with the formula, and the budget can tell right from wrong."""

import numpy as np
import pytest
import torch

from glm5.kernels.index_score import index_score
from glm5.testing.numerics import rel_rms
from tests.support.paged import CASES, Where, make_pool, make_where

IMPLS = ["reference", "tiled"]
FORWARD = [*IMPLS, "invariant"]
J, I, SCALE = 3, 6, 6**-0.5
# Inputs are rounded before both runs and all arithmetic is float32 or better. Measured: float64 1.6e-16, others 1.3e-7.
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}


def make_case(name, gen, dtype=torch.float64):
    where = make_where(name, gen)
    q, w = (torch.randn(where.num_queries, *s, generator=gen).to(dtype) for s in [(J, I), (J,)])
    return where, q, make_pool(where, I, gen, dtype), w


def oracle(where: Where, q, pool, w) -> torch.Tensor:
    keys, scores = where.logical(pool), np.full((where.num_queries, where.num_keys), -np.inf)
    for t, (row, end) in enumerate(zip(where.row_T.tolist(), where.end_T.tolist(), strict=True)):
        hits = np.maximum(keys[row][:end] @ q[t].double().numpy().T * SCALE, 0.0)
        scores[t, :end] = hits @ w[t].double().numpy()
    return torch.from_numpy(scores)


def error(got, want) -> float:
    assert torch.equal(got.isneginf(), want.isneginf())  # the mask is exact, never approximate
    assert not got.isnan().any()
    return rel_rms(got[want.isfinite()], want[want.isfinite()])


@pytest.mark.parametrize("impl", FORWARD)
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name, dtype, impl, gen):
    where, q, pool, w = make_case(name, gen, dtype)
    got = index_score(q, pool, w, *where.args, scale=SCALE, impl=impl)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert error(got, oracle(where, q, pool, w)) < BUDGET[dtype]


def test_budget_notices_one_percent_of_one_head(gen):
    where, q, pool, w = make_case("ragged packed", gen, torch.float32)
    changed = w.clone()
    changed[:, -1] *= 1.01
    got = index_score(q, pool, changed, *where.args, scale=SCALE)
    assert error(got, oracle(where, q, pool, w)) > 10 * BUDGET[torch.float32]


@pytest.mark.parametrize("impl", FORWARD)
@pytest.mark.parametrize("name", CASES)
def test_paged_equals_contiguous(name, impl, gen):
    where, q, pool, w = make_case(name, gen, torch.float32)
    plain, plain_pool = where.contiguous(pool)
    got = index_score(q, pool, w, *where.args, scale=SCALE, impl=impl)
    assert error(index_score(q, plain_pool, w, *plain.args, scale=SCALE, impl=impl), got) < BUDGET[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "name", ["equal requests", "ragged packed", "chunked prefill beside decode", "decode with padding"]
)
def test_gradients(name, impl, gen):
    where, q, pool, w = make_case(name, gen)
    seen = ~where.hidden()
    pool = pool.nan_to_num(0.5)  # gradcheck cannot perturb a NaN

    def visible(q, pool, w):
        return index_score(q, pool, w, *where.args, scale=SCALE, impl=impl)[seen]

    inputs = tuple(t.requires_grad_() for t in (q, pool, w))
    assert torch.autograd.gradcheck(visible, inputs)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_unseen_slots_are_zero(impl, gen):
    where, q, pool, w = make_case("chunked prefill beside decode", gen)
    inputs = [t.requires_grad_() for t in (q, pool, w)]
    score = index_score(*inputs, *where.args, scale=SCALE, impl=impl)
    score.backward(torch.where(score.isneginf(), float("nan"), 1.0))
    assert not any(t.grad.isnan().any() for t in inputs)
    assert (pool.grad[pool.isnan()] == 0).all()


def test_unknown_implementation(gen):
    where, q, pool, w = make_case("one query, one key", gen)
    with pytest.raises(ValueError, match="index_score: unknown impl 'fast'"):
        index_score(q, pool, w, *where.args, scale=SCALE, impl="fast")
