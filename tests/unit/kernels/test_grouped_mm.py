"""grouped_experts[grouped_mm]: the reference's result, bit for bit, without its gradient."""

import pytest
import torch

from glm5.kernels.grouped_experts import grouped_experts
from tests.unit.kernels.test_grouped_experts import make_case

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
