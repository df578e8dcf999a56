"""Weights as codes: by hand, against the quantizer's own numbers and float64; Triton under the interpreter."""

import pytest
import torch

from glm5.kernels.block_scaled import FP8
from glm5.kernels.quantized_experts import quantized_experts
from glm5.kernels.quantized_linear import quantized_linear
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.token_quant import token_quant
from glm5.quant.minmax import fake_quantize, quantize
from glm5.quant.record import FP8_TOKEN, INT4_GROUP, INT8_CHANNEL, INT8_TOKEN
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import interpreted
from tests.support.quantized_weights import FORMS, exact_experts, exact_linear, quantized_case, random_quantized

# float32 scales and sums: measured 1e-7. Experts: a value of h near a midpoint may be rounded otherwise.
BUDGET, EXPERTS_BUDGET = 5e-7, 3e-3
SHAPES = [(1, 32, 128), (18, 70, 256)]  # (rows, outputs, inputs)
EXPERTS = (5, 3, 2, 128, 128)  # (tokens, experts, active, D, F)
SERVED = [form for form in FORMS if str(form) in ("w8a8", "w4a8", "w4a8-g128-fp8", "w4a16-g128", "w8a8-fp8")]


def test_values_by_hand():
    weight = QuantizedWeight(
        torch.tensor([[0x8F, 0x70]], dtype=torch.uint8), torch.tensor([[0.5]]), WeightFormat("int4")
    )
    assert weight.dequantize(torch.float64).tolist() == [[-0.5, -4.0, 0.0, 3.5]]
    weight = QuantizedWeight(
        torch.tensor([[-128, 127]], dtype=torch.int8), torch.tensor([[2.0, 3.0]]), WeightFormat("int8", 1)
    )
    assert weight.dequantize(torch.float32).tolist() == [[-256.0, 381.0]]
    assert str(WeightFormat("int4", 128, "fp8")) == "w4a8-g128-fp8"


