"""FP8 rows bit for bit: formats, quantization and what a row is read as, against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from glm5.kernels.block_scaled import FP8
from glm5.kernels.fp8_pool import (
    LatentFormat,
    dequantize_keys,
    dequantize_latents,
    quantize_keys,
    quantize_latents,
)
from tests.support.floats import BF16, FP32, f32, quantize_group, quantized_value, round_exactly

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
GLM_5 = LatentFormat(num_values=512, rope_dim=64)
# C and R: GLM-5's, tiny's, ragged groups, parts that end between multiples of 4 bytes.
FORMATS = [GLM_5, LatentFormat(32, 8), LatentFormat(130, 6), LatentFormat(7, 3), LatentFormat(1, 1)]


def hard_rows(gen: torch.Generator, width: int) -> torch.Tensor:
    """Rows of very different sizes, a row of zeros, one below the least amax, e4m3 midpoints, amax at powers of two."""
    x = (
        torch.randn(12, width, generator=gen, dtype=torch.float64)
        * torch.logspace(-6, 4, 12, dtype=torch.float64)[:, None]
    )
    x[0] = 0.0
    x[2] = torch.tensor([448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0, 440.0]).repeat(-(-width // 8))[:width]
    for row, amax in ((3, 448.0), (4, 448.0 * 2**-7), (5, np.nextafter(f32(448), f32(449))), (6, 449.0), (7, 1e-5)):
        x[row] *= float(amax) / x[row].abs().max()
        x[row, 0] = -float(amax)
    return x


def test_bytes_of_glm_5():
    assert GLM_5.num_bytes == 656 == 512 + 4 * 4 + 64 * 2
    assert (GLM_5.scales_at, GLM_5.rope_at) == (512, 528)
    assert all(at % 4 == 0 for form in FORMATS for at in (form.scales_at, form.rope_at, form.num_bytes))


def power_of_two_scale(row: np.ndarray) -> float:
    """The smallest power of two that is at least max(amax, 1e-4) / 448, the quotient in float32."""
    least = float(f32(max(float(np.abs(row).max()), float(f32(1e-4))) / 448.0))
    scale = 1.0
    while scale < least:
        scale *= 2
    while scale / 2 >= least:
        scale /= 2
    return scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 128, 130])
def test_keys_are_exact(width, dtype, gen):
    key_TI = hard_rows(gen, width).to(dtype)
    data, scale = quantize_keys(key_TI)
    assert (data.dtype, data.shape, scale.dtype, scale.shape) == (FP8, (12, width), torch.float32, (12,))
    read = dequantize_keys(data, scale)
    assert read.dtype == torch.float32
    for t, row in enumerate(key_TI.float().numpy()):
        want = power_of_two_scale(row)
        assert scale[t].item() == want
        assert np.frexp(scale[t].item())[0] == 0.5
        assert data[t].double().tolist() == [quantized_value(v, f32(want)) for v in row]
        # A power of two moves the exponent only: nothing is rounded when a key is read, in bfloat16 either.
        assert read[t].double().tolist() == (data[t].double() * scale[t].double()).tolist()
        assert torch.equal(read[t].bfloat16().float(), read[t])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_latents_are_exact(form, dtype, gen):
    num_values = form.num_values
    latent_TL = hard_rows(gen, num_values + form.rope_dim).to(dtype)
    row_TB = quantize_latents(latent_TL, form)
    assert (row_TB.dtype, row_TB.shape) == (torch.uint8, (12, form.num_bytes))
    read = dequantize_latents(row_TB, form)
    assert (read.dtype, read.shape) == (torch.float32, latent_TL.shape)
    for row, got, latent in zip(row_TB, read.double().tolist(), latent_TL, strict=True):
        scales = row[form.scales_at : form.rope_at].clone().view(torch.float32)
        data = row[:num_values].clone().view(FP8)
        for group, start in enumerate(range(0, num_values, 128)):
            span = slice(start, min(start + 128, num_values))
            values, want_scale = quantize_group(latent[span].float().numpy(), 1e-4)
            assert scales[group].item() == want_scale
            assert data[span].double().tolist() == values.tolist()
            exact = [Fraction(v) * Fraction(float(want_scale)) for v in values.tolist()]
            assert got[span] == [float(round_exactly(v, FP32)) for v in exact]
        rope = latent[num_values:].float().double().tolist()
        assert got[num_values:] == [float(round_exactly(Fraction(v), BF16)) for v in rope]
        stored = row[form.rope_at : form.rope_at + 2 * form.rope_dim].clone().view(torch.bfloat16)
        assert stored.double().tolist() == got[num_values:]
    assert (row_TB[:, num_values : form.scales_at] == 0).all()
    assert (row_TB[:, form.rope_at + 2 * form.rope_dim :] == 0).all()


def test_control_other_scales_are_noticed(gen):
    """The definitions differ where it matters: a power of two for latents or amax / 448 for keys would be seen."""
    x = hard_rows(gen, 128)
    _, key_scale = quantize_keys(x)
    row_TB = quantize_latents(x, LatentFormat(127, 1))
    latent_scale = row_TB[:, 128:132].clone().view(torch.float32).squeeze(1)
    assert (key_scale != latent_scale).sum() >= 6


def test_rows_of_any_stride_are_read(gen):
    """A piece of larger rows, as gathered ones are."""
    latent_TL = torch.randn(5, GLM_5.num_values + GLM_5.rope_dim, generator=gen)
    row_TB = quantize_latents(latent_TL, GLM_5)
    wide = torch.zeros(5, 1024, dtype=torch.uint8)
    wide[:, 16 : 16 + 656] = row_TB
    assert torch.equal(dequantize_latents(wide[:, 16 : 16 + 656], GLM_5), dequantize_latents(row_TB, GLM_5))


def test_nothing_to_quantize():
    assert quantize_latents(torch.empty(0, 40), LatentFormat(32, 8)).shape == (0, 52)
    data, scale = quantize_keys(torch.empty(0, 16))
    assert (data.shape, scale.shape) == ((0, 16), (0,))
    assert dequantize_keys(data, scale).shape == (0, 16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    """It must not look like a sound key to whoever searches for the cause."""
    row = torch.ones(1, 8)
    row[0, 3] = bad
    assert not dequantize_keys(*quantize_keys(row)).isfinite().all()
    form = LatentFormat(6, 2)
    assert not dequantize_latents(quantize_latents(row, form), form).isfinite().all()
