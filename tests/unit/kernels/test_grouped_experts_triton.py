"""grouped_experts in Triton, under the interpreter, in each of its three ways."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.grouped_experts import grouped_experts
from glm5.testing.numerics import rel_rms
from tests.support.experts import exact_sum, make_experts
from tests.support.interpreter import interpreted

pytestmark = interpreted

# Against float64, float32 inputs; measured 2e-7. The tiled way quantizes x and h, as the reference does: against that,
# measured 1.3e-7, unless a value of h lies so near a midpoint that another order of sums rounds it otherwise.
BUDGET, TILES_BUDGET = 1e-6, 2e-3
# (tokens, experts, active, D, F)
FEW = {
    "vector": [(1, 4, 2, 200, 72), (1, 8, 3, 256, 128)],
    "pairs": [(3, 8, 2, 136, 160), (11, 2, 2, 136, 40), (1, 2, 1, 72, 600)],
}
TILES = [(20, 4, 3, 200, 72), (5, 8, 2, 256, 160)]


CUTS = {
    "vector": {"block_f": 8, "up_tiles": 2, "up_warps": 1, "block_d": 16, "down_tiles": 2},
    "pairs": {"block_f": 32, "up_warps": 2, "block_d": 64, "down_tiles": 2},
    "tiles": {"block_f": 128, "up_warps": 8, "block_d": 64, "down_tiles": 2, "block_t": 16},
    "rows": {"block_f": 128, "up_warps": 8, "block_d": 64, "down_tiles": 2, "block_t": 128, "down_t": 64},
}


def run(case, way, *, with_shared, **cut):
    from glm5.kernels.grouped_experts.triton import Tiling
    from glm5.kernels.grouped_experts.triton import grouped_experts as run

    tiling = Tiling(way, **(CUTS[way] | cut))
    return run(*case[:5], case.shared if with_shared else None, tiling=tiling)


@pytest.mark.parametrize(
    ("way", "shape", "with_shared"),
    [
        *((way, shape, True) for way in FEW for shape in FEW[way]),
        *((way, FEW[way][0], False) for way in FEW),
        *(pytest.param(way, shape, False, marks=pytest.mark.slow) for way in FEW for shape in FEW[way][1:]),
    ],
    ids=str,
)
def test_few_tokens_agree_with_float64(way, shape, with_shared, gen):
    case = make_experts(*shape, gen)
    got = run(case, way, with_shared=with_shared)
    assert rel_rms(got, exact_sum(case, with_shared=with_shared)) < BUDGET


@pytest.mark.parametrize(
    ("shape", "block_f"), [(TILES[0], 128), (TILES[1], 128), (TILES[1], 64), ((3, 2, 1, 72, 600), 128)], ids=str
)
def test_many_tokens_agree_with_the_reference(shape, block_f, gen):
    case = make_experts(*shape, gen)
    got = run(case, "tiles", with_shared=True, block_f=block_f)
    assert rel_rms(got, grouped_experts(*case[:5], shared=case.shared, impl="reference")) < TILES_BUDGET


@pytest.mark.parametrize(
    ("shape", "block_f", "block_t"),
    [((90, 3, 2, 136, 72), 128, 128), pytest.param((9, 3, 2, 72, 600), 64, 64, marks=pytest.mark.slow)],
    ids=str,
)
def test_very_many_tokens_agree_with_the_reference(shape, block_f, block_t, gen):
    case = make_experts(*shape, gen)
    case.expert[5:, 0] = 1  # more rows than a tile has, and fewer than half of one
    case.expert[5:, 1:] = 2
    got = run(case, "rows", with_shared=True, block_f=block_f, block_t=block_t)
    want = grouped_experts(*case[:5], shared=case.shared, impl="reference")
    assert rel_rms(got, want) < TILES_BUDGET


def test_tokens_that_all_choose_one_expert(gen):
    case = make_experts(19, 3, 1, 128, 32, gen)
    case.expert[:] = 2
    assert rel_rms(run(case, "pairs", with_shared=False), exact_sum(case, with_shared=False)) < BUDGET
    want = grouped_experts(*case[:5], impl="reference")
    assert rel_rms(run(case, "tiles", with_shared=False), want) < TILES_BUDGET


def test_budgets_notice_one_percent_of_one_expert(gen):
    case = make_experts(2, 4, 2, 136, 40, gen)
    want = exact_sum(case, with_shared=True)
    case.down.scale[int(case.expert[1, 1])] *= 1.01
    for way, budget in (("vector", BUDGET), ("pairs", BUDGET)):
        assert rel_rms(run(case, way, with_shared=True), want) > 10 * budget
    want = grouped_experts(*case[:5], impl="reference")
    case.down.scale[int(case.expert[1, 1])] *= 1.05
    for way in ("tiles", "rows"):
        assert rel_rms(run(case, way, with_shared=False), want) > 5 * TILES_BUDGET


def test_the_shared_expert_of_every_implementation(gen):
    case = make_experts(4, 4, 2, 136, 40, gen)
    plain = grouped_experts(*case[:5])
    for impl in ("reference", "invariant"):
        got = grouped_experts(*case[:5], shared=case.shared, impl=impl)
        assert rel_rms(got, plain + case.shared(case.x)) < BUDGET


@pytest.mark.parametrize("way", ["tiles", "rows"])
def test_rows_that_are_quantized_already(way, gen):
    from glm5.kernels.grouped_experts.triton import Tiling
    from glm5.kernels.grouped_experts.triton import grouped_experts as run_triton

    case = make_experts(9, 3, 2, 136, 72, gen)
    data, scale = act_quant(case.x)
    for quantized in ((data, scale.contiguous()), (data, scale.T.contiguous().T)):  # row by row, column by column
        got = run_triton(*case[:5], None, quantized, Tiling(way, **CUTS[way]))
        assert rel_rms(got, grouped_experts(*case[:5], impl="reference")) < TILES_BUDGET


def test_plain_weights_are_refused(gen):
    case = make_experts(2, 4, 2, 128, 32, gen)
    dense = torch.zeros(4, 64, 128)
    with pytest.raises(ValueError, match="needs BlockScaled weights"):
        grouped_experts(case.x, dense, case.down, case.weight, case.expert, impl="triton")