@pytest.mark.parametrize(("kind", "grid"), [("int8", INT8_TOKEN), ("fp8", FP8_TOKEN)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_quantized_as_the_quantizer_does(kind, grid, dtype, gen):
    x = torch.randn(5, 100, generator=gen).to(dtype)
    x[1] = 0
    codes, scale = token_quant(x, kind)
    want = quantize(x, grid)
    assert torch.equal(codes.float(), want.codes.float())
    assert torch.equal(scale[:, None], want.scale)


@pytest.mark.parametrize("width", [1024, 1040])
def test_products_of_codes_are_exact_at_any_width(width):
    """All but the last product are the largest that there are. The control: float32 cannot hold the wider sum."""
    codes = torch.full((1, width), -128, dtype=torch.int8)
    row, want = codes.clone(), (width - 1) * 2**14 + 127
    codes[0, -1], row[0, -1] = -127, -1
    weight = QuantizedWeight(codes, torch.ones(1, 1), WeightFormat("int8", None, "int8"))
    got = quantized_linear(torch.ones(1, width, dtype=torch.float64), weight, (row, torch.ones(1)))
    assert got.item() == want
    assert (torch.tensor(float(want)).item() == want) == (width == 1024)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_agrees_with_float64(shape, form, gen):
    x, weight = torch.randn(shape[0], shape[2], generator=gen), random_quantized(gen, form, *shape[1:])
    got = quantized_linear(x, weight)
    assert rel_rms(got, exact_linear(x, weight)) < BUDGET
    assert (
        torch.equal(quantized_linear(x.double(), weight)[:1], quantized_linear(x[:1].double(), weight))
        or form.act is None
    )
    weight.scale[0] *= 1.01
    assert rel_rms(quantized_linear(x, weight), exact_linear(x, weight)) < BUDGET
    assert rel_rms(got, exact_linear(x, weight)) > 10 * BUDGET


@pytest.mark.parametrize(("grid", "act"), [(INT8_CHANNEL, INT8_TOKEN), (INT4_GROUP, FP8_TOKEN)], ids=str)
def test_a_quantized_layer_is_the_fake_quantized_one(grid, act, gen):
    w, x = torch.randn(24, 256, generator=gen), torch.randn(7, 256, generator=gen).double()
    q = quantize(w, grid)
    form = WeightFormat("int8", None, "int8") if grid.bits == 8 else WeightFormat("int4", 128, "fp8")
    codes = q.codes
    if grid.bits == 4:
        low, high = (codes[:, start::2].view(torch.uint8) & 15 for start in (0, 1))
        codes = low | (high << 4)
    got = quantized_linear(x, QuantizedWeight(codes, q.scale, form))
    want = fake_quantize(x, act) @ q.dequantize(torch.float64).T
    assert rel_rms(got, want) < 1e-7  # the dot product of a group is rounded to float32 in both
    assert torch.equal(QuantizedWeight(codes, q.scale, form).dequantize(torch.bfloat16), q.dequantize(torch.bfloat16))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("impl", ["reference", "invariant"])
def test_experts_agree_with_float64(form, impl, gen):
    case = quantized_case(9, 4, 2, 256, 128, form, gen)
    got = quantized_experts(*case, impl=impl)
    assert rel_rms(got, exact_experts(case)) < (EXPERTS_BUDGET if form.act else BUDGET)
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, exact_experts(case)) > 2 * EXPERTS_BUDGET


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_invariant_rows_do_not_depend_on_others(form, gen):
    case = quantized_case(11, 3, 2, 128, 128, form, gen)
    whole = quantized_experts(*case, impl="invariant")
    for t in range(11):
        one = (part[t : t + 1] for part in (case.x, case.weight, case.expert))
        x, weight, expert = one
        alone = quantized_experts(x, case.gate_up, case.down, weight, expert, impl="invariant")
        assert torch.equal(alone[0], whole[t])


def test_mistakes(gen):
    weight = random_quantized(gen, WeightFormat("int8"), 4, 16)
    with pytest.raises(ValueError, match="no kernel multiplies int8 codes with rows in fp8"):
        quantized_linear(torch.ones(1, 16), weight._replace(format=WeightFormat("int8", None, "fp8")))
    with pytest.raises(ValueError, match=r"need torch\.int8 and a float32 scale"):
        quantized_linear(torch.ones(1, 16), weight._replace(scale=weight.scale.double()))
    with pytest.raises(ValueError, match="unknown impl"):
        quantized_linear(torch.ones(1, 16), weight, impl="fast")
    x = torch.ones(1, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient"):
        quantized_linear(x, weight).sum().backward()
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="multiple of 64"):
        quantized_linear(torch.ones(1, 32), random_quantized(gen, WeightFormat("int4", 32), 4, 32), impl="triton")


@interpreted
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("halves", [False, True])
def test_rows_in_triton_bit_by_bit(kind, halves, gen):
    from glm5.kernels.token_quant.triton import prepare_rows

    x = torch.randn(5, 300, generator=gen)
    x[2] = 0
    codes, scale = prepare_rows(x, kind, halves=halves)
    want, want_scale = token_quant(x, kind, impl="reference")
    if halves:
        want = torch.cat([want.view(torch.int8)[:, 0::2], want.view(torch.int8)[:, 1::2]], dim=1).view(want.dtype)
    assert codes.dtype == (FP8 if kind == "fp8" else torch.int8)
    assert torch.equal(codes.float(), want.float())
    assert torch.equal(scale, want_scale)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=interpreted)])
def test_rows_that_are_quantized_already(impl, gen):
    x, weight = torch.randn(18, 256, generator=gen), random_quantized(gen, WeightFormat("int8", None, "int8"), 70, 256)
    codes, scale = token_quant(x, "int8")
    want = quantized_linear(x, weight)
    assert torch.equal(quantized_linear(torch.full_like(x, torch.nan), weight, (codes, scale), impl=impl), want)
    assert torch.equal(quantized_linear(x, weight, (codes, 2 * scale), impl=impl), 2 * want)


