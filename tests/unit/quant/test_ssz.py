"""SSZ: upstream by its formulas, many starts against a grid of a hundred scales on the reference's six cases."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.quant import chunks
from glm5.quant.minmax import as_groups, minmax, quantize
from glm5.quant.record import FP8_CHANNEL, INT4_CHANNEL, INT4_GROUP, INT8_CHANNEL, Grid
from glm5.quant.ssz import ssz, ssz_asymmetric, ssz_upstream
from tests.support.weights import DISTRIBUTIONS, bursty, laplace

ROWS, COLS = 64, 2048
# The bar is 0.2 %; measured at most 0.03 %. Upstream stays 2.6 % and more above in groups.
OF_GRID = 1.002
# Relative error of weights, int4, from the reference's table, which had other samples: min-max, SSZ 10, SSZ 50, best.
TABLE = {
    ("channel", "gaussian"): (0.1509, 0.1261, 0.1090, 0.1087),
    ("channel", "t4"): (0.3786, 0.2385, 0.2277, 0.2276),
    ("channel", "laplace"): (0.2350, 0.1714, 0.1569, 0.1568),
    ("group", "gaussian"): (0.1172, 0.1089, 0.1083, 0.1008),
    ("group", "t4"): (0.1934, 0.1715, 0.1712, 0.1667),
    ("group", "laplace"): (0.1604, 0.1450, 0.1446, 0.1382),
}
SAMPLING = 0.03


def error(w: Tensor, grid: Grid, scale: Tensor, h: Tensor | None = None) -> float:
    wrong = (quantize(w, grid, scale).dequantize(torch.float64) - w).square()
    size = w.double().square()
    return float(((wrong.sum() / size.sum()) if h is None else ((wrong * h).sum() / (size * h).sum())).sqrt())


def best_of_a_hundred(w: Tensor, grid: Grid) -> Tensor:
    first, _ = minmax(w, grid)
    groups = as_groups(w, grid)
    best, least = first, torch.full_like(first, torch.inf)
    for i in range(100):
        scale = first * (1 - 0.009 * i)
        q = (groups / scale[..., None]).round().clamp(grid.quant_min, grid.quant_max)
        wrong = (groups - q * scale[..., None]).square().sum(-1)
        best, least = torch.where(wrong < least, scale, best), torch.minimum(wrong, least)
    return best


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("grid", [INT4_CHANNEL, INT4_GROUP], ids=["channel", "group"])
def test_many_starts_reach_a_grid_of_a_hundred(grid, distribution, seed):
    w = DISTRIBUTIONS[distribution](torch.Generator().manual_seed(seed), ROWS, COLS)
    limit = error(w, grid, best_of_a_hundred(w, grid)) * OF_GRID
    ours = error(w, grid, ssz(w, grid))
    assert ours <= limit
    upstream = error(w, grid, ssz_upstream(w, grid, 10))
    assert upstream > limit * 1.02  # the bar tells them apart
    measured = error(w, grid, minmax(w, grid)[0]), upstream, error(w, grid, ssz_upstream(w, grid, 50)), ours
    if distribution != "t4":  # its fourth moment is infinite: small samples scatter
        for got, want in zip(measured, TABLE[grid.scope, distribution], strict=True):
            assert abs(got / want - 1) < SAMPLING, f"{measured=}"


def one_row_upstream(w: list[float], steps: int) -> float:
    """The formulas, number by number."""
    codes = lambda s: [min(7, max(-8, round(v / s))) for v in w]  # noqa: E731
    wrong = lambda s, q: sum((v - s * c) ** 2 for v, c in zip(w, q, strict=True)) / len(w)  # noqa: E731
    scale = max(map(abs, w)) / 7
    q = codes(scale)
    best = (wrong(scale, q), scale)
    for _ in range(steps):
        scale = sum(v * c for v, c in zip(w, q, strict=True)) / max(sum(c * c for c in q), 1e-30)
        q = codes(scale)
        if (gain := best[0] - wrong(scale, q)) / max(best[0], 1e-4) < 1e-10 or abs(gain) < 1e-10:
            break
        best = min(best, (wrong(scale, q), scale))
    return best[1]


@pytest.mark.parametrize("steps", [1, 10, 50])
def test_upstream_by_its_formulas(steps, seed):
    w = laplace(torch.Generator().manual_seed(seed), 4, 1, 128).double()
    got = ssz_upstream(w, INT4_CHANNEL, steps)
    want = [one_row_upstream(row[0], steps) for row in w.tolist()]
    assert torch.allclose(got.flatten(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("grid", [INT4_CHANNEL, INT4_GROUP, INT8_CHANNEL], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_of_experts_is_a_loop_bit_for_bit(grid, weighted, seed, monkeypatch):
    gen = torch.Generator().manual_seed(seed)
    w = laplace(gen, 6, 24, 256).double()
    h = bursty(gen, 6, 10, 256).double().square().mean(-2) if weighted else None
    whole = ssz(w, grid, h)
    for e in range(len(w)):
        assert torch.equal(whole[e], ssz(w[e], grid, None if h is None else h[e]))
        assert torch.equal(ssz_upstream(w, grid)[e], ssz_upstream(w[e], grid))
    monkeypatch.setitem(chunks._MAX_ELEMENTS, "cpu", 1 << 10)
    assert torch.equal(ssz(w, grid, h), whole)


def test_more_steps_and_more_starts_never_hurt(seed):
    w = laplace(torch.Generator().manual_seed(seed), 16, 512).double()
    ladder = [
        ssz(w, INT4_CHANNEL, starts=(1.0,), steps=1, refine=0),
        ssz(w, INT4_CHANNEL, starts=(1.0,), steps=3, refine=0),
        ssz(w, INT4_CHANNEL, starts=(1.0,), steps=3, refine=50),
        ssz(w, INT4_CHANNEL, refine=50),
    ]
    wrong = [(quantize(w, INT4_CHANNEL, s).dequantize(torch.float64) - w).square().sum(-1) for s in ladder[:3]]
    assert all((b <= a * (1 + 1e-12)).all() for a, b in pairwise(wrong))
    assert error(w, INT4_CHANNEL, ladder[3]) <= error(w, INT4_CHANNEL, ladder[2])


def test_importance_moves_the_error_to_where_it_matters_less(seed):
    gen = torch.Generator().manual_seed(seed)
    w, h = laplace(gen, 3, 32, 512), bursty(gen, 3, 64, 512).square().mean(-2)
    plain, weighted = ssz(w, INT4_CHANNEL), ssz(w, INT4_CHANNEL, h)
    assert error(w, INT4_CHANNEL, weighted, h[:, None]) < 0.97 * error(w, INT4_CHANNEL, plain, h[:, None])
    assert error(w, INT4_CHANNEL, plain) < error(w, INT4_CHANNEL, weighted)


def test_rows_without_numbers_and_grids_without_ssz():
    w = torch.zeros(2, 4, 128)
    w[0, 1, 3] = 5.0
    scale = ssz(w, INT4_GROUP, torch.zeros(2, 128))
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert torch.equal(quantize(w, INT4_GROUP, scale).dequantize(torch.float32), w)
    with pytest.raises(ConfigError, match="SSZ is for symmetric integers"):
        ssz(w, FP8_CHANNEL)


def best_asymmetric(w: Tensor, grid: Grid) -> float:
    """Relative error of the best of 60 scales and every offset, row by row."""
    first, _ = minmax(w, grid)
    wrong = torch.full(first.shape[:1], torch.inf, dtype=w.dtype)
    for i in range(60):
        scale = first * (1 - 0.015 * i)
        for offset in range(int(grid.quant_min), int(grid.quant_max) + 1):
            q = (w / scale + offset).round().clamp(grid.quant_min, grid.quant_max)
            wrong = torch.minimum(wrong, (w - scale * (q - offset)).square().sum(-1))
    return float((wrong.sum() / w.square().sum()).sqrt())


def test_asymmetric_ssz_finds_scale_and_offset(seed):
    grid = Grid("int", 4, "channel", symmetric=False)
    w = laplace(torch.Generator().manual_seed(seed), 2, 24, 512).double() + 1.5
    scale, offset = ssz_asymmetric(w, grid)

    def off(scale: Tensor, offset: Tensor | None) -> float:
        wrong = quantize(w, grid, scale, offset).dequantize(torch.float64) - w
        return float((wrong.square().sum() / w.square().sum()).sqrt())

    found = off(scale, offset)
    assert found < 0.95 * off(*minmax(w, grid))
    assert found < 1.02 * best_asymmetric(w.flatten(0, 1), grid)
    one = ssz_asymmetric(w[1], grid)
    assert torch.equal(one[0], scale[1])
    assert torch.equal(one[1], offset[1])
    h = torch.ones(2, 512).double()
    assert torch.equal(ssz_asymmetric(w, grid, h)[0], scale)
    h[:, :128] = 100
    wrong = [
        quantize(w, grid, *found).dequantize(torch.float64) - w
        for found in ((scale, offset), ssz_asymmetric(w, grid, h))
    ]
    assert (wrong[1].square() * h.unsqueeze(1)).sum() <= (wrong[0].square() * h.unsqueeze(1)).sum()
    zero, whole = ssz_asymmetric(torch.zeros(1, 8), grid)
    assert zero.item() == 1
    assert grid.quant_min <= whole.item() <= grid.quant_max
    with pytest.raises(ConfigError, match="asymmetric integers"):
        ssz_asymmetric(w, INT4_CHANNEL)
