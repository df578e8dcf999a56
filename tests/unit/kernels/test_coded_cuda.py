"""few.cu on a CPU: sharing of experts, inputs that warps do not share out evenly, sizes that are refused."""

import pytest

from glm5.kernels.coded import Form
from glm5.kernels.coded_experts import coded_experts, cuda
from glm5.testing.numerics import rel_rms
from tests.support.coded import coded_case, exact_experts
from tests.support.cuda_on_cpu import build, needs_compiler

BUDGET = 3e-3  # the result's rounding to bfloat16: measured 1.7e-3
CASES = [
    (Form("int4", None, "int8"), (1, 3, 2, 512, 128)),
    (Form("int4", 128, "fp8"), (1, 3, 2, 384, 256)),
    (Form("int4", 128, "fp8"), (7, 2, 2, 640, 128)),
    (Form("int4", 256, None), (2, 3, 2, 256, 512)),
]


@needs_compiler
@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_agrees_with_float64(form, shape, gen, tmp_path):
    case = coded_case(*shape, form, gen)
    case = case._replace(x=case.x.bfloat16())
    num_tokens, _, active, width, inner = shape
    constants = cuda.constants_for(form, width, inner, active, num_tokens > 1)
    kernels = cuda.Kernels(*(build(cuda.SOURCE, tmp_path, name, constants) for name in cuda.Kernels._fields))
    got, exact = cuda.run(kernels, *case), exact_experts(case)
    assert rel_rms(got, exact) < BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, exact_experts(case)) > 2 * BUDGET


def test_refusals(gen):
    case = coded_case(2, 3, 2, 256, 128, Form("int4", 128, "fp8"), gen)
    with pytest.raises(ValueError, match=r"needs rows in bfloat16 and int4 codes.*got torch\.float32"):
        coded_experts(*case, impl="cuda")
    case = case._replace(x=case.x.bfloat16())
    with pytest.raises(ValueError, match="needs Hopper, got cpu; use impl='triton'"):
        coded_experts(*case, impl="cuda")
    case = coded_case(17, 3, 2, 256, 128, Form("int4", 128, None), gen)
    with pytest.raises(ValueError, match="is for 1 to 16 tokens"):
        coded_experts(case.x.bfloat16(), *case[1:], impl="cuda")
    case = coded_case(1, 3, 2, 320, 128, Form("int4", None, "int8"), gen)
    with pytest.raises(ValueError, match="takes inputs of a multiple of 128, up to 8192, got 320"):
        coded_experts(case.x.bfloat16(), *case[1:], impl="cuda")