@interpreted
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_in_triton(shape, form, gen):
    x, weight = torch.randn(shape[0], shape[2], generator=gen), random_quantized(gen, form, *shape[1:])
    got = quantized_linear(x, weight, impl="triton")
    assert rel_rms(got, quantized_linear(x, weight)) < BUDGET
    weight.scale[0] *= 1.001
    assert rel_rms(got, quantized_linear(x, weight)) > 10 * BUDGET


@interpreted
@pytest.mark.parametrize("form", [WeightFormat("int8", None, "int8"), WeightFormat("int4", None, "int8")], ids=str)
@pytest.mark.parametrize("split", [2, 5])
def test_inputs_shared_by_programs_give_the_same_bits(split, form, gen):
    """Of five steps, also one each, and none for the last of some."""
    from glm5.kernels.quantized_linear.tiling import Tiling
    from glm5.kernels.quantized_linear.triton import quantized_linear as run
    from glm5.kernels.triton_support import arrivals

    x, weight = torch.randn(19, 576, generator=gen), random_quantized(gen, form, 70, 576)
    tiling = Tiling(32, 16, 128)
    got = run(x, weight, tiling._replace(split=split))
    assert torch.equal(got, run(x, weight, tiling))
    assert torch.equal(got, quantized_linear(x, weight))
    assert torch.equal(got, run(x, weight, tiling._replace(split=split, parts=2)))
    assert not arrivals(x.device).any()
    weight.codes[-1, -1] ^= 1
    assert not torch.equal(got, run(x, weight, tiling._replace(split=split)))


@interpreted
def test_linear_in_triton_takes_what_was_measured(gen, monkeypatch):
    from glm5.kernels.quantized_linear import tiling
    from glm5.kernels.quantized_linear import triton as op

    requested, guessed = [], []
    x, weight = torch.randn(18, 256, generator=gen), random_quantized(gen, WeightFormat("int8", None, "int8"), 70, 256)

    def find(kind, *what):
        requested.append(what)
        return kind(block_o=16, block_t=32, block_k=64, cluster=2 * (len(requested) > 1))

    def guess(*given):
        guessed.append(given)
        return tiling.tiling_for(*given)

    monkeypatch.setattr(tiling.tuned, "find", find)
    monkeypatch.setattr(op, "tiling_for", guess)
    assert rel_rms(quantized_linear(x, weight, impl="triton"), quantized_linear(x, weight)) < BUDGET
    assert requested == [("quantized_linear", "w8a8 O=70 D=256", 18, torch.device("cpu"))]
    assert not guessed
    # Where CUDA C++ was faster there is no tiling for Triton.
    assert rel_rms(quantized_linear(x, weight, impl="triton"), quantized_linear(x, weight)) < BUDGET
    assert guessed == [(18, 70)]


@interpreted
@pytest.mark.parametrize(
    ("form", "way"),
    [
        *((form, "pairs") for form in SERVED),
        (SERVED[0], "tiles"),
        (SERVED[2], "tiles"),
    ],
    ids=str,
)
def test_experts_in_triton(form, way, gen):
    from glm5.kernels.quantized_experts.triton import Tiling
    from glm5.kernels.quantized_experts.triton import quantized_experts as run

    case = quantized_case(*EXPERTS, form, gen)
    got = run(*case, Tiling(way, down_tiles=2))
    want, plus = quantized_experts(*case), torch.randn(*got.shape, generator=gen)
    assert torch.equal(run(*case, Tiling(way, down_tiles=2), plus_TD=plus), got + plus)
    assert torch.equal(quantized_experts(*case, plus), want + plus)
    assert rel_rms(got, want) < (EXPERTS_BUDGET if form.act else BUDGET)
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, quantized_experts(*case)) > 2 * EXPERTS_BUDGET
