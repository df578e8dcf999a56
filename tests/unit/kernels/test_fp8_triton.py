"""act_quant and fp8_linear in Triton, under the interpreter: bit by bit, or within float32's rounding of float64."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.triton_support import arrivals
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import DTYPES, interpreted

pytestmark = interpreted

# Inputs are rounded before both runs. Measured: float32 1.2e-7, float16 2.1e-4 (the result's rounding).
BUDGET = {torch.float32: 5e-7, torch.float16: 4e-4}
# (rows, outputs, inputs): one row, ragged blocks, one and two tiles of tokens, splits of the columns.
SHAPES = [(1, 1, 1), (1, 40, 300), (3, 130, 300), (16, 72, 1152), (0, 8, 8)]
MANY = [(17, 72, 640), (40, 130, 300)]


def make(T, O, D, dtype, gen):
    x = (torch.randn(T, D, generator=gen) * 3).to(dtype)
    return x, quantize_blocks(torch.randn(O, D, generator=gen) * 0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "D"), [(1, 1), (3, 128), (5, 300), (2, 2176), (0, 128)])
def test_act_quant_is_the_reference_bit_by_bit(T, D, dtype, gen):
    x = torch.randn(T, D, generator=gen).to(dtype)
    x[:, ::7] *= 1e-3
    x[:1, :5] = 0
    for got, want in zip(act_quant(x, impl="triton"), act_quant(x, impl="reference"), strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_rows_agree_with_float64(shape, dtype, gen):
    x, weight = make(*shape, dtype, gen)
    got = fp8_linear(x, weight, impl="triton")
    assert got.dtype == dtype
    assert rel_rms(got, x.double() @ weight.dequantize(torch.float64).T) < BUDGET[dtype]
    assert not arrivals(x.device).any()


@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_rows_agree_with_the_reference(shape, gen):
    x, weight = make(*shape, torch.float32, gen)
    assert rel_rms(fp8_linear(x, weight, impl="triton"), fp8_linear(x, weight, impl="reference")) < BUDGET[x.dtype]
    assert not arrivals(x.device).any()


def test_budget_notices_one_scale_in_ten(gen):
    x, weight = make(3, 130, 1200, torch.float32, gen)
    want = x.double() @ weight.dequantize(torch.float64).T
    weight.scale[0, 9] *= 1.001
    assert rel_rms(fp8_linear(x, weight, impl="triton"), want) > 10 * BUDGET[x.dtype]


def test_rows_of_a_larger_tensor(gen):
    x, weight = make(4, 24, 200, torch.float32, gen)
    wide = torch.cat([x, x], dim=1)[:, 200:]
    assert torch.equal(fp8_linear(wide, weight, impl="triton"), fp8_linear(x, weight, impl="triton"))
    assert torch.equal(act_quant(wide, impl="triton")[1], act_quant(x, impl="triton")[1])
