"""Products with FP8 weights, experts, router and norms on a GPU: against float64, twenty times alike, controls."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.add_rms_norm import add_rms_norm_quantized
from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.fp8_linear import cuda as cuda_linear
from glm5.kernels.fp8_linear import cuda_rows, fp8_linear
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.rope import rope, rope_part, rope_table
from glm5.kernels.router import router
from glm5.kernels.token_quant import token_quant
from glm5.kernels.triton_support import arrivals
from glm5.testing.numerics import rel_rms
from tests.support.experts import exact_sum, make_experts

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Inputs are rounded before both runs: results' rounding, and of float32 what its own products lose.
BUDGET = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}
# FP8 matrix units add up 128 products in 14 bits of fraction; then h is quantized in other places.
TILES_BUDGET, EXPERTS_BUDGET = 4e-3, 1.5e-2
REPEATS = 20
OPTS = {"top_k": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scaling_factor": 2.5}


@pytest.fixture(autouse=True)
def poison():
    """Uninitialised memory is NaN; ops that cannot be deterministic may run."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear(T, O, D, dtype, gen):
    x, weight = torch.randn(T, D, generator=gen).to(dtype), quantize_blocks(torch.randn(O, D, generator=gen) * 0.02)
    return x.cuda(), BlockScaled(weight.data.cuda(), weight.scale.cuda())


FEW = [(T, O, D, torch.bfloat16) for T in (1, 2, 8, 9, 16) for O, D in ((1, 1), (576, 2048), (320, 6144))]
FEW += [(T, 130, 300, dtype) for T in (1, 7, 9) for dtype in DTYPES]


@pytest.mark.parametrize(("T", "O", "D", "dtype"), FEW, ids=str)
def test_few_rows(T, O, D, dtype, gen):
    x, weight = linear(T, O, D, dtype, gen)
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert rel_rms(fp8_linear(x, weight, impl="triton"), exact) < BUDGET[dtype]
    weight.scale[0, 0] *= 1.5
    assert rel_rms(fp8_linear(x, weight, impl="triton"), exact) > 2 * BUDGET[dtype] or T == O == 1


@pytest.mark.parametrize("T", [17, 32, 100, 300])
@pytest.mark.parametrize(("O", "D"), [(130, 300), (576, 2048), (2624, 6144)])
def test_many_rows(T, O, D, gen):
    x, weight = linear(T, O, D, torch.bfloat16, gen)
    want = fp8_linear(x, weight, impl="reference")
    assert rel_rms(fp8_linear(x, weight, impl="triton"), want) < TILES_BUDGET
    if D % 512 == 0:
        assert rel_rms(fp8_linear(x, weight, impl="scaled_mm"), want) < TILES_BUDGET
    weight.scale[0, 0] *= 1.5
    assert rel_rms(fp8_linear(x, weight, impl="triton"), want) > TILES_BUDGET


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantization_is_the_reference_bit_by_bit(dtype, gen):
    for shape in ((1, 1), (5, 300), (40, 6144)):
        x = torch.randn(*shape, generator=gen).to(dtype)
        x[:, ::7] *= 1e-3
        for got, want in zip(act_quant(x.cuda(), impl="triton"), act_quant(x), strict=True):
            assert torch.equal(got.float().cpu(), want.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 4, 2, 200, 72), (2, 32, 8, 512, 128), (9, 16, 8, 512, 256), (32, 16, 2, 264, 40), (5, 4, 2, 512, 640)],
    ids=str,
)
def test_experts_of_few_tokens(shape, dtype, gen):
    case = make_experts(*shape, gen).to("cuda", dtype)
    for shared in (case.shared, None):
        exact = exact_sum(case, with_shared=shared is not None)
        got = grouped_experts(*case[:5], shared=shared, impl="triton")
        assert rel_rms(got, exact) < 2 * BUDGET[dtype]  # h is rounded too
        assert rel_rms(grouped_experts(*case[:5], shared=shared, impl="reference"), exact) > rel_rms(got, exact)
    case.down.scale[int(case.expert[0, 0])] *= 1.2
    assert rel_rms(grouped_experts(*case[:5], impl="triton"), exact) > 2 * BUDGET[dtype]


