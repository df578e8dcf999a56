"""INT4 for training and export: one function, its fixed points, its gradient."""

import pytest
import torch

from glm5.quant.minmax import minmax, quantize
from glm5.quant.qat import fake_int4, int4, is_int4, minmax_scale
from glm5.quant.record import INT4_CHANNEL, INT4_GROUP
from glm5.quant.ssz import ssz
from tests.support.weights import laplace, student_t4

DTYPES = [torch.float32, torch.bfloat16]


def test_by_the_formula(seed):
    w = laplace(torch.Generator().manual_seed(seed), 3, 256)
    w[1, :128] *= 1e-6
    got = int4(w).check()
    for row in range(3):
        for group in range(2):
            part = w[row, 128 * group : 128 * group + 128]
            scale = torch.tensor(max(part.abs().max().item() / 7, 1e-5)).bfloat16().float()
            assert got.scale[row, group] == scale
            assert got.codes[row, 128 * group : 128 * group + 128].tolist() == [
                round(v) for v in (part / scale).tolist()
            ]
    assert got.codes.abs().max() == 7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [laplace, student_t4])
def test_what_was_trained_is_exported_bit_for_bit_and_stays(dtype, make, seed):
    """20 thousand groups; the reference found none in 200 thousand that moved."""
    gen = torch.Generator().manual_seed(seed)
    w = (make(gen, 4, 50, 100 * 128) * torch.exp(3 * torch.randn(4, 50, 1, generator=gen))).to(dtype)
    trained, exported = fake_int4(w), int4(w)
    assert torch.equal(exported.dequantize(dtype), trained)
    again = int4(trained)
    assert torch.equal(again.codes, exported.codes)
    assert torch.equal(again.scale, exported.scale)
    assert is_int4(trained)
    assert not is_int4(w)
    assert torch.equal(int4(w[2, 7:8]).codes, exported.codes[2, 7:8])


def test_other_methods_would_change_it(seed):
    trained = fake_int4(laplace(torch.Generator().manual_seed(seed), 8, 256))
    cut = trained * 1.01
    assert not is_int4(quantize(cut, INT4_GROUP, ssz(cut, INT4_GROUP)).dequantize(torch.float32) * 1.003)
    plain = laplace(torch.Generator().manual_seed(seed + 1), 8, 256)
    once = quantize(plain, INT4_GROUP, ssz(plain, INT4_GROUP))
    assert not is_int4(once.dequantize(torch.float32))


def test_the_gradient_passes_as_if_nothing_had_been_done(seed):
    gen = torch.Generator().manual_seed(seed)
    w = laplace(gen, 4, 128).requires_grad_()
    x = torch.randn(5, 128, generator=gen)
    (x @ fake_int4(w).mT).square().sum().backward()
    want = 2 * (x @ fake_int4(w.detach()).mT).mT @ x
    assert torch.allclose(w.grad, want, rtol=1e-5)


@pytest.mark.parametrize("grid", [INT4_GROUP, INT4_CHANNEL], ids=str)
def test_minmax_takes_the_better_of_two_grids(grid, seed):
    """By brute force in float64: of max|w| / 7 and max|w| / 7.5, which has the less error."""
    w = student_t4(torch.Generator().manual_seed(seed), 40, 256)
    w[:10] = quantize(w[:10], grid, minmax(w[:10], grid)[0]).dequantize(torch.float32)  # near the first grid
    scale, offset = minmax_scale(w, grid)
    assert offset is None
    groups = w.double().reshape(-1, grid.group or 256)
    errors = []
    for reach in (7, 7.5):
        each = (groups.abs().amax(-1, keepdim=True) / reach).clamp_min(1e-5)
        each = each.bfloat16().double() if grid.group else each
        errors.append((groups - each * (groups / each).round().clamp(-8, 7)).square().sum(-1))
    got = groups - scale.double().reshape(-1, 1) * quantize(w, grid, scale).codes.double().reshape(groups.shape)
    assert torch.allclose(got.square().sum(-1), torch.minimum(*errors), rtol=0.01)  # roundings of the scales differ
    wider = (errors[1] < errors[0]).double()
    first = len(groups) // 4
    assert wider[:first].mean() < 0.1  # what is not near the first grid loses by half a step at most on the second
    assert wider[first:].mean() > 0.9
    assert torch.equal(minmax_scale(w, grid, trained=True)[0], int4(w).scale if grid.group else minmax(w, grid)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minmax_keeps_what_was_trained(dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    w = (laplace(gen, 50, 20 * 128) * torch.exp(3 * torch.randn(50, 1, generator=gen))).to(dtype)
    w[0, :256] = 0
    w[1, :128] *= 1e-9
    trained = fake_int4(w)
    assert torch.equal(minmax_scale(trained, INT4_GROUP)[0], int4(trained).scale)
    assert not torch.equal(minmax_scale(w, INT4_GROUP)[0], int4(w).scale)
