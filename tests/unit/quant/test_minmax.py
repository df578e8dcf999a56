"""Grids: scales and codes by their formulas, one row at a time; fp8 as the kernels have it; nvfp4 by exact rounding."""

from fractions import Fraction

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import quantize_blocks
from glm5.quant import chunks
from glm5.quant.minmax import encode, fake_quantize, minmax, quantize
from glm5.quant.nvfp4 import quantize_nvfp4
from glm5.quant.record import (
    E2M1,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    INT4_CHANNEL,
    INT4_GROUP,
    INT8_CHANNEL,
    INT8_TOKEN,
    NVFP4_GROUP,
    Grid,
)
from tests.support.weights import laplace

ALL = [
    INT8_CHANNEL,
    INT4_CHANNEL,
    INT4_GROUP,
    Grid("int", 8, "channel", symmetric=False),
    Grid("int", 4, "group", 128, symmetric=False),
    Grid("int", 4, "block", 100),
    Grid("int", 8, "tensor"),
    FP8_CHANNEL,
    FP8_BLOCK,
    NVFP4_GROUP,
]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_by_the_formula(bits, symmetric, seed):
    x = laplace(torch.Generator().manual_seed(seed), 5, 64).double()
    got = quantize(x, Grid("int", bits, "channel", symmetric=symmetric))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for row, codes, scale, i in zip(
        x.tolist(), got.codes.tolist(), got.scale.flatten().tolist(), range(5), strict=True
    ):
        s = max(map(abs, row)) / high if symmetric else (max(row) - min(row)) / (2**bits - 1)
        offset = 0 if symmetric else round(-min(row) / s) + low
        assert scale == s
        assert symmetric or got.offset[i].item() == offset
        assert codes == [min(high, max(low, round(v / s + offset))) for v in row]


@pytest.mark.parametrize("grid", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_batch_is_its_members_and_parts_are_the_whole(grid, dtype, seed, monkeypatch):
    x = laplace(torch.Generator().manual_seed(seed), 2, 3, 200, 256).to(dtype)
    whole = quantize(x, grid)
    monkeypatch.setitem(chunks._MAX_ELEMENTS, "cpu", 1 << 14)
    in_parts, alone = quantize(x, grid), quantize(x[1, 2], grid)
    for name in ("codes", "scale", "offset", "tensor_scale"):
        if (part := getattr(whole, name)) is not None:
            assert torch.equal(part.double(), getattr(in_parts, name).double())
            assert torch.equal(part[1, 2].double(), getattr(alone, name).double())
    assert torch.equal(whole.dequantize(dtype), fake_quantize(x, grid))
    assert whole.scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("grid", ALL, ids=str)
def test_what_lies_on_the_grid_stays(grid, seed):
    x = laplace(torch.Generator().manual_seed(seed), 150, 256)
    x[3] = 0
    once = quantize(x, grid)
    assert torch.equal(once.dequantize(torch.float32)[3], x[3])
    if grid.kind == "nvfp4":
        again = quantize_nvfp4(once.dequantize(torch.float64), grid, once.tensor_scale.double())
        assert torch.equal(again.dequantize(torch.float64), once.dequantize(torch.float64))
    else:
        wide = None if once.offset is None else once.offset.double()
        assert torch.equal(encode(once.dequantize(torch.float64), grid, once.scale.double(), wide), once.codes)


def test_the_error_is_at_most_half_a_step(seed):
    """Control of the formula: a scale one percent smaller cuts the largest values."""
    x = laplace(torch.Generator().manual_seed(seed), 64, 256).double()
    scale, _ = minmax(x, INT8_CHANNEL)

    def worst(scale):
        return ((quantize(x, INT8_CHANNEL, scale).dequantize(torch.float64) - x).abs() / scale).max()

    assert worst(scale) <= 0.5 + 1e-9
    assert worst(0.99 * scale) > 0.6


def test_fp8_is_what_the_kernels_make(seed):
    x = laplace(torch.Generator().manual_seed(seed), 300, 256)
    want, got = quantize_blocks(x), quantize(x, FP8_BLOCK)
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.codes.float(), want.data.float())
    data, scale = act_quant(x)
    got = quantize(x, FP8_GROUP)
    assert torch.equal(got.scale, scale)
    assert torch.equal(got.codes.float(), data.float())


def test_nvfp4_is_the_nearest_value_ties_to_even(seed):
    x = laplace(torch.Generator().manual_seed(seed), 4, 64)
    x[0, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0.0])
    x[3, :16] = x[0, 0] = 6.0 * 448  # scale of the tensor 1, so x[0, 0]'s group has its own
    x[1, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0.0])
    got = quantize(x, NVFP4_GROUP)
    assert got.tensor_scale.item() == 1
    assert got.scale[1, 0] == 1
    ties = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]
    assert got.dequantize(torch.float32)[1, :16].tolist() == ties
    levels = sorted({s * Fraction(m) for m in E2M1 for s in (1, -1)})
    values = got.dequantize(torch.float64)
    for i, k in [(0, 3), (1, 30), (2, 5), (2, 63), (3, 40)]:
        step = Fraction(got.scale[i, k // 16].item())
        nearest = min(abs(level * step - Fraction(x[i, k].item())) for level in levels)
        # The quotient is rounded before it is compared: at most 2^-23 of a step off.
        assert abs(Fraction(values[i, k].item()) - Fraction(x[i, k].item())) <= nearest + step * Fraction(6, 2**23)


def test_tokens_are_rows_and_a_vector_is_one(seed):
    x = laplace(torch.Generator().manual_seed(seed), 3, 64)
    x[1] *= 1000
    assert torch.equal(fake_quantize(x, INT8_TOKEN)[0], fake_quantize(x[0], INT8_TOKEN))
    assert fake_quantize(x, None) is x


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="rows of 96 do not divide"):
        quantize(torch.ones(4, 96), INT4_GROUP)
