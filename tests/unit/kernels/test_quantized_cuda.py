"""few.cu of experts and of linear layers, and tiles.cu, on a CPU: sharing of experts, inputs that warps do not share
out evenly, rows that end within a program, stages used twice, sizes that are refused."""

from importlib import import_module

import pytest
import torch

from glm5.kernels.quantized_experts import cuda, quantized_experts
from glm5.kernels.quantized_linear import cuda as linear_cuda
from glm5.kernels.quantized_linear import quantized_linear
from glm5.kernels.quantized_linear.tiling import Tiling
from glm5.kernels.quantized_weight import WeightFormat
from glm5.kernels.token_quant import token_quant
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import Matrix, build
from tests.support.dispatch import as_on, chosen_by
from tests.support.quantized_weights import exact_experts, quantized_case, random_quantized

BUDGET = 3e-3  # the result's rounding to bfloat16: measured 1.7e-3
CASES = [
    (WeightFormat("int4", None, "int8"), (1, 3, 2, 512, 128)),
    (WeightFormat("int4", 128, "fp8"), (1, 3, 2, 384, 256)),
    (WeightFormat("int4", 128, "fp8"), (7, 2, 2, 640, 128)),
    (WeightFormat("int4", 256, None), (2, 3, 2, 256, 512)),
]


@pytest.mark.compiler
@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_agrees_with_float64(form, shape, gen, tmp_path):
    case = quantized_case(*shape, form, gen)
    case = case._replace(x=case.x.bfloat16())
    num_tokens, _, active, width, inner = shape
    constants = cuda.constants_for(form, width, inner, active, num_tokens > 1)
    kernels = cuda.Kernels(*(build(cuda.SOURCE, tmp_path, name, constants) for name in cuda.Kernels._fields))
    got, exact, plus = (
        cuda.run(kernels, *case),
        exact_experts(case),
        torch.randn(case.x.shape, generator=gen).bfloat16(),
    )
    assert torch.equal(cuda.run(kernels, *case, plus), got + plus)
    assert rel_rms(got, exact) < BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, exact_experts(case)) > 2 * BUDGET


def test_refusals(gen):
    case = quantized_case(2, 3, 2, 256, 128, WeightFormat("int4", 128, "fp8"), gen)
    with pytest.raises(ValueError, match=r"needs rows in bfloat16 and int4 codes.*got torch\.float32"):
        quantized_experts(*case, impl="cuda")
    case = case._replace(x=case.x.bfloat16())
    with pytest.raises(ValueError, match="needs Hopper, got cpu; use impl='triton'"):
        quantized_experts(*case, impl="cuda")
    case = quantized_case(17, 3, 2, 256, 128, WeightFormat("int4", 128, None), gen)
    with pytest.raises(ValueError, match="is for 1 to 16 tokens"):
        quantized_experts(case.x.bfloat16(), *case[1:], impl="cuda")
    case = quantized_case(1, 3, 2, 320, 128, WeightFormat("int4", None, "int8"), gen)
    with pytest.raises(ValueError, match="takes inputs of a multiple of 128, up to 8192, got 320"):
        quantized_experts(case.x.bfloat16(), *case[1:], impl="cuda")


@pytest.mark.compiler
@pytest.mark.parametrize("shape", [(1, 40, 512), (9, 16, 1152), (16, 33, 128)], ids=str)
def test_a_linear_layer_has_the_references_bits(shape, gen, tmp_path):
    num_tokens, num_rows, width = shape
    weight, x = (
        random_quantized(gen, linear_cuda.FORMAT, num_rows, width),
        torch.randn(num_tokens, width, generator=gen),
    )
    constants = linear_cuda.constants_for(width, num_tokens) | {"ACT": 1}  # products of int8
    kernel = build(linear_cuda.FEW, tmp_path, "few", constants)
    got, want = linear_cuda.run_few(kernel, x.bfloat16(), weight), quantized_linear(x.bfloat16(), weight)
    assert torch.equal(got, want)
    quantized = token_quant(x.bfloat16(), "int8")
    assert torch.equal(linear_cuda.run_few(kernel, torch.zeros_like(x).bfloat16(), weight, quantized), want)
    weight.scale[-1] *= 1.5
    assert not torch.equal(got, quantized_linear(x.bfloat16(), weight))


@pytest.mark.compiler
@pytest.mark.parametrize("shape", [(17, 32, 132, 384), (33, 64, 128, 512), (128, 128, 4, 640)], ids=str)
def test_tiles_have_the_references_bits(shape, gen, tmp_path, monkeypatch):
    num_tokens, columns, num_rows, width = shape
    monkeypatch.setattr(linear_cuda.cuda_code, "tile_map", Matrix)
    weight, x = (
        random_quantized(gen, linear_cuda.FORMAT, num_rows, width),
        torch.randn(num_tokens, width, generator=gen),
    )
    constants = {"COLS": columns, "STAGES": 3 if columns == 128 else 2}
    kernel = build(linear_cuda.TILES, tmp_path, "tiles", constants, "hopper_int8_on_cpu.h")
    got = linear_cuda.run_tiles(kernel, columns, x.bfloat16(), weight, 1)
    assert torch.equal(got, quantized_linear(x.bfloat16(), weight))
    quantized = token_quant(x.bfloat16(), "int8")
    assert torch.equal(
        linear_cuda.run_tiles(kernel, columns, torch.zeros_like(x).bfloat16(), weight, 1, quantized), got
    )
    weight.scale[-1] *= 1.5
    assert not torch.equal(got, quantized_linear(x.bfloat16(), weight))


def test_auto_takes_what_was_measured(gen, monkeypatch):
    module = import_module("glm5.kernels.quantized_linear")
    x, weight = torch.zeros(20, 128).bfloat16(), random_quantized(gen, linear_cuda.FORMAT, 16, 128)
    as_on(monkeypatch, "gpu", "triton", "hopper")

    def choice(measured, why=""):
        monkeypatch.setattr(module, "measured_for", lambda *given: measured)
        monkeypatch.setattr(linear_cuda, "refusal", lambda *given: why)
        return chosen_by(module.TABLE, x, weight)

    assert choice(None) == choice(Tiling(block_o=32)) == choice(Tiling(cluster=2), "needs NVRTC") == "triton"
    assert choice(Tiling(cluster=2)) == "cuda"


def test_linear_layers_that_are_refused(gen):
    for rows, width, why in (
        (3, 192, "multiple of 128.*got 192"),
        (17, 128, "multiple of 4 outputs for more than 16 tokens, got 18"),
        (129, 192, "is for 1 to 128 tokens, got 129"),
    ):
        weight = random_quantized(gen, linear_cuda.FORMAT, 18, width)
        with pytest.raises(ValueError, match=why):
            quantized_linear(torch.randn(rows, width).bfloat16(), weight, impl="cuda")
    with pytest.raises(ValueError, match=r"needs rows in bfloat16 and weights in w8a8, got torch\.float32"):
        quantized_linear(torch.randn(3, 192), weight, impl="cuda")
    with pytest.raises(ValueError, match="needs Hopper, got cpu; use impl='triton'"):
        quantized_linear(
            torch.randn(3, 256).bfloat16(), random_quantized(gen, linear_cuda.FORMAT, 16, 256), impl="cuda"
        )
