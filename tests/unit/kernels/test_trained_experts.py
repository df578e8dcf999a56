"""Experts in training: grouped products with a gradient against the definition, and what they are made of against
theirs."""

import pytest
import torch

from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.grouped_experts.trained import Slots
from glm5.kernels.swiglu import swiglu, swiglu_backward
from glm5.kernels.weighted_rows import weighted_rows
from glm5.testing.numerics import rel_rms
from tests.support.interpreter import DTYPES, interpreted

T, A, E, D, F = 21, 3, 6, 16, 24
EXACT = 1e-12
# Inputs are rounded before both runs. float32: sums in another order; float16: results are rounded.
BUDGET = {torch.float32: 1e-6, torch.float16: 1e-3}


def routing(gen: torch.Generator, experts: int = E) -> torch.Tensor:
    """Expert 1 gets nothing, expert 0 something from everybody."""
    others = torch.rand(T, experts - 2, generator=gen).argsort(dim=1)[:, : A - 1] + 2
    return torch.cat([torch.zeros(T, 1, dtype=torch.long), others], dim=1).int()


def test_every_pair_has_a_slot_of_its_expert(gen):
    expert_TA = routing(gen)
    slots = Slots.of(expert_TA, E)
    assert slots.slot_TA.unique().numel() == T * A
    assert (slots.end_E % 8 == 0).all()
    begin_E = torch.cat([torch.zeros(1), slots.end_E[:-1]])
    for t in range(T):
        for a in range(A):
            slot, expert = int(slots.slot_TA[t, a]), int(expert_TA[t, a])
            assert begin_E[expert] <= slot < slots.end_E[expert]
            assert slots.token_G[slot] == t
            assert slots.pair_G[slot] == t * A + a
    assert (slots.pair_G >= 0).sum() == T * A


def test_results_and_gradients_are_those_of_the_definition(gen):
    expert_TA = routing(gen)
    shapes = (T, D), (E, 2 * F, D), (E, D, F), (T, A)
    inputs = [torch.randn(shape, generator=gen) for shape in shapes]
    grad = torch.randn(T, D, generator=gen)
    found = []
    for impl, dtype in (("reference", torch.float64), ("trained", torch.float32)):
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        out = grouped_experts(*leaves, expert_TA, impl=impl)
        out.backward(grad.to(dtype))
        found.append([out, *(leaf.grad for leaf in leaves)])
    assert all(rel_rms(got, want) < BUDGET[torch.float32] for want, got in zip(*found, strict=True))
    assert not found[1][2][1].any()  # of the expert that nobody visits


def test_budget_notices_a_pair_with_a_wrong_weight(gen):
    expert_TA = routing(gen)
    x, gate_up, down = (torch.randn(s, generator=gen) for s in ((T, D), (E, 2 * F, D), (E, D, F)))
    weight_TA = torch.rand(T, A, generator=gen)
    want = grouped_experts(x, gate_up, down, weight_TA, expert_TA, impl="reference")
    weight_TA[3, 1] *= 1.01
    got = grouped_experts(x, gate_up, down, weight_TA, expert_TA, impl="trained")
    assert rel_rms(got, want) > 10 * BUDGET[torch.float32]


def test_gradient_of_the_gated_unit_is_autograds(gen):
    gate_up, grad, weight = (torch.randn(s, generator=gen, dtype=torch.float64) for s in ((5, 14), (5, 7), (5,)))
    gate_up.requires_grad_()
    weight.requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up * weight[:, None]
    (hidden * grad).sum().backward()
    got = swiglu_backward(gate_up.detach(), grad, weight.detach())
    for one, want in zip(got, (gate_up.grad, hidden, weight.grad), strict=True):
        assert rel_rms(one, want) < EXACT


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 24), (2, 2049)])
def test_triton_agrees_with_float64(rows, width, dtype, gen):
    gate_up, grad = (torch.randn(rows, n, generator=gen).to(dtype) for n in (2 * width, width))
    weight = torch.rand(rows, generator=gen)
    want = swiglu(gate_up.double(), impl="reference"), *swiglu_backward(gate_up.double(), grad.double(), weight)
    got = swiglu(gate_up, impl="triton"), *swiglu_backward(gate_up, grad, weight, impl="triton")
    assert [one.dtype for one in got] == [dtype, dtype, dtype, torch.float32]
    assert all(rel_rms(a, b) < BUDGET[dtype] for a, b in zip(got, want, strict=True))

    slot_TA = torch.randint(0, rows, (4, 3), generator=gen)
    for weight_TA in (None, torch.randn(4, 3, generator=gen)):
        summed = weighted_rows(gate_up, slot_TA, weight_TA, impl="triton")
        assert summed.dtype == dtype
        assert rel_rms(summed, weighted_rows(gate_up.double(), slot_TA, weight_TA)) < BUDGET[dtype]
