"""FP8 bit for bit: act_quant, quantize_blocks, dequantize and fp8_linear against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from glm5.kernels import block_scaled
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BlockScaled, quantize_blocks, round_once
from glm5.kernels.fp8_linear import fp8_linear
from glm5.testing.numerics import rel_rms
from tests.support.floats import BF16, FP16, FP32, f32, quantize_group, quantized_value, round_array, round_exactly

FORMATS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
FP8 = torch.float8_e4m3fn
# e4m3 keeps 4 significant bits and these activations and weights are spread over a few octaves: measured 0.036.
FP8_LINEAR_BUDGET = 0.06


def hard_rows(gen: torch.Generator, T: int, D: int) -> torch.Tensor:
    """Rows of very different sizes, a row of zeros, values below the least amax, and e4m3 midpoints."""
    x = torch.randn(T, D, generator=gen) * torch.logspace(-6, 4, T)[:, None]
    x[0] = 0.0
    if T > 2:
        midpoints = torch.tensor([448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0, 440.0])
        x[2] = midpoints.repeat(-(-D // 8))[:D]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "D"), [(1, 1), (3, 127), (4, 128), (5, 129), (6, 320), (0, 64)])
def test_act_quant_is_exact(T, D, dtype, gen):
    x = hard_rows(gen, T, D).to(dtype) if T else torch.empty(0, D, dtype=dtype)
    x_fp8, scale = act_quant(x)
    assert x_fp8.dtype == FP8
    assert x_fp8.shape == (T, D)
    assert scale.shape == (T, -(-D // 128))
    for t, row in enumerate(x.double().numpy()):
        for g in range(scale.shape[1]):
            span = slice(128 * g, 128 * (g + 1))
            values, want_scale = quantize_group(row[span], 1e-4)
            assert scale[t, g].item() == want_scale
            assert x_fp8[t, span].double().tolist() == values.tolist()


def beside_midpoints(gen: torch.Generator) -> torch.Tensor:
    """[200, 120] of which each quotient by the row's scale is an e4m3 midpoint or a float32 step beside one.

    A scale or a quotient one step off (a multiplication by a rounded reciprocal, say) ends on the wrong side.
    """
    midpoints = torch.tensor([(2 * m + 1) * 2.0**e for m in range(8, 16) for e in range(-10, 4)][:119])
    amax = torch.rand(200, 1, generator=gen) + 0.5
    return torch.cat([amax, amax / 448 * midpoints], dim=1)


def test_quotients_beside_midpoints(gen):
    x = beside_midpoints(gen)
    x_fp8, scale = act_quant(x)
    blocks = [quantize_blocks(row[None]) for row in x]
    for t, row in enumerate(x.double().numpy()):
        values, want_scale = quantize_group(row, 1e-4)
        assert scale[t].item() == blocks[t].scale.item() == want_scale
        assert x_fp8[t].double().tolist() == blocks[t].data[0].double().tolist() == values.tolist()
    by_reciprocal = (x * (1 / scale)).to(FP8)
    assert (by_reciprocal.double() != x_fp8.double()).sum() > 100  # the control: the cases are hard


def test_act_quant_oracle_rounds_ties_to_even():
    assert [quantized_value(v, f32(1.0)) for v in (17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, 460.0)] == [
        16.0, 20.0, -16.0, 0.0, 2.0**-8, 448.0
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (576, 130), (2, 3, 130, 20)], ids=str)
def test_quantize_blocks_is_exact(shape, gen):
    weight = torch.randn(shape, generator=gen) * 0.02
    weight[..., :3, :] = 0.0
    weight.view(-1, *shape[-2:])[0, : min(128, shape[-2])] = 0.0  # a block of zeros
    data, scale = quantize_blocks(weight)
    assert data.dtype == FP8
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    data, scale = data.view(-1, *shape[-2:]), scale.view(-1, *scale.shape[-2:])
    for w, d, s in zip(weight.view(-1, *shape[-2:]).numpy(), data, scale, strict=True):
        for i in range(s.shape[0]):
            for j in range(s.shape[1]):
                block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                values, want_scale = quantize_group(w[block], 0.0)
                assert s[i, j].item() == want_scale
                assert np.array_equal(d[block].double().numpy(), values)


def random_fp8(shape, gen) -> torch.Tensor:
    codes = torch.randint(256, shape, generator=gen, dtype=torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8).view(FP8)  # 0x7f and 0xff are NaN


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (576, 130), (448, 64), (2, 129, 257)], ids=str)
def test_dequantize_is_the_exact_product_rounded_once(shape, dtype, gen):
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    weight = BlockScaled(random_fp8(shape, gen), torch.rand(grid, generator=gen) * 0.1 + 1e-3)
    got = weight.dequantize(dtype)
    assert got.dtype == dtype
    rows = torch.arange(shape[-2]) // 128
    cols = torch.arange(shape[-1]) // 128
    scale = weight.scale[..., rows[:, None], cols[None, :]]
    exact = weight.data.double() * scale.double()  # 4 bits times 24 bits: exact in float64
    sample = torch.randperm(exact.numel(), generator=gen)[:3000]
    want = [float(round_exactly(Fraction(v), FORMATS[dtype])) for v in exact.flatten()[sample].tolist()]
    assert got.flatten()[sample].double().tolist() == want
    assert torch.equal(weight.dequantize(torch.float64), exact)


def test_dequantize_in_pieces_is_the_same(gen, monkeypatch):
    weight = BlockScaled(random_fp8((2, 576, 130), gen), torch.rand(2, 5, 2, generator=gen))
    whole = weight.dequantize(torch.bfloat16)
    monkeypatch.setattr(block_scaled, "_CHUNK", 1)  # a row of blocks at a time
    assert torch.equal(weight.dequantize(torch.bfloat16), whole)


def test_dequantize_where_rounding_twice_goes_wrong(gen):
    """Scales built so that the product lies just beside a midpoint of bfloat16, nearer than float32 can tell."""
    scales, codes = [], []
    for odd in (9, 11, 13, 15):
        for offset in (-3, -2, -1, 1, 2, 3):
            low = pow(odd, -1, 2**20) * (2**19 + offset) % 2**20  # odd * scale = midpoint + offset (mod 2^20)
            for high in range(8, 16):
                scales.append((high * 2**20 + low) * 2.0**-30)
                codes.append(odd / 8.0)
    scale, code = torch.tensor(scales, dtype=torch.float64), torch.tensor(codes)
    assert torch.equal(scale.float().double(), scale)
    weight = BlockScaled(code.to(FP8)[:, None, None], scale.float()[:, None, None])
    want = [float(round_exactly(Fraction(c) * Fraction(s), BF16)) for c, s in zip(codes, scales, strict=True)]
    assert weight.dequantize(torch.bfloat16).flatten().double().tolist() == want
    twice = (code.double() * scale).bfloat16().double().tolist()
    assert sum(a != b for a, b in zip(twice, want, strict=True)) > len(want) // 4  # the control: these are hard cases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_round_once_on_random_values_and_edges(dtype, gen):
    values = torch.randn(2000, generator=gen, dtype=torch.float64) * torch.logspace(-4, 4, 2000, dtype=torch.float64)
    fine = values.to(dtype).double()
    edges = torch.cat([fine * (1 + 2.0**-9 + e) for e in (0.0, 2.0**-40, -(2.0**-40), 2.0**-12 - 2.0**-45)])
    tiny = torch.tensor([0.0, -0.0, 2.0**-160, -(2.0**-160), 2.0**-140, 1.5 * 2.0**-149, 2.0**-25, 3 * 2.0**-25])
    values = torch.cat([values, edges, tiny.double()])
    got = round_once(values, dtype)
    assert got.double().tolist() == [float(round_exactly(Fraction(v), FORMATS[dtype])) for v in values.tolist()]
    assert torch.equal(got.signbit(), values.signbit())


def test_round_once_keeps_what_is_not_finite():
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e300], dtype=torch.float64)
    got = round_once(special, torch.bfloat16)
    assert got[[0, 1, 3]].tolist() == [float("inf"), -float("inf"), float("inf")]
    assert got[2].isnan()


def exact_linear(x: torch.Tensor, weight: BlockScaled) -> np.ndarray:
    """fp8_linear's definition: integer dot products, then float32 step by step."""
    x_fp8, x_scale = act_quant(x)
    x_int = (x_fp8.double() * 512).long().numpy()  # e4m3 values are multiples of 2^-9
    w_int = (weight.data.double() * 512).long().numpy()
    y = np.zeros((x.shape[0], w_int.shape[0]), dtype=np.float32)
    for block in range(x_scale.shape[1]):
        span = np.s_[:, 128 * block : 128 * block + 128]
        dot = x_int[span] @ w_int[span].T
        assert np.abs(dot).max(initial=0) < 2**53
        w_scale = weight.scale[:, block].numpy().repeat(128)[: len(w_int)]
        y = y + (dot * 2.0**-18).astype(np.float32) * x_scale[:, block, None].numpy() * w_scale
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "O", "D"), [(1, 1, 1), (3, 128, 128), (4, 576, 300), (2, 448, 64), (0, 8, 8)])
def test_fp8_linear_is_exact(T, O, D, dtype, gen):
    x = (torch.randn(T, D, generator=gen) * 3).to(dtype)
    weight = quantize_blocks(torch.randn(O, D, generator=gen) * 0.02)
    got = fp8_linear(x, weight)
    assert got.dtype == dtype
    want = exact_linear(x, weight).astype(np.float64)
    want = round_array(want, BF16) if dtype == torch.bfloat16 else want
    assert np.array_equal(got.double().numpy(), want)


