"""rope and rope_table against complex rotation in float64."""

import numpy as np
import pytest
import torch

from glm5.kernels.rope import rope, rope_table
from glm5.testing.numerics import rel_rms

THETA = 10000.0
POSITIONS = torch.tensor([0, 1, 2, 77, 4095])
# Inputs (cos and sin too) are rounded before both runs. Measured: 5e-8 and 1e-16; bfloat16 rounds three times.
BUDGET = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 4e-3}
# float32 angles near position 4096 are off by up to 2^-12 / 2: measured 2e-5. A theta 1 % off is a 1000 times that.
TABLE_BUDGET = 1e-4


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x_np, turn = x.double().numpy(), cos.double().numpy() + 1j * sin.double().numpy()
    turn = turn if x.dim() == 2 else turn[:, None]
    z = (x_np[..., 0::2] + 1j * x_np[..., 1::2]) * turn
    out = np.empty(x_np.shape)
    out[..., 0::2], out[..., 1::2] = z.real, z.imag
    return torch.from_numpy(out)


def exact_table(dim: int, theta: float = THETA) -> tuple[torch.Tensor, torch.Tensor]:
    angle = np.outer(POSITIONS.numpy(), theta ** (-np.arange(0, dim, 2) / dim))
    return torch.from_numpy(np.cos(angle)), torch.from_numpy(np.sin(angle))


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("shape", [(5, 2), (5, 16), (5, 3, 16), (5, 1, 64)], ids=str)
def test_rotates_interleaved_pairs(shape, dtype, gen):
    x = torch.randn(shape, generator=gen).to(dtype)
    cos, sin = rope_table(POSITIONS, shape[-1], THETA, dtype)
    got = rope(x, cos, sin)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert rel_rms(got, rotate(x, cos, sin)) < BUDGET[dtype]


def test_budget_notices_half_split_pairs(gen):
    x = torch.randn(5, 16, generator=gen)
    cos, sin = rope_table(POSITIONS, 16, THETA, torch.float32)
    a, b = x.chunk(2, dim=-1)
    half_split = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    assert rel_rms(half_split, rotate(x, cos, sin)) > 10 * BUDGET[torch.bfloat16]


@pytest.mark.parametrize("dim", [2, 16, 64])
def test_table(dim):
    for dtype, budget in [(torch.float64, 1e-12), (torch.float32, TABLE_BUDGET)]:
        for got, want in zip(rope_table(POSITIONS, dim, THETA, dtype), exact_table(dim), strict=True):
            assert got.dtype == dtype
            assert got.shape == (5, dim // 2)
            assert rel_rms(got, want) < budget


def test_table_budget_notices_another_theta():
    cos, _ = rope_table(POSITIONS, 16, THETA * 1.01, torch.float32)
    assert rel_rms(cos, exact_table(16)[0]) > 10 * TABLE_BUDGET


def test_bfloat16_table_is_the_float32_table_rounded():
    narrow, wide = (rope_table(POSITIONS, 16, THETA, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert all(torch.equal(n, w.bfloat16()) for n, w in zip(narrow, wide, strict=True))


def test_position_zero_is_the_identity(gen):
    x = torch.randn(3, 4, 16, generator=gen)
    assert torch.equal(rope(x, *rope_table(torch.zeros(3, dtype=torch.long), 16, THETA, torch.float32)), x)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6)], ids=str)
def test_gradients(shape, gen):
    x = torch.randn(shape, generator=gen, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(4), 6, THETA, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, *table), (x,))


def test_errors():
    with pytest.raises(ValueError, match="got dim=7; give an even number"):
        rope_table(POSITIONS, 7, THETA, torch.float32)
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        rope(torch.ones(5, 2), torch.ones(5, 1), torch.ones(5, 1), impl="fast")
