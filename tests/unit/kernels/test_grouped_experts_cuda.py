"""rows.cu on a CPU, a program at a time: tiles of every size, of the shared expert too, stages used twice."""

from importlib import import_module

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.grouped_experts import cuda, grouped_experts
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import Matrix, build, needs_compiler
from tests.support.experts import make_experts

module = import_module("glm5.kernels.grouped_experts")

# Against float64 on the same weights: x and h are rounded to FP8 on both sides, h in other places. Measured: 5e-3.
BUDGET = 2.5e-2


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """`cuda.terms` without a GPU."""

    def kernel(name, active, width, inner, device):
        is_up = name == "up"
        sizes = {"A": active, "D": width, "F": inner, "STAGES": 2 if is_up else 3, "IS_UP": int(is_up)}
        return build(cuda.SOURCE, tmp_path, name, sizes, "hopper_on_cpu.h")

    monkeypatch.setattr(cuda, "_kernel", kernel)
    monkeypatch.setattr(cuda.cuda_code, "tile_map", Matrix)
    monkeypatch.setattr(cuda.triton_support, "multiprocessors", lambda device: 1)


def plan(expert_TA, num_experts, rows):
    """As `tiles_by_expert`."""
    order = expert_TA.flatten().argsort(stable=True).int()
    tiles, first = [], 0
    for expert, count in enumerate(expert_TA.flatten().bincount(minlength=num_experts).tolist()):
        tiles += [(expert, first + start, min(rows, count - start)) for start in range(0, count, rows)]
        first += count
    return order, torch.tensor([*tiles, (9, 9, 0), (9, 9, 0), (len(tiles), 9, 9)], dtype=torch.int32)


def sums(case, shared):
    (num_tokens, active), width = case.expert.shape, case.x.shape[1]
    planned = plan(case.expert, len(case.down.data), cuda.ROWS)
    y = cuda.terms(act_quant(case.x), case.gate_up, case.down, case.weight, planned, shared).double()
    routed = y[: num_tokens * active].view(num_tokens, active, width).sum(1)
    return routed if shared is None else routed + y[num_tokens * active :]


@needs_compiler
@pytest.mark.parametrize("T", [70, 210])
def test_agrees_with_the_reference(on_cpu, gen, T):
    case = make_experts(T, 5, 2, 512, 256, gen).to("cpu", torch.bfloat16)
    case.expert[: T // 2 + 25] = torch.tensor([2, 3])  # tiles of all sizes
    shared, x = case.shared if T == 70 else None, case.x.double()
    got = sums(case, shared)
    assert rel_rms(got, grouped_experts(x, *case[1:5], shared=shared, impl="reference")) < BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, grouped_experts(x, *case[1:5], shared=shared, impl="reference")) > BUDGET


def test_programs_fit():
    assert all(cuda.shared_bytes(name) <= 227 << 10 for name in ("up", "down"))


def test_auto_takes_it_where_it_is_faster_and_can_run(monkeypatch, gen):
    case = make_experts(110, 4, 2, 512, 128, gen)
    monkeypatch.setattr(module, "chosen", lambda *given: True)

    def choice(T):
        return module._choose(case.x[:T], case.gate_up, case.down, case.expert[:T].numel(), None)

    assert [choice(T) for T in (95, 96)] == ["triton", "triton"]
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    assert [choice(T) for T in (95, 96, 110)] == ["triton", "cuda", "cuda"]
    assert [cuda.is_faster(8 * T, 256, 256) for T in (1535, 1536, 2560, 2561)] == [False, True, True, False]
    assert [cuda.is_faster(8 * T, 256, 512) for T in (511, 512, 2560, 2561)] == [False, True, True, False]


def test_refusals(gen):
    case = make_experts(3, 4, 2, 512, 128, gen)
    with pytest.raises(ValueError, match=r"grouped_experts\[cuda\] needs rows in bfloat16.*torch.float32; use"):
        grouped_experts(*case[:5], impl="cuda")
    case = case._replace(x=case.x.bfloat16())
    with pytest.raises(ValueError, match="needs Hopper, got cpu"):
        grouped_experts(*case[:5], impl="cuda")
    case = make_experts(3, 4, 2, 384, 128, gen)
    with pytest.raises(ValueError, match=r"multiple of 256 and 128, got \[4, 384, 128\]"):
        grouped_experts(case.x.bfloat16(), *case[1:5], impl="cuda")