@pytest.mark.parametrize(
    "shape", [(33, 4, 2, 200, 72), (70, 32, 8, 512, 128), (300, 16, 8, 512, 256), (70, 4, 2, 512, 640)], ids=str
)
def test_experts_of_many_tokens(shape, gen):
    case = make_experts(*shape, gen).to("cuda", torch.bfloat16)
    for shared in (case.shared, None):
        want = grouped_experts(*(t.double() if i == 0 else t for i, t in enumerate(case[:5])), impl="reference")
        want = want if shared is None else want + shared(case.x.double())
        assert rel_rms(grouped_experts(*case[:5], shared=shared, impl="triton"), want) < EXPERTS_BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(grouped_experts(*case[:5], impl="triton"), want) > EXPERTS_BUDGET


@pytest.mark.parametrize("T", [1, 70, 300, 1500])
@pytest.mark.parametrize("skewed", [False, True])
def test_experts_of_prompts(T, skewed, gen):
    case = make_experts(T, 16, 8, 1024, 256, gen).to("cuda", torch.bfloat16)
    if skewed:
        case.expert[:] = torch.arange(3, 11)
    for shared in (case.shared, None):
        want = grouped_experts(*(t.double() if i == 0 else t for i, t in enumerate(case[:5])), impl="reference")
        want = want if shared is None else want + shared(case.x.double())
        got = grouped_experts(*case[:5], shared=shared, impl="cuda")
        assert rel_rms(got, want) < EXPERTS_BUDGET
        for _ in range(REPEATS):
            assert torch.equal(grouped_experts(*case[:5], shared=shared, impl="cuda"), got)
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(grouped_experts(*case[:5], impl="cuda"), want) > EXPERTS_BUDGET


@pytest.mark.parametrize("T", [1, 17, 32, 64, 100, 128])
@pytest.mark.parametrize(("O", "D", "shares"), [(132, 256, 1), (576, 2048, 2), (2752, 6144, 4), (1024, 1536, 8)])
def test_rows_of_a_step(T, O, D, shares, gen):
    x, weight = linear(T, O, D, torch.bfloat16, gen)
    want = fp8_linear(x.double(), weight, impl="reference")
    got = cuda_linear.fp8_linear(x, weight, None, cuda_linear.Cut(shares))
    assert rel_rms(got, want) < TILES_BUDGET
    for _ in range(REPEATS):
        assert torch.equal(cuda_linear.fp8_linear(x, weight, None, cuda_linear.Cut(shares)), got)
    weight.scale[0, 0] *= 1.5
    assert rel_rms(fp8_linear(x, weight, impl="cuda"), want) > 2 * TILES_BUDGET


@pytest.mark.parametrize("T", [1, 100, 300, 2048])
@pytest.mark.parametrize(("O", "D"), [(256, 256), (512, 1536), (6144, 2048)])
def test_rows_of_prompts(T, O, D, gen):
    """What sends rows to other ranks (tests/gpu/test_ranks_cuda.py), keeping all of them."""
    x, weight = linear(T, O, D, torch.bfloat16, gen)
    want = fp8_linear(x.double(), weight, impl="reference")
    got = cuda_rows.fp8_linear(x, weight)
    assert rel_rms(got, want) < TILES_BUDGET
    for _ in range(REPEATS):
        assert torch.equal(cuda_rows.fp8_linear(x, weight), got)
    weight.scale[0, 0] *= 1.5
    assert rel_rms(cuda_rows.fp8_linear(x, weight)[:, :128], want[:, :128]) > 2 * TILES_BUDGET


