"""GPTQ: against elimination written out, as plain rounding where nothing correlates, in batches, and by its worth."""

import pytest
import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.quant import gptq as module
from glm5.quant.gptq import gptq, gram
from glm5.quant.minmax import encode, minmax
from glm5.quant.record import FP8_BLOCK, FP8_CHANNEL, INT4_CHANNEL, INT4_GROUP, Grid
from glm5.quant.ssz import ssz
from tests.support.weights import laplace

SMALL_GROUP = Grid("int", 4, "group", 16)


def correlated(gen: torch.Generator, *shape: int) -> Tensor:
    """Tokens whose channels have much in common, as behind a layer."""
    mix = torch.randn(*shape[:-2], shape[-1], shape[-1], generator=gen) / shape[-1] ** 0.5
    mix = mix * torch.exp(torch.randn(*shape[:-2], shape[-1], 1, generator=gen))
    return (torch.randn(*shape, generator=gen) @ mix).double()


def by_elimination(weight: Tensor, hessian: Tensor, grid: Grid, scale: Tensor, order: list[int]) -> Tensor:
    """Optimal brain quantization, a row and a column at a time: the inverse of what is left of H, in full."""
    codes = torch.zeros_like(weight)
    spread = grid.broadcast(scale, weight.shape).expand_as(weight)
    for row in range(len(weight)):
        w, left = weight[row].clone(), list(order)
        while left:
            inverse = torch.linalg.inv(hessian[left][:, left])
            k = left[0]
            codes[row, k] = (w[k] / spread[row, k]).round().clamp(grid.quant_min, grid.quant_max)
            w[left] -= (w[k] - codes[row, k] * spread[row, k]) / inverse[0, 0] * inverse[0]
            left = left[1:]
    return codes


@pytest.mark.parametrize("grid", [INT4_CHANNEL, SMALL_GROUP], ids=["channel", "group"])
@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize("block", [7, 128])
def test_it_is_elimination(grid, largest_first, block, seed):
    gen = torch.Generator().manual_seed(seed)
    weight, x = laplace(gen, 5, 48).double(), correlated(gen, 200, 48)
    hessian, scale = gram(x), ssz(weight, grid)
    got = gptq(weight, hessian, grid, scale, block=block, largest_first=largest_first).check()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(48)
    order = hessian.diagonal().argsort(descending=True).tolist() if largest_first else list(range(48))
    assert torch.equal(got.codes.double(), by_elimination(weight, damped, grid, scale, order))
    assert torch.equal(got.scale, scale)


@pytest.mark.parametrize("grid", [INT4_CHANNEL, INT4_GROUP, FP8_CHANNEL], ids=str)
def test_without_correlation_it_is_rounding(grid, seed):
    gen = torch.Generator().manual_seed(seed)
    weight = laplace(gen, 2, 6, 256)
    scale, _ = minmax(weight, grid)
    hessian = torch.stack([torch.zeros(256, 256), torch.rand(256, generator=gen).diag()])
    got = gptq(weight, hessian, grid, scale)
    assert torch.equal(got.codes.float(), encode(weight, grid, scale).float())


def test_a_batch_of_experts_is_a_loop_bit_for_bit(seed, monkeypatch):
    gen = torch.Generator().manual_seed(seed)
    weight, x = laplace(gen, 5, 12, 256).double(), correlated(gen, 5, 300, 256)
    x[3] = 0
    for grid in (INT4_CHANNEL, INT4_GROUP):
        scale, hessian = ssz(weight, grid), gram(x)
        whole = gptq(weight, hessian, grid, scale).codes
        for e in range(5):
            assert torch.equal(gram(x[e]), hessian[e])
            assert torch.equal(gptq(weight[e], hessian[e], grid, scale[e]).codes, whole[e])
        monkeypatch.setitem(module._MAX_ELEMENTS, "cpu", 2 * 256**2)
        assert torch.equal(gptq(weight, hessian, grid, scale).codes, whole)


def test_outputs_are_closer_than_rounding_brings_them_on_tokens_it_has_not_seen(seed):
    gen = torch.Generator().manual_seed(seed)
    weight, x = laplace(gen, 64, 128).double(), correlated(gen, 1024, 128)
    seen, other = x.chunk(2)
    scale = ssz(weight, INT4_CHANNEL)

    def error(q) -> float:
        return float(((q.dequantize(torch.float64) - weight) @ other.mT).norm() / (weight @ other.mT).norm())

    rounded = gptq(weight, torch.eye(128), INT4_CHANNEL, scale)
    ours = [gptq(weight, gram(seen), INT4_CHANNEL, scale, largest_first=first) for first in (False, True)]
    assert error(ours[1]) < error(ours[0]) < 0.8 * error(rounded)


def test_fewer_tokens_than_inputs_are_enough_to_run(seed):
    gen = torch.Generator().manual_seed(seed)
    weight, x = laplace(gen, 8, 128), correlated(gen, 3, 128).float()
    got = gptq(weight, gram(x), INT4_CHANNEL, ssz(weight, INT4_CHANNEL))
    assert ((got.dequantize(torch.float32) - weight) @ x.mT).norm() < 0.2 * (weight @ x.mT).norm()


def test_grids_that_it_does_not_serve():
    with pytest.raises(ConfigError, match="GPTQ is for"):
        gptq(torch.ones(4, 128), torch.eye(128), FP8_BLOCK, torch.ones(1, 1))
