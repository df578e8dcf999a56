"""The indexer's loss in Triton, under its interpreter where there is no GPU: against the definition in float64."""

import pytest
import torch

from glm5.kernels.index_kl import index_kl
from glm5.kernels.sparse_mla import sparse_mla
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import DTYPES, interpreted

J, I, H, L, C, K = 3, 12, 2, 20, 12, 6
SCALES = {"index_scale": 0.4, "scale": 0.3}
# Inputs are rounded before both runs. float16 rounds gradients of products and results.
BUDGET = {torch.float32: 5e-6, torch.float16: 5e-3}
LENGTHS = {False: [5, 70, 1, 9], True: [3, 11, 1]}  # over all keys more than a tile of 64; over selected ones few


class Case:
    """Whole sequences, a page each, as a training pass has them; two layers are served."""

    def __init__(self, gen: torch.Generator, dtype: torch.dtype, *, selected: bool):
        lengths = LENGTHS[selected]
        num, longest = sum(lengths), max(lengths)
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
        end = torch.cat([torch.arange(1, n + 1) for n in lengths]).int()
        self.where = torch.arange(len(lengths), dtype=torch.int32)[:, None], row, end
        pool = (len(lengths), longest)
        self.leaves = [torch.randn(s, generator=gen).to(dtype) for s in ((num, J, I), (*pool, I), (num, J))]
        self.leaves[2] = self.leaves[2].float()
        self.attention = [
            tuple(torch.randn(s, generator=gen).to(dtype) for s in ((num, H, L), (*pool, L))) for _ in range(2)
        ]
        order = torch.rand(num, longest, generator=gen).masked_fill(torch.arange(longest) >= end[:, None], 2.0)
        keys = order.argsort(dim=1)[:, :K].int()
        self.keys = keys.masked_fill(keys >= end[:, None], -1) if selected else None

    def run(self, impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        leaves = [one.to(to).requires_grad_() for one, to in zip(self.leaves, (dtype, dtype, wide), strict=True)]
        served = []
        for q, pool in self.attention:
            q, pool = q.to(dtype), pool.to(dtype)
            lse = sparse_mla(q.double(), pool.double(), self.keys, *self.where, scale=SCALES["scale"], value_dim=C)[1]
            served.append((q, pool, lse.to(wide)))
        loss = index_kl(*leaves, served, self.keys, *self.where, **SCALES, impl=impl)
        (loss * 0.5).backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]


def apart(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    return [rel_rms(a, b) for a, b in zip(got, want, strict=True)]


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("selected", [False, True], ids=["all", "selected"])
def test_agrees_with_float64(selected, dtype, gen, monkeypatch):
    """float32: atomic additions, all queries at once; float16: in order, some at a time."""
    in_order = dtype == torch.float16
    if in_order:
        monkeypatch.setattr("glm5.kernels.index_kl.triton._SCORES", 10 * (6 if selected else 70))
    case = Case(gen, dtype, selected=selected)
    want = case.run("reference", torch.float64)
    torch.use_deterministic_algorithms(mode=in_order)
    got = case.run("triton", dtype)
    assert max(apart(got, want)) < BUDGET[dtype]


@interpreted
@pytest.mark.parametrize("selected", [False, True], ids=["all", "selected"])
def test_budget_notices_a_query_of_a_layer(selected, gen):
    case = Case(gen, torch.float32, selected=selected)
    want = case.run("reference", torch.float64)
    case.attention[1][0][12] *= 2
    assert min(apart(case.run("triton", torch.float32), want)) > 10 * BUDGET[torch.float32]
