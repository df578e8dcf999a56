"""rows.cu and plan.cu on a CPU: tiles of every size, of the shared expert too, stages used twice, programs that wait
for each other."""

from importlib import import_module

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.grouped_experts import cuda, grouped_experts, plan
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import Matrix, build
from tests.support.dispatch import as_on, chosen_by
from tests.support.experts import make_experts

module = import_module("glm5.kernels.grouped_experts")

# Against float64 on the same weights: x and h are rounded to FP8 on both sides, h in other places. Measured: 5e-3.
BUDGET = 2.5e-2
PROGRAMS = 2  # side by side


@pytest.fixture
def on_cpu(monkeypatch, tmp_path, gen):
    """`cuda.weighted_outputs` without a GPU."""
    stalls = int(torch.randint(1, 1 << 31, (), generator=gen))

    def planner(num_experts, block_t, device):
        sizes = {"E": num_experts, "ROWS": block_t, "PROGRAMS": PROGRAMS}
        return build(plan.SOURCE, tmp_path, "plan", sizes, "hopper_on_cpu.h", stalls=stalls)

    def kernel(active, width, inner, device):
        sizes = cuda.constants(active, width, inner)
        run = build(cuda.SOURCE, tmp_path, "experts", sizes, "hopper_on_cpu.h", stalls=stalls)
        return lambda *given: run(*given, cluster=PROGRAMS)

    monkeypatch.setattr(plan, "_PROGRAMS", PROGRAMS)
    monkeypatch.setattr(plan, "_kernel", planner)
    monkeypatch.setattr(cuda, "_kernel", kernel)
    monkeypatch.setattr(cuda.cuda_code, "tile_map", Matrix)
    monkeypatch.setattr(cuda.triton_support, "multiprocessors", lambda device: PROGRAMS)


@pytest.mark.compiler
@pytest.mark.parametrize("T", [70, pytest.param(210, marks=pytest.mark.long)])
def test_agrees_with_the_reference(on_cpu, gen, T):
    case = make_experts(T, 5, 2, 512, 256, gen).to("cpu", torch.bfloat16)
    case.expert[: T // 2 + 25] = torch.tensor([2, 3])  # tiles of all sizes
    shared, x = case.shared if T == 70 else None, case.x.double()
    outputs = cuda.weighted_outputs(act_quant(case.x), case.gate_up, case.down, case.weight, case.expert.int(), shared)
    assert outputs.places is not None
    got = outputs.y[outputs.places.view(T, 2).long()].double().sum(1)
    got = got if shared is None else got + outputs.y[2 * T :].double()
    assert rel_rms(got, grouped_experts(x, *case[1:5], shared=shared, impl="reference")) < BUDGET
    case.down.scale[int(case.expert[0, 0])] *= 1.5
    assert rel_rms(got, grouped_experts(x, *case[1:5], shared=shared, impl="reference")) > BUDGET


@pytest.mark.compiler
def test_waits_for_a_tile_that_another_program_is_still_with(on_cpu, gen):
    case = make_experts(20, 2, 1, 512, 384, gen).to("cpu", torch.bfloat16)
    case.expert[:] = 1  # three tasks of h, of which one program does two
    outputs = cuda.weighted_outputs(act_quant(case.x), case.gate_up, case.down, case.weight, case.expert.int(), None)
    want = grouped_experts(case.x.double(), *case[1:5], impl="reference")
    assert rel_rms(outputs.y[:20].double(), want) < BUDGET


@pytest.mark.compiler
@pytest.mark.parametrize("num_pairs", [5000, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 2048))])
def test_plans_pairs_in_the_order_of_experts(on_cpu, gen, num_pairs):
    num_experts, block_t, num_shared = 40, 96, 7
    expert = torch.randint(0, num_experts - 1, (num_pairs, 1), generator=gen, dtype=torch.int32)  # one gets none
    expert[num_pairs // 3 : num_pairs // 2] = 17
    found = plan.plan_on_hopper(expert, num_experts, block_t, num_shared)
    assert found.order.equal(expert.flatten().argsort(stable=True).int())
    assert found.places.equal(found.order.argsort().int())
    wanted, first = [], 0
    for each, count in enumerate(expert.flatten().bincount(minlength=num_experts).tolist()):
        wanted += [[each, first + i, min(block_t, count - i)] for i in range(0, count, block_t)]
        first += count
    room = len(found.tiles) - 1
    assert found.tiles[-1, 0] == len(wanted) <= room
    assert found.tiles[: len(wanted)].tolist() == wanted
    assert not found.tiles[len(wanted) : room, 2].any()
    assert found.counters.tolist() == [0] * (2 + num_shared + room)


def test_programs_fit():
    assert cuda.SHARED_BYTES <= 227 << 10


def test_auto_takes_it_where_it_is_faster_and_can_run(monkeypatch, gen):
    case = make_experts(110, 4, 2, 512, 128, gen)
    as_on(monkeypatch, "gpu", "triton", "hopper")

    def choice(T):
        return chosen_by(module.TABLE, case.x[:T], case.gate_up, case.down, case.weight[:T], case.expert[:T], None)

    assert [choice(T) for T in (63, 64)] == ["triton", "triton"]
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    assert [choice(T) for T in (63, 64, 110)] == ["triton", "cuda", "cuda"]
    assert [cuda.is_faster(8 * T, 256, 256) for T in (1023, 1024, 2560, 2561)] == [False, True, True, False]
    assert [cuda.is_faster(8 * T, 256, 512) for T in (511, 512, 2560, 2561)] == [False, True, True, False]


def test_refusals(monkeypatch, gen):
    case = make_experts(3, 4, 2, 512, 128, gen)
    with pytest.raises(ValueError, match=r"grouped_experts\[cuda\] needs rows in bfloat16.*torch.float32; use"):
        grouped_experts(*case[:5], impl="cuda")
    case = case._replace(x=case.x.bfloat16())
    with pytest.raises(ValueError, match="needs Hopper, got cpu"):
        grouped_experts(*case[:5], impl="cuda")
    monkeypatch.setattr(plan, "MAX_EXPERTS", 3)
    with pytest.raises(ValueError, match="needs at most 3 experts, got 4"):
        grouped_experts(*case[:5], impl="cuda")
    case = make_experts(3, 4, 2, 384, 128, gen)
    with pytest.raises(ValueError, match=r"multiple of 256 and 128, got \[4, 384, 128\]"):
        grouped_experts(case.x.bfloat16(), *case[1:5], impl="cuda")
