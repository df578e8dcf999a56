"""rope and rope_table against complex rotation in float64."""

import numpy as np
import pytest
import torch

from glm5.kernels.rope import freqs_cis, rope, rope_table
from glm5.testing.numerics import rel_rms

THETA = 10000.0
IMPLS = ["reference", "complex"]
POSITIONS = torch.tensor([0, 1, 2, 77, 4095])
# Inputs (cos and sin too) are rounded before both runs. Measured: 7e-17 and 4e-8; bfloat16 rounds thrice, 2.7e-3.
BUDGET = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 5e-3}
# float32 angles near position 4096 are off by up to 2^-12 / 2: measured 2e-5. A theta 1 % off is a 1000 times that.
TABLE_BUDGET = 1e-4
CHOICES = [
    (impl, dtype) for impl in [*IMPLS, "auto"] for dtype in BUDGET if (impl, dtype) != ("complex", torch.bfloat16)
]


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


@pytest.mark.parametrize(("impl", "dtype"), CHOICES, ids=str)
@pytest.mark.parametrize("shape", [(5, 2), (5, 16), (5, 3, 16), (5, 1, 64)], ids=str)
def test_rotates_interleaved_pairs(impl, dtype, shape, gen):
    x = torch.randn(shape, generator=gen).to(dtype)
    cos, sin = rope_table(POSITIONS, shape[-1], THETA, dtype)
    got = rope(x, cos, sin, impl=impl)
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


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6)], ids=str)
def test_gradients(shape, impl, gen):
    x = torch.randn(shape, generator=gen, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(4), 6, THETA, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rope(x, *table, impl=impl), (x,))


@pytest.mark.parametrize("cut", [np.s_[..., 1:7], np.s_[..., ::2], np.s_[:, 1:, 3:9]], ids=str)
def test_slices_at_odd_places(cut, gen):
    x = torch.randn(5, 4, 13, generator=gen)[cut][..., :6]
    table = rope_table(POSITIONS, x.shape[-1], THETA, torch.float32)
    assert torch.equal(rope(x, *table, impl="complex"), rope(x.clone(), *table, impl="complex"))
    assert rel_rms(rope(x, *table, impl="complex"), rope(x, *table, impl="reference")) < BUDGET[torch.float32]


@pytest.mark.parametrize("impl", ["reference", "complex"])
def test_one_row_at_an_odd_place(impl, gen):
    """Such a slice counts as contiguous although its pairs lie at odd offsets."""
    row_1X = torch.randn(1, 7, generator=gen)
    table = rope_table(torch.tensor([3]), 6, 1e4, torch.float32)
    assert torch.equal(rope(row_1X[:, 1:], *table, impl=impl), rope(row_1X[:, 1:].clone(), *table, impl="reference"))


def test_errors():
    with pytest.raises(ValueError, match="got dim=7; give an even number"):
        rope_table(POSITIONS, 7, THETA, torch.float32)
    with pytest.raises(ValueError, match="needs float32 or float64, got torch\\.bfloat16"):
        rope(torch.ones(5, 2).bfloat16(), torch.ones(5, 1), torch.ones(5, 1), impl="complex")
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        rope(torch.ones(5, 2), torch.ones(5, 1), torch.ones(5, 1), impl="fast")


@pytest.mark.parametrize("shape", [(5, 16), (5, 3, 16)], ids=str)
def test_without_a_gradient_and_with_the_turn_at_hand_the_bits_are_the_same(shape, gen):
    x, table = torch.randn(shape, generator=gen), rope_table(POSITIONS, 16, THETA, torch.float32)
    want = rope(x, *table)
    with torch.inference_mode():
        assert torch.equal(rope(x, *table, freqs_cis(*table)), want)
    assert freqs_cis(*rope_table(POSITIONS, 16, THETA, torch.bfloat16)) is None
