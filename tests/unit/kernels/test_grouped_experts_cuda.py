"""experts.cu on a CPU, one program doing all of its tasks: tiles of every size, several of an expert, slices of outputs
that take each other's place, weights that are read far ahead."""

import pytest
import torch

from glm5.kernels.grouped_experts import cuda, grouped_experts
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import Matrix, build, needs_compiler
from tests.support.experts import make_experts

# x and h are in FP8, as the reference in float64 has them; h is rounded in other places: measured 5e-3 to 1.3e-2.
BUDGET = 2.5e-2


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """`cuda.grouped_experts` without a GPU."""

    def kernel(name, active, width, inner, num_experts, rows, stages, has_shared, *, is_planned, device):
        sizes = {"A": active, "D": width, "F": inner, "E": num_experts, "ROWS": rows, "STAGES": stages}
        kinds = {"SHARED": int(has_shared), "PLANNED": int(is_planned)}
        return build(cuda.SOURCE, tmp_path, name, sizes | kinds, "hopper_on_cpu.h")

    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    monkeypatch.setattr(cuda, "_kernel", kernel)
    monkeypatch.setattr(cuda.cuda_code, "tile_map", Matrix)
    monkeypatch.setattr(cuda.triton_support, "multiprocessors", lambda device: 1)


def check(case, cut, *, with_shared=True):
    shared = case.shared if with_shared else None
    got, x = cuda.grouped_experts(*case[:5], shared, cut), case.x.double()
    want = grouped_experts(x, *case[1:5], shared=shared, impl="reference")
    assert rel_rms(got, want) < BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, grouped_experts(x, *case[1:5], shared=shared, impl="reference")) > BUDGET
    assert not cuda.triton_support.arrivals(case.x.device).any()


@needs_compiler
def test_few_tokens(on_cpu, gen):
    for T in (1, 21):
        case = make_experts(T, 6, 2, 768, 128, gen).to("cpu", torch.bfloat16)
        check(case, cuda.Cut(32, 3, 2))
    case.expert[:] = torch.tensor([1, 4])  # all rows at two experts
    check(case, cuda.Cut(32, 3, 2))


@needs_compiler
def test_planned_beforehand(on_cpu, gen, monkeypatch):
    monkeypatch.setattr(cuda, "_MOST_PAIRS", 100)
    case = make_experts(130, 8, 2, 512, 256, gen).to("cpu", torch.bfloat16)
    case.expert[40:100] = torch.tensor([2, 3])
    check(case, cuda.Cut(96, 2, 2), with_shared=False)


def test_refusals(gen):
    case = make_experts(3, 4, 2, 512, 128, gen)
    with pytest.raises(ValueError, match=r"grouped_experts\[cuda\] needs rows in bfloat16.*torch.float32; use"):
        grouped_experts(*case[:5], impl="cuda")
    case = case._replace(x=case.x.bfloat16())
    with pytest.raises(ValueError, match="needs Hopper, got cpu"):
        grouped_experts(*case[:5], impl="cuda")
    case = make_experts(3, 4, 2, 384, 128, gen)
    with pytest.raises(ValueError, match=r"multiple of 256 and 128 .* got \[4, 384, 128\]"):
        grouped_experts(case.x.bfloat16(), *case[1:5], impl="cuda")