def test_fp8_linear_approximates_the_linear(gen):
    x, weight = torch.randn(16, 300, generator=gen), torch.randn(200, 300, generator=gen) * 0.02
    quantized = quantize_blocks(weight)
    assert rel_rms(fp8_linear(x, quantized), x @ weight.T) < FP8_LINEAR_BUDGET
    transposed_grid = BlockScaled(quantized.data, quantized.scale.flip(0, 1) * 1.5)
    assert rel_rms(fp8_linear(x, transposed_grid), x @ weight.T) > 5 * FP8_LINEAR_BUDGET


def test_fp8_linear_refuses_to_train(gen):
    x = torch.randn(2, 8, generator=gen, requires_grad=True)
    y = fp8_linear(x, quantize_blocks(torch.randn(4, 8, generator=gen)))
    with pytest.raises(RuntimeError, match="load the checkpoint dequantized"):
        y.sum().backward()


def test_shapes_that_do_not_belong_together():
    data = torch.zeros(576, 64).to(FP8)
    with pytest.raises(ValueError, match=r"data \[576, 64\] .* float32 scale \[5, 1\], got \[4, 1\]"):
        BlockScaled(data, torch.ones(4, 1)).dequantize(torch.float32)
    with pytest.raises(ValueError, match="needs float8_e4m3fn"):
        fp8_linear(torch.ones(1, 64), BlockScaled(torch.zeros(576, 64), torch.ones(5, 1)))


def test_unknown_implementations(gen):
    x = torch.ones(1, 4)
    with pytest.raises(ValueError, match="act_quant: unknown impl 'fast'"):
        act_quant(x, impl="fast")
    with pytest.raises(ValueError, match="fp8_linear: unknown impl 'fast'"):
        fp8_linear(x, quantize_blocks(torch.ones(2, 4)), impl="fast")