@pytest.mark.parametrize("T", [1, 8, 17, 300])
def test_router(T, gen):
    x, weight = (torch.randn(n, 1024, generator=gen).bfloat16().cuda() for n in (T, 256))
    bias = torch.randn(256, generator=gen).cuda() * 0.01
    got, want = (router(x, weight * 0.03, bias, **OPTS, impl=impl) for impl in ("triton", "reference"))
    score = (x.double() @ (weight * 0.03).double().T).sigmoid() + bias
    best = score.topk(9, dim=-1).values
    clear = best[:, 7] - best[:, 8] > 1e-5
    assert clear.float().mean() > 0.9
    assert torch.equal(got[1][clear], want[1][clear])
    assert rel_rms(got[0][clear], want[0][clear]) < 1e-5
    assert not arrivals(x.device).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_rope(dtype, gen):
    x, residual, weight = (torch.randn(*s, generator=gen).to(dtype).cuda() for s in ((5, 6144), (5, 6144), (6144,)))
    got, want = (add_rms_norm_quantized(x, residual, weight, 1e-5, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(got[1], want[1])
    assert rel_rms(got[0], want[0]) < BUDGET[dtype]
    tokens = add_rms_norm_quantized(x, residual, weight, 1e-5, "int8", impl="triton")
    assert torch.equal(tokens[1], want[1])
    assert rel_rms(tokens[0], want[0]) < BUDGET[dtype]
    for codes, of_the_cpu in zip(tokens[2:], token_quant(tokens[0].cpu(), "int8"), strict=True):
        assert torch.equal(codes.cpu(), of_the_cpu)
    table = rope_table(torch.arange(5, device="cuda"), 64, 1e6, dtype)
    rows = x.view(5, 24, 256)[..., -64:]
    rotated = rope(rows, *table, impl="reference")
    assert torch.equal(rope(rows, *table, impl="triton"), rotated)
    with torch.inference_mode():
        where = rope_part(x.view(5, 24, 256).clone(), *table, None, 192, 256)
    assert torch.equal(where[..., 192:], rotated)
    assert torch.equal(where[..., :192], x.view(5, 24, 256)[..., :192])


@pytest.mark.parametrize("T", [1, 8, 16, 64, 300])
def test_alike_every_time(T, gen):
    x, weight = linear(T, 2624, 6144, torch.bfloat16, gen)
    case = make_experts(T, 32, 8, 512, 256, gen).to("cuda", torch.bfloat16)
    gate = torch.randn(32, 512, generator=gen).bfloat16().cuda()
    bias = torch.zeros(32, device="cuda")

    def once() -> list[torch.Tensor]:
        routed = router(case.x, gate, bias, **OPTS, impl="triton")
        out = grouped_experts(*case[:3], *routed, shared=case.shared, impl="triton")
        return [fp8_linear(x, weight, impl="triton"), *routed, out]

    first = once()
    assert all(t.float().isfinite().all() for t in first)
    for _ in range(REPEATS):
        for got, want in zip(once(), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("T", [1, 8, 40])
def test_in_a_graph(T, gen):
    """Captured once, replayed on other inputs: no host read, no shape that depends on data."""
    x, weight = linear(T, 576, 2048, torch.bfloat16, gen)
    case = make_experts(T, 32, 8, 512, 256, gen).to("cuda", torch.bfloat16)
    gate, bias = torch.randn(32, 512, generator=gen).bfloat16().cuda(), torch.zeros(32, device="cuda")

    def once() -> list[torch.Tensor]:
        routed = router(case.x, gate, bias, **OPTS, impl="triton")
        out = grouped_experts(*case[:3], *routed, shared=case.shared, impl="triton")
        return [fp8_linear(x, weight, impl="triton"), out]

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    x.copy_(torch.randn(x.shape, generator=gen))
    case.x.copy_(torch.randn(case.x.shape, generator=gen))
    graph.replay()
    for got, want in zip(captured, once(), strict=True):
        assert torch.equal(got, want)
