"""grouped_experts[grouped_mm] and [one_by_one]: the reference's result without its gradient."""

import pytest
import torch

from glm5.kernels.grouped_experts import grouped_experts
from glm5.testing.numerics import rel_rms
from tests.unit.kernels.test_grouped_experts import make_case

# Measured for one_by_one against the reference: 5e-8, 0 and 1e-16. In bfloat16 a term may round to its neighbour.
BUDGET = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}
# (tokens, experts, active, D, F): rows are multiples of 16 bytes in float32 and bfloat16.
SHAPES = [(1, 2, 1, 8, 8), (13, 4, 4, 16, 24), (40, 8, 2, 24, 40), (3, 32, 3, 8, 8), (0, 4, 2, 8, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape, dtype, gen):
    case = make_case(*shape, gen, dtype)
    want = grouped_experts(*case, impl="reference")
    assert torch.equal(grouped_experts(*case, impl="grouped_mm"), want)
    with torch.inference_mode():
        assert torch.equal(grouped_experts(*case), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 2, 16, 24), (1, 32, 4, 8, 8), (2, 4, 2, 6, 10), (3, 5, 5, 8, 8)], ids=str)
def test_one_by_one_equals_the_reference(shape, dtype, gen):
    *case, weight, expert = make_case(*shape, gen, dtype)
    order = expert.argsort(descending=True)  # terms are summed in expert order, whatever theirs is
    case = (*case, weight.gather(1, order), expert.gather(1, order))
    got, want = (grouped_experts(*case, impl=impl) for impl in ("one_by_one", "reference"))
    assert got.dtype == dtype
    if shape[0] == 1:
        assert torch.equal(got, want)
    else:  # products of several rows at a time are summed in another order
        assert rel_rms(got, want.double()) < BUDGET[dtype]


def test_an_idle_expert_is_not_read(gen):
    x, gate_up, down, weight, _ = make_case(6, 4, 2, 8, 8, gen, torch.float32)
    gate_up[1], down[3] = float("nan"), float("nan")
    expert = torch.tensor([[2, 0]], dtype=torch.int32).expand(6, 2)
    assert grouped_experts(x, gate_up, down, weight, expert, impl="grouped_mm").isfinite().all()


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((3, 4, 2, 8, 6), torch.float32, "multiple of 16 bytes"), ((3, 4, 2, 8, 8), torch.float64, "float32, bfloat16")],
)
def test_what_it_cannot_do_is_refused_by_name_and_not_chosen(shape, dtype, message, gen):
    case = make_case(*shape, gen, dtype)
    with pytest.raises(ValueError, match=message):
        grouped_experts(*case, impl="grouped_mm")
    with torch.no_grad():
        assert torch.equal(grouped_experts(*case), grouped_experts(*case, impl="reference"))
