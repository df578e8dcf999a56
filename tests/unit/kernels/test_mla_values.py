"""Each head's values, under Triton's interpreter where there is no GPU: against float64, quantized as by act_quant."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.mla_values import mla_values, mla_values_quantized
from glm5.testing.numerics import rel_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, C, V = 2, 40, 128
# Inputs are rounded before both runs. Measured: 1e-7; float16 rounds the result, 2e-4.
BUDGET = {torch.float32: 1e-6, torch.float16: 1e-3}


def make_case(tokens: int, gen: torch.Generator, dtype: torch.dtype):
    """(attended latents, matrices, their product in float64)."""
    x, w = (torch.randn(*shape, generator=gen).to(dtype) for shape in ((tokens, H, C), (H, C, V)))
    return x.to(DEVICE), w.to(DEVICE), torch.einsum("thc,hcv->thv", x.double(), w.double()).flatten(1)


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 18])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_values(impl, tokens, dtype, gen):
    x, w, want = make_case(tokens, gen, dtype)
    got = mla_values(x, w, impl=impl)
    assert got.dtype == dtype
    assert rel_rms(got.cpu(), want) < BUDGET[dtype]
    assert tokens == 0 or rel_rms(mla_values(x, w * 1.01, impl=impl).cpu(), want) > 3 * BUDGET[dtype]  # the control


@pytest.mark.parametrize("tokens", [0, 1, 18])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_values_in_fp8(impl, tokens, gen):
    x, w, want = make_case(tokens, gen, torch.float32)
    values, data, scale = mla_values_quantized(x, w, impl=impl)
    assert rel_rms(values.cpu(), want) < BUDGET[torch.float32]
    if tokens:
        for got, expected in zip((data, scale), act_quant(values), strict=True):
            assert torch.equal(got.float().cpu(), expected.float().cpu())


def test_what_is_refused(gen):
    x, w, _ = make_case(2, gen, torch.float32)
    with pytest.raises(ValueError, match=r"mla_values\[triton\] quantizes heads of a multiple of 128 values, got 40"):
        mla_values_quantized(x, w[..., :40], impl="triton")
    with pytest.raises(ValueError, match="mla_values: unknown impl 'fast', expected one of auto, triton, reference"):
        mla_values(x, w, impl="fast")
