"""rms_norm against plain float64, and the order of its cast and its multiply."""

import numpy as np
import pytest
import torch

from glm5.kernels.rms_norm import rms_norm
from glm5.testing.numerics import rel_rms

SHAPES = [(1,), (1, 1), (7, 64), (3, 5, 130), (0, 8)]
EPS = 1e-5
IMPLS = ["reference", "fused"]
# Inputs are rounded before both runs. Measured: float64 2e-16, float32 1.3e-7; bfloat16 rounds twice to 8 bits, 3.6e-3.
BUDGET = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 6e-3}


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x_np, weight_np = x.detach().double().numpy(), weight.detach().double().numpy()
    return torch.from_numpy(x_np / np.sqrt((x_np**2).mean(-1, keepdims=True) + eps) * weight_np)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(shape, dtype, impl, gen):
    x, weight = torch.randn(shape, generator=gen).to(dtype), torch.randn(shape[-1], generator=gen).to(dtype)
    got = rms_norm(x, weight, EPS, impl=impl)
    assert got.dtype == dtype
    assert rel_rms(got, oracle(x, weight)) < BUDGET[dtype]


def test_budget_notices_another_epsilon(gen):
    x, weight = torch.randn(7, 64, generator=gen) * 0.1, torch.ones(64)
    assert rel_rms(rms_norm(x, weight, 1e-6), oracle(x, weight)) > 10 * BUDGET[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
def test_casts_before_the_multiply(impl, gen):
    x, weight = torch.randn(16, 64, generator=gen).bfloat16(), torch.randn(64, generator=gen).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    got = rms_norm(x, weight, EPS, impl=impl)
    assert torch.equal(got, normed.bfloat16() * weight)
    assert not torch.equal(got, (normed * weight.float()).bfloat16())  # the order matters


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(5,), (3, 2, 5)], ids=str)
def test_gradients(shape, impl, gen):
    x = torch.randn(shape, generator=gen, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, generator=gen, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS, impl=impl), (x, weight))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
def test_gradients_agree_with_float64(dtype, budget, impl, gen):
    x, weight, grad = (torch.randn(*shape, generator=gen).to(dtype) for shape in [(9, 64), (64,), (9, 64)])
    got, want = ([t.to(to, copy=True).requires_grad_() for t in (x, weight)] for to in (dtype, torch.float64))
    rms_norm(*got, EPS, impl=impl).backward(grad)
    rms_norm(*want, EPS, impl="reference").backward(grad.double())
    for g, w in zip(got, want, strict=True):
        assert g.grad.dtype == dtype
        assert rel_rms(g.grad, w.grad) < budget


def test_unknown_implementation():
    with pytest.raises(
        ValueError, match="rms_norm: unknown impl 'quick', expected one of auto, triton, trained, fused"
    ):
        rms_norm(torch.ones(2), torch.ones(2), EPS, impl="quick")
