"""Weights as codes on a GPU: against float64 and the reference, twenty times alike, controls; in a graph."""

import pytest
import torch

from glm5.kernels.quantized_experts import quantized_experts
from glm5.kernels.quantized_linear import cuda, quantized_linear
from glm5.kernels.quantized_linear.tiling import Tiling
from glm5.kernels.quantized_weight import QuantizedWeight, WeightFormat
from glm5.kernels.token_quant import token_quant
from glm5.testing.numerics import rel_rms
from tests.support.quantized_weights import FORMS, exact_experts, exact_linear, quantized_case, random_quantized

pytestmark = pytest.mark.gpu

# The result's rounding to bfloat16; experts: h is rounded, and its codes may fall otherwise. The reference rounds h
# more often, and a value that falls otherwise in e4m3 is an eighth of itself away.
LINEAR_BUDGET, EXPERTS_BUDGET, REFERENCE_BUDGET = 3e-3, 1.5e-2, 2.5e-2
REPEATS = 20


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 64), (5, 6144), (40, 1536)], ids=str)
def test_rows_bit_by_bit(kind, shape, gen):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(*shape, generator=gen).to(dtype)
        x[0, ::7] *= 1e-3
        for got, want in zip(token_quant(x.cuda(), kind, impl="triton"), token_quant(x, kind), strict=True):
            assert torch.equal(got.float().cpu(), want.float())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(1, 130, 384), (7, 576, 6144), (40, 2624, 2048), (300, 512, 6144)], ids=str)
def test_linear(shape, form, gen):
    x = torch.randn(shape[0], shape[2], generator=gen).bfloat16()
    weight = random_quantized(gen, form, *shape[1:])
    card = QuantizedWeight(weight.codes.cuda(), weight.scale.cuda(), form)
    got = quantized_linear(x.cuda(), card, impl="triton")
    exact = exact_linear(x, weight).cuda()
    assert rel_rms(got, exact) < LINEAR_BUDGET
    assert all(torch.equal(quantized_linear(x.cuda(), card, impl="triton"), got) for _ in range(REPEATS))
    card.scale[0] *= 4
    assert rel_rms(quantized_linear(x.cuda(), card, impl="triton"), exact) > LINEAR_BUDGET


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2624, 6144), (8, 100, 2048), (16, 1024, 6144), (5, 6144, 512),
        (17, 132, 384), (40, 6144, 2048), (64, 2624, 6144), (128, 512, 6144), (100, 6144, 256),
    ],
    ids=str,
)  # fmt: skip
def test_linear_of_a_steps_tokens(shape, gen):
    x = torch.randn(shape[0], shape[2], generator=gen).bfloat16()
    weight = random_quantized(gen, WeightFormat("int8", None, "int8"), *shape[1:])
    card = QuantizedWeight(weight.codes.cuda(), weight.scale.cuda(), weight.format)
    got = quantized_linear(x.cuda(), card, impl="cuda")
    assert torch.equal(got.cpu(), quantized_linear(x, weight))
    assert all(torch.equal(quantized_linear(x.cuda(), card, impl="cuda"), got) for _ in range(REPEATS))
    quantized = token_quant(x.cuda(), "int8")
    for impl in ("cuda", "triton"):
        assert torch.equal(quantized_linear(torch.zeros_like(x).cuda(), card, quantized, impl=impl), got)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(17, 132, 1280), (128, 2624, 6144)], ids=str)
def test_linear_by_clusters(shape, cluster, gen):
    x = torch.randn(shape[0], shape[2], generator=gen).bfloat16()
    weight = random_quantized(gen, WeightFormat("int8", None, "int8"), *shape[1:])
    card = QuantizedWeight(weight.codes.cuda(), weight.scale.cuda(), weight.format)
    assert torch.equal(
        cuda.quantized_linear(x.cuda(), card, Tiling(cluster=cluster)).cpu(), quantized_linear(x, weight)
    )


@pytest.mark.parametrize("tiling", [(16, 8, 256, 1, 4, 2, 8), (64, 32, 128, 1, 4, 4, 3), (64, 128, 128, 1, 4, 8, 2)])
@pytest.mark.parametrize("shape", [(1, 2624, 6144), (33, 100, 2048), (128, 512, 6144)], ids=str)
def test_linear_whose_inputs_are_shared(shape, tiling, gen):
    from glm5.kernels.quantized_linear.triton import quantized_linear as run

    x = torch.randn(shape[0], shape[2], generator=gen).bfloat16()
    weight = random_quantized(gen, WeightFormat("int8", None, "int8"), *shape[1:])
    card = QuantizedWeight(weight.codes.cuda(), weight.scale.cuda(), weight.format)
    got = run(x.cuda(), card, Tiling(*tiling))
    assert torch.equal(got.cpu(), quantized_linear(x, weight))
    assert all(torch.equal(run(x.cuda(), card, Tiling(*tiling)), got) for _ in range(REPEATS))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4, 2, 256, 128), (9, 32, 8, 512, 256), (33, 4, 2, 512, 384), (300, 16, 8, 512, 256)], ids=str
)
def test_experts(shape, form, gen):
    case = quantized_case(*shape, form, gen).to("cuda", torch.bfloat16)
    exact, got = exact_experts(case), quantized_experts(*case, impl="triton")
    assert rel_rms(got, exact) < EXPERTS_BUDGET
    assert all(torch.equal(quantized_experts(*case, impl="triton"), got) for _ in range(REPEATS))
    assert torch.equal(quantized_experts(*case, case.x, impl="triton"), got + case.x)
    assert rel_rms(got, quantized_experts(*case, impl="reference")) < REFERENCE_BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 2
    assert rel_rms(quantized_experts(*case, impl="triton"), exact) > EXPERTS_BUDGET


@pytest.mark.parametrize("form", [form for form in FORMS if form.weight == "int4" and form.group != 64], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4, 2, 256, 128), (1, 32, 8, 6144, 256), (16, 8, 8, 512, 256), (7, 3, 2, 640, 512)], ids=str
)
def test_experts_of_few_tokens(shape, form, gen):
    case = quantized_case(*shape, form, gen).to("cuda", torch.bfloat16)
    exact, got = exact_experts(case), quantized_experts(*case, impl="cuda")
    assert rel_rms(got, exact) < EXPERTS_BUDGET
    assert all(torch.equal(quantized_experts(*case, impl="cuda"), got) for _ in range(REPEATS))
    assert torch.equal(quantized_experts(*case, case.x, impl="cuda"), got + case.x)
    case.down.scale[int(case.expert[0, 0])] *= 2
    assert rel_rms(quantized_experts(*case, impl="cuda"), exact) > EXPERTS_BUDGET


@pytest.mark.parametrize("tokens", [4, 70])
@pytest.mark.parametrize("form", [FORMS[2], FORMS[3], FORMS[5]], ids=str)
def test_in_a_graph(tokens, form, gen):
    """Nothing is asked of the device: other choices in the same memory give other results."""
    case = quantized_case(tokens, 16, 4, 512, 256, form, gen).to("cuda", torch.bfloat16)
    other = quantized_case(tokens, 16, 4, 512, 256, form, gen)
    quantized_experts(*case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_experts(*case)
    case.x.copy_(other.x.bfloat16())
    case.expert.copy_(other.expert)
    graph.replay()
    assert torch.equal(out, quantized_experts(*case))
