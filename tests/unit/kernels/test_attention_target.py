"""head_mean_probs against probabilities computed one query at a time in float64."""

import numpy as np
import pytest
import torch

from glm5.kernels.attention_target import head_mean_probs
from glm5.kernels.sparse_mla import sparse_mla
from glm5.testing.numerics import rel_rms
from tests.support.paged import CASES, Where, make_keys, make_pool, make_where

IMPLS = ["reference", "tiled"]
H, L, C, K, SCALE = 3, 6, 4, 5, 0.3
# Inputs are rounded before both runs. Measured: float64 2e-16, others 8e-8.
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}


def make_case(name, selection, gen, dtype=torch.float64):
    where = make_where(name, gen)
    q = torch.randn(where.num_queries, H, L, generator=gen).to(dtype)
    keys = make_keys(where, K, gen) if selection == "selected" else None
    return where, q, make_pool(where, L, gen, dtype), keys


def oracle(where: Where, q, pool, keys) -> torch.Tensor:
    latents = where.logical(pool)
    target = np.zeros((where.num_queries, where.num_keys if keys is None else K))
    for t, (row, end) in enumerate(zip(where.row_T.tolist(), where.end_T.tolist(), strict=True)):
        columns = range(where.num_keys) if keys is None else keys[t].tolist()
        place = [i for i, s in enumerate(columns) if 0 <= s < end]
        if not place:
            continue
        p = np.exp(q[t].double().numpy() @ latents[row][[columns[i] for i in place]].T * SCALE)
        target[t, place] = (p / p.sum(-1, keepdims=True)).mean(0)
    return torch.from_numpy(target)


def run(where, q, pool, keys, impl):
    lse = sparse_mla(q, pool, keys, *where.args, scale=SCALE, value_dim=C)[1]
    return head_mean_probs(q, pool, keys, lse, *where.args, scale=SCALE, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("selection", ["selected", "all"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name, selection, dtype, impl, gen):
    where, q, pool, keys = make_case(name, selection, gen, dtype)
    want = oracle(where, q, pool, keys)
    got = run(where, q.requires_grad_(), pool.requires_grad_(), keys, impl)
    assert not got.requires_grad
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(got == 0, want == 0)
    assert rel_rms(got, want) < BUDGET[dtype]


def test_budget_notices_one_percent_of_scale(gen):
    where, q, pool, keys = make_case("ragged packed", "selected", gen, torch.float32)
    got = run(where, q * 1.01, pool, keys, "auto")
    assert rel_rms(got, oracle(where, q, pool, keys)) > 10 * BUDGET[torch.float32]


def test_unknown_implementation(gen):
    where, q, pool, keys = make_case("one query, one key", "selected", gen)
    with pytest.raises(ValueError, match="attention_target: unknown impl 'fast'"):
        run(where, q, pool, keys, "fast")
