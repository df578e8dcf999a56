"""A product per head, and queries absorbed and rotated in one launch, under Triton's interpreter where there is no
GPU: against float64."""

import pytest
import torch

from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.per_head import per_head
from glm5.kernels.rope import rope, rope_table
from glm5.testing.numerics import rel_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, N, R, C = 3, 24, 8, 70
# Inputs are rounded before both runs. Measured: 1e-7; float16 rounds the result and the rotation's products, 3e-4.
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3}


def make_case(tokens: int, gen: torch.Generator, dtype: torch.dtype):
    q, w = (torch.randn(*s, generator=gen).to(dtype) for s in [(tokens, H, N + R), (H, N, C)])
    return q, w, *rope_table(torch.arange(tokens) * 13, R, 1e4, dtype)


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 18])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_queries(impl, tokens, dtype, gen):
    if (impl, dtype) == ("triton", torch.float64):
        return
    case = make_case(tokens, gen, dtype)
    q, w, cos, sin = (x.double() for x in case)
    want = torch.cat([torch.einsum("thn,hnc->thc", q[..., :N], w), rope(q[..., N:], cos, sin)], dim=-1)
    at = [x.to(DEVICE) for x in case]
    got = mla_queries(*at, impl=impl)
    assert got.dtype == dtype
    assert rel_rms(got.cpu(), want) < BUDGET[dtype]
    assert torch.equal(mla_queries(*at, early=torch.empty_like(got), impl=impl), got)
    wrong = mla_queries(at[0], at[1] * 1.01, *at[2:], impl=impl).cpu()  # the control
    assert tokens == 0 or rel_rms(wrong, want) > 3 * BUDGET[dtype]


@pytest.mark.parametrize("outputs", [0, 16, 32])
def test_every_way_to_multiply(outputs, gen):
    from glm5.kernels.mla_queries.triton import Tiling
    from glm5.kernels.mla_queries.triton import mla_queries as run

    case = make_case(18, gen, torch.float16)
    want = mla_queries(*(x.double() for x in case), impl="reference")
    got = run(*(x.to(DEVICE) for x in case), Tiling(16, outputs))
    assert rel_rms(got.cpu(), want) < BUDGET[torch.float16]


@pytest.mark.parametrize("tokens", [0, 1, 18])
def test_a_product_per_head(tokens, gen):
    q, w, *_ = make_case(tokens, gen, torch.float32)
    x = q[..., :N]  # rows of longer ones
    want = torch.einsum("thi,hio->tho", x.double(), w.double())
    assert rel_rms(per_head(x.to(DEVICE), w.to(DEVICE)).cpu(), want) < BUDGET[torch.float32]


def test_what_is_refused(gen):
    q, w, cos, sin = make_case(2, gen, torch.float32)
    with pytest.raises(ValueError, match="mla_queries: unknown impl 'fast', expected one of auto, triton, reference"):
        mla_queries(q, w, cos, sin, impl="fast")
