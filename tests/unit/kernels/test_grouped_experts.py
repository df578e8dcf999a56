"""grouped_experts against a float64 loop over tokens, and its rounding against a loop in the model's dtype."""

import pytest
import torch
from torch.nn import functional as F

from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.grouped_experts import grouped_experts
from glm5.testing.numerics import rel_rms

IMPLS = ["reference", "invariant"]
# (tokens, experts, active, D, F)
SHAPES = [(1, 2, 1, 8, 4), (1, 8, 2, 6, 2), (13, 4, 4, 16, 12), (40, 8, 2, 24, 20), (3, 32, 3, 8, 8), (0, 4, 2, 8, 4)]
# Inputs are rounded before both runs. Measured: float64 3e-16, float32 1.8e-7. bfloat16 rounds gate and up, their
# product, each term and the sum to 8 bits: measured 5e-3.
BUDGET = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3}


def make_case(T, E, A, D, ffn, gen, dtype=torch.float64):
    x, gate_up, down = (
        torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)
        for shape in [(T, D), (E, 2 * ffn, D), (E, D, ffn)]
    )
    weight = torch.rand(T, A, generator=gen, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    expert = torch.stack([torch.randperm(E, generator=gen)[:A] for _ in range(T)] or [torch.empty(A)])[:T].int()
    return x, gate_up, down, weight, expert


def expert_of(x_D, gate_up, down):
    gate, up = F.linear(x_D, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def oracle(x, gate_up, down, weight, expert) -> torch.Tensor:
    x, gate_up, down, weight = (t.detach().double() for t in (x, gate_up, down, weight))
    out = torch.zeros_like(x)
    for t, chosen in enumerate(expert.tolist()):
        for a, e in enumerate(chosen):
            out[t] += weight[t, a] * expert_of(x[t], gate_up[e], down[e])
    return out


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_agrees_with_float64(impl, shape, dtype, gen):
    case = make_case(*shape, gen, dtype)
    got = grouped_experts(*case, impl=impl)
    assert got.dtype == dtype
    assert rel_rms(got, oracle(*case)) < BUDGET[dtype]


def test_budget_notices_one_percent_of_one_expert(gen):
    x, gate_up, down, weight, expert = make_case(40, 8, 2, 24, 20, gen, torch.float32)
    changed = down.clone()
    changed[3] *= 1.01
    got = grouped_experts(x, gate_up, changed, weight, expert)
    assert rel_rms(got, oracle(x, gate_up, down, weight, expert)) > 10 * BUDGET[torch.float32]


@pytest.mark.parametrize("impl", IMPLS)
def test_rounds_each_term_and_sums_in_expert_order(impl, gen):
    """bfloat16 addition is not associative: with the experts of a token shuffled, the sum must not change by a bit."""
    x, gate_up, down, weight, expert = make_case(32, 8, 5, 16, 12, gen, torch.bfloat16)
    order = expert.argsort(dim=-1)
    got = grouped_experts(x, gate_up, down, weight, expert, impl=impl)
    ordered = weight.gather(1, order), expert.gather(1, order)
    assert torch.equal(got, grouped_experts(x, gate_up, down, *ordered, impl=impl))
    every = torch.stack([expert_of(x, gate_up[e], down[e]) for e in range(8)], dim=1).float()
    want, backwards = torch.zeros_like(x), torch.zeros_like(x)
    for e in range(8):
        for sums, i in ((want, e), (backwards, 7 - e)):
            share = torch.where(expert == i, weight, 0.0).sum(-1, keepdim=True)
            sums += (every[:, i] * share).bfloat16()
    assert rel_rms(got, want) < rel_rms(got, backwards) / 5
    assert rel_rms(got, want) < 1e-3  # measured 0: a matmul of other size may still round a term otherwise


def test_gradients(gen):
    x, gate_up, down, weight, expert = make_case(6, 4, 2, 5, 3, gen)
    expert[expert == 3] = torch.where((expert == 0).any(-1), 2, 0).int().repeat_interleave((expert == 3).sum(-1))
    inputs = tuple(t.requires_grad_() for t in (x, gate_up, down, weight))
    assert torch.autograd.gradcheck(lambda *args: grouped_experts(*args, expert), inputs)


def test_an_idle_expert_is_not_read_and_gets_a_zero_gradient(gen):
    x, gate_up, down, weight, _ = make_case(6, 4, 2, 8, 4, gen, torch.float32)
    expert = torch.tensor([[0, 2]], dtype=torch.int32).expand(6, 2)
    with torch.no_grad():
        gate_up[1], down[3] = float("nan"), float("nan")
    inputs = [t.requires_grad_() for t in (x, gate_up, down, weight)]
    out = grouped_experts(*inputs, expert)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert (gate_up.grad[[1, 3]] == 0).all()
    assert (down.grad[[1, 3]] == 0).all()


def test_float32_gradients_agree_with_float64(gen):
    *case, expert = make_case(40, 8, 2, 24, 20, gen, torch.float32)
    got, want = ([t.detach().to(dtype).requires_grad_() for t in case] for dtype in (torch.float32, torch.float64))
    grad = torch.randn(40, 24, generator=gen)
    grouped_experts(*got, expert).backward(grad)
    oracle_out = torch.zeros(40, 24, dtype=torch.float64)
    x, gate_up, down, weight = want
    for e in range(8):
        share = torch.where(expert == e, weight, 0.0).sum(-1, keepdim=True)
        oracle_out = oracle_out + share * expert_of(x, gate_up[e], down[e])
    oracle_out.backward(grad.double())
    for g, w in zip(got, want, strict=True):
        assert rel_rms(g.grad, w.grad) < 2e-6


@pytest.mark.parametrize(("D", "ffn"), [(256, 128), (200, 72)])
@pytest.mark.parametrize("impl", IMPLS)
def test_block_scaled_weights(impl, D, ffn, gen):
    """Expert by expert through fp8_linear; with 72 rows gate and up have a block grid each, one above the other."""
    x, gate_up, down, weight, expert = make_case(9, 4, 2, D, ffn, gen, torch.float32)
    gates, ups, downs = (quantize_blocks(w) for w in (gate_up[:, :ffn], gate_up[:, ffn:], down))
    stacked = BlockScaled(torch.cat([gates.data, ups.data], 1), torch.cat([gates.scale, ups.scale], 1))
    want = torch.zeros_like(x)
    for e in range(4):
        gate, up, out = (BlockScaled(w.data[e], w.scale[e]) for w in (gates, ups, downs))
        term = fp8_linear(F.silu(fp8_linear(x, gate)) * fp8_linear(x, up), out)
        want += term * torch.where(expert == e, weight, 0.0).sum(-1, keepdim=True)
    assert rel_rms(grouped_experts(x, stacked, downs, weight, expert, impl=impl), want) < BUDGET[torch.float32]


def test_unknown_implementation(gen):
    with pytest.raises(ValueError, match="grouped_experts: unknown impl 'fast'"):
        grouped_experts(*make_case(2, 4, 2, 8, 4, gen), impl="fast")
