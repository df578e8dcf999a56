"""Every op on a GPU against the same op on the CPU in float64; what is exact is exact there too."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.attention_target import head_mean_probs
from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.index_score import index_score
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.router import router
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.top_k import top_k
from glm5.testing.numerics import rel_rms
from tests.support.paged import CASES, make_keys, make_pool, make_where

pytestmark = pytest.mark.gpu

# Inputs are rounded before both runs. Measured on an H200: float32 7e-7, bfloat16 5e-3 (rounded results and gradients).
BUDGET = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def any_algorithm(poison):
    """Several CUDA ops refuse to run in the mode that poisons memory."""
    torch.use_deterministic_algorithms(mode=False)


def assert_same_on_gpu(op, *inputs: torch.Tensor, dtype: torch.dtype) -> None:
    """Results and gradients of `op(*inputs)`: on the GPU in `dtype`, on the CPU in float64."""
    runs = []
    for device, to in (("cuda", dtype), ("cpu", torch.float64)):
        leaves = [t.to(dtype).to(device, to, copy=True).requires_grad_() for t in inputs]
        results = op(*leaves)
        sum(r[r.isfinite()].sin().sum() for r in results).backward()
        runs.append([r.detach().cpu() for r in results] + [t.grad.cpu() for t in leaves])
    for got, want in zip(*runs, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        assert rel_rms(got[want.isfinite()], want[want.isfinite()]) < BUDGET[dtype]


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nothing", "only padding")])
def test_attention_ops(name, dtype, gen):
    where = make_where(name, gen)
    q_TJI, w_TJ, q_THL = (torch.randn(where.num_queries, *s, generator=gen) for s in [(16, 32), (16,), (4, 40)])
    key_PZI, latent_PZL = (make_pool(where, width, gen, torch.float32).nan_to_num() for width in (32, 40))
    keys = make_keys(where, 5, gen)

    def at(device):
        return [t.to(device) for t in where.args]

    for impl in ("reference", "tiled"):
        op = lambda q, k, w, impl=impl: [index_score(q, k, w, *at(q.device), scale=0.2, impl=impl)]  # noqa: E731
        assert_same_on_gpu(op, q_TJI, key_PZI, w_TJ, dtype=dtype)
    for chosen in (keys, None):
        here = {device: None if chosen is None else chosen.to(device) for device in ("cuda", "cpu")}
        for impl in ("gather", "masked"):
            op = lambda q, k, impl=impl, here=here: sparse_mla(  # noqa: E731
                q, k, here[q.device.type], *at(q.device), scale=0.2, value_dim=32, impl=impl
            )
            assert_same_on_gpu(op, q_THL, latent_PZL, dtype=dtype)
        lse = sparse_mla(q_THL, latent_PZL, chosen, *where.args, scale=0.2, value_dim=32)[1]
        want = head_mean_probs(q_THL, latent_PZL, chosen, lse, *where.args, scale=0.2)
        on_gpu = [t.cuda() for t in (q_THL, latent_PZL)]
        got = head_mean_probs(*on_gpu, here["cuda"], lse.cuda(), *at("cuda"), scale=0.2)
        assert rel_rms(got.cpu(), want) < BUDGET[torch.float32]


@pytest.mark.parametrize("levels", [2, 10**6])
def test_top_k(levels, gen):
    score = torch.randint(levels, (300, 700), generator=gen).float()
    score[torch.rand(300, 700, generator=gen) < 0.5] = -float("inf")
    for k in (1, 64, 700, 1000):
        assert torch.equal(top_k(score.cuda(), k).cpu(), top_k(score, k))


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
def test_elementwise_ops(dtype, gen):
    x, weight = torch.randn(9, 4, 64, generator=gen), torch.randn(64, generator=gen)
    assert_same_on_gpu(lambda x, w: [rms_norm(x, w, 1e-5)], x, weight, dtype=dtype)
    table = rope_table(torch.arange(9), 64, 10000.0, torch.float32)
    op = lambda x: [rope(x, *(t.to(x.device, dtype).to(x.dtype) for t in table))]  # noqa: E731
    assert_same_on_gpu(op, x, dtype=dtype)


def test_experts(gen):
    x, weight_ED, gate_up, down = (
        torch.randn(*s, generator=gen) * s[-1] ** -0.5 for s in [(50, 64), (8, 64), (8, 2 * 48, 64), (8, 64, 48)]
    )
    opts = {"top_k": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scaling_factor": 2.5}
    weight_TA, expert_TA = router(x, weight_ED, torch.zeros(8), **opts)
    assert torch.equal(router(x.cuda(), weight_ED.cuda(), torch.zeros(8).cuda(), **opts)[1].cpu(), expert_TA)
    op = lambda x, g, d, w: [grouped_experts(x, g, d, w, expert_TA.to(x.device))]  # noqa: E731
    assert_same_on_gpu(op, x, gate_up, down, weight_TA, dtype=torch.float32)


def test_fp8_is_exact_there_too(gen):
    x, dense = torch.randn(33, 300, generator=gen), torch.randn(576, 300, generator=gen) * 0.02
    for got, want in zip(act_quant(x.cuda()), act_quant(x), strict=True):
        assert torch.equal(got.float().cpu(), want.float())
    weight, on_gpu = quantize_blocks(dense), quantize_blocks(dense.cuda())
    assert torch.equal(on_gpu.data.float().cpu(), weight.data.float())
    assert torch.equal(on_gpu.scale.cpu(), weight.scale)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(on_gpu.dequantize(dtype).cpu(), weight.dequantize(dtype))
    assert torch.equal(fp8_linear(x.cuda(), on_gpu, impl="reference").cpu(), fp8_linear(x, weight))
