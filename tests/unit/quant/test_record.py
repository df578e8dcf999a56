"""The record of a quantized tensor: shapes of scales, one rounding, refusals."""

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.quant import record
from glm5.quant.record import FP8, FP8_BLOCK, INT4_CHANNEL, INT4_GROUP, INT8_CHANNEL, NVFP4_GROUP, Grid, Quantized

GRIDS = [
    INT8_CHANNEL,
    INT4_CHANNEL,
    INT4_GROUP,
    FP8_BLOCK,
    Grid("int", 4, "tensor"),
    Grid("int", 8, "block", 100),
    Grid("int", 4, "group", 32, symmetric=False),
    NVFP4_GROUP,
]


def filled(grid: Grid, shape: tuple[int, ...], gen: torch.Generator) -> Quantized:
    low, high = (0, 15) if grid.kind == "nvfp4" else (int(grid.quant_min), int(grid.quant_max))
    codes = torch.randint(low, high + 1, shape, generator=gen)
    of_scale = grid.scale_shape(shape)
    scale = torch.rand(of_scale, generator=gen) + 0.1
    offset = None if grid.symmetric else torch.randint(-8, 8, of_scale, generator=gen).float()
    tensor_scale = torch.rand(*shape[:-2], 1, 1, generator=gen) if grid.kind == "nvfp4" else None
    return Quantized(grid, codes.to(FP8 if grid.kind == "fp8" else torch.int8), scale, offset, tensor_scale)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_dequantize_is_the_product_element_by_element_rounded_once(grid, lead, seed, monkeypatch):
    monkeypatch.setattr(record, "_CHUNK", 1 << 14)  # several parts of a matrix
    shape = (*lead, 300, 256)
    got = filled(grid, shape, torch.Generator().manual_seed(seed))
    exact, low = got.dequantize(torch.float64), got.dequantize(torch.bfloat16)
    assert exact.shape == shape
    sizes = {"channel": (1, 256), "tensor": (300, 256), "group": (1, grid.group), "block": (grid.group, grid.group)}
    rows, cols = sizes[grid.scope]
    for where in [(0, 0), (299, 255), (127, 128), (128, 127), (201, 99)]:
        at = (*(2 for _ in lead), *where)
        of_scale = (*at[:-2], where[0] // rows, where[1] // cols)
        code = got.codes[at].double()
        if grid.kind == "nvfp4":
            code = record.E2M1[int(code) % 8] * (-1 if code >= 8 else 1)
        scale = got.scale[of_scale].double()
        if got.tensor_scale is not None:
            scale = scale * got.tensor_scale[(*at[:-2], 0, 0)].double()
        want = scale * (code - (0 if got.offset is None else got.offset[of_scale].double()))
        assert exact[at] == want
    assert ((low.double() - exact).abs() <= exact.abs() * 2**-8).all()
    if lead:
        alone = [None if p is None else p[1] for p in (got.codes, got.scale, got.offset, got.tensor_scale)]
        assert torch.equal(Quantized(grid, *alone).dequantize(torch.bfloat16), low[1])


def test_bfloat16_is_rounded_once():
    """A product a hair above the midpoint of two bfloat16: float32 rounds it to the midpoint, and that to even."""
    midpoint, cases = 1 + 2**-8, 0
    for code in range(3, 127, 2):
        scale = torch.tensor([[midpoint / code]], dtype=torch.float32)
        got = Quantized(INT8_CHANNEL, torch.tensor([[code]], dtype=torch.int8), scale).dequantize(torch.bfloat16)
        assert got.item() == (1.0 if code * scale.item() <= midpoint else 1 + 2**-7)
        cases += code * scale.item() > midpoint and (code * scale).bfloat16().item() == 1.0
    assert cases > 5, "no product of these shows the difference"


def test_a_grid_says_what_it_cannot_be():
    for wrong in (
        {"kind": "int", "bits": 9, "scope": "channel"},
        {"kind": "fp8", "bits": 4, "scope": "channel"},
        {"kind": "int", "bits": 4, "scope": "group"},
        {"kind": "int", "bits": 4, "scope": "channel", "group": 128},
        {"kind": "nvfp4", "bits": 4, "scope": "group", "group": 128},
        {"kind": "fp8", "bits": 8, "scope": "token", "symmetric": False},
    ):
        with pytest.raises(ConfigError):
            Grid(**wrong)
    with pytest.raises(ConfigError, match="rows of 200 do not divide into groups of 128"):
        INT4_GROUP.scale_shape((4, 200))


def test_parts_that_do_not_belong_together_are_refused():
    codes, scale = torch.zeros(4, 256, dtype=torch.int8), torch.ones(4, 2)
    Quantized(INT4_GROUP, codes, scale).check()
    for wrong in (
        Quantized(INT4_GROUP, codes, scale[:, :1]),
        Quantized(INT4_GROUP, codes, scale, offset=scale),
        Quantized(INT4_GROUP, codes.float(), scale),
        Quantized(NVFP4_GROUP, codes, torch.ones(4, 16)),
        Quantized(Grid("int", 4, "channel", symmetric=False), codes, scale[:, :1]),
    ):
        with pytest.raises(ValueError, match="Quantized"):
            wrong.check()
