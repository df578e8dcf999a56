"""linear.cu and rows.cu on a CPU, a cluster at a time: every number of columns, a last tile of few outputs, stages used
twice; rows that go to other ranks."""

from importlib import import_module

import pytest
import torch

from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.fp8_linear import cuda, cuda_rows, fp8_linear
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import Matrix, build
from tests.support.dispatch import as_on, chosen_by

module = import_module("glm5.kernels.fp8_linear")
BUDGET = 3e-3  # the result's rounding to bfloat16: measured 1.7e-3


@pytest.mark.compiler
def test_agrees_with_the_reference(monkeypatch, gen, tmp_path):
    def kernel(columns, device):
        return build(cuda.SOURCE, tmp_path, "linear", {"COLS": columns, "STAGES": 2}, "hopper_on_cpu.h")

    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    monkeypatch.setattr(cuda, "_kernel", kernel)
    monkeypatch.setattr(cuda.cuda_code, "tile_map", Matrix)
    for T, O in ((5, 132), (33, 128)):
        x, weight = torch.randn(T, 384, generator=gen).bfloat16(), quantize_blocks(torch.randn(O, 384, generator=gen))
        got, want = cuda.fp8_linear(x, weight, None, cuda.Cut(1)), fp8_linear(x.double(), weight, impl="reference")
        assert rel_rms(got, want) < BUDGET
        weight.scale[0, 1] *= 1.5
        assert rel_rms(got, fp8_linear(x.double(), weight, impl="reference")) > BUDGET


@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.long), 7], ids=["steady", "stalling"])
def rows_on_cpu(request, monkeypatch, tmp_path):
    def kernel(blocks, device):
        constants = cuda_rows.constants(blocks)
        return build(cuda_rows.SOURCE, tmp_path, "rows", constants, "hopper_on_cpu.h", stalls=request.param)

    monkeypatch.setattr(cuda_rows, "refusal", lambda *given: "")
    monkeypatch.setattr(cuda_rows, "_kernel", kernel)
    monkeypatch.setattr(cuda_rows.cuda_code, "tile_map", Matrix)
    monkeypatch.setattr(cuda_rows.triton_support, "multiprocessors", lambda device: 4)


@pytest.mark.compiler
# Tiles of rows of several owners and of one; a stage's first use alone; groups of 16, 4 and 2 blocks.
@pytest.mark.parametrize(
    ("ranks", "T", "O", "D"),
    [
        (3, 384, 512, 512),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, 160, 256, 2048), (4, 512, 256, 768)]),
    ],
)
def test_rows_go_to_their_ranks(rows_on_cpu, gen, ranks, T, O, D):
    x, weight = torch.randn(T, D, generator=gen).bfloat16(), quantize_blocks(torch.randn(O, D, generator=gen))
    x[:5] = 0  # whose products are zeros of either sign
    whole, share, nothing = cuda_rows.fp8_linear(x, weight), T // ranks, -0x7FFF8000
    assert rel_rms(whole, fp8_linear(x.double(), weight, impl="reference")) < BUDGET
    buffers = torch.full((ranks, 3, T * O // 2), nothing, dtype=torch.int32)
    addresses, turn = torch.tensor([each.data_ptr() for each in buffers]), torch.tensor([1], dtype=torch.int32)
    for rank in range(ranks):
        places = cuda_rows.PeerBuffers(addresses, turn, rank, T * O // 2)
        y = cuda_rows.fp8_linear(x, weight, to=places).unflatten(0, (ranks, share))
        assert torch.equal(y[rank], whole.unflatten(0, (ranks, share))[rank])
    assert (buffers[:, [0, 2]] == nothing).all()
    for owner in range(ranks):
        came = buffers[owner, 1].view(torch.bfloat16).view(ranks, share, O)
        want = whole.unflatten(0, (ranks, share))[owner]
        assert (came[owner].view(torch.int16) == -0x8000).all(), "nobody sends to itself"
        others = [came[rank] for rank in range(ranks) if rank != owner]
        assert all(torch.equal(each, want) for each in others)
        assert all((each.view(torch.int16) != -0x8000).all() for each in others), "minus zero says that nothing came"


def test_what_rows_refuse(gen):
    x, weight = torch.randn(3, 256, generator=gen), quantize_blocks(torch.randn(128, 256, generator=gen))
    with pytest.raises(ValueError, match=r"needs rows in bfloat16, got 3 in torch.float32; use impl='scaled_mm'"):
        cuda_rows.fp8_linear(x, weight)
    with pytest.raises(ValueError, match=r"multiples of 256 and 256, got \[128, 256\]"):
        cuda_rows.fp8_linear(x.bfloat16(), weight)


def test_columns_are_shared_by_as_many_programs_as_run_at_once():
    sizes = [(2752, 6144), (6144, 2048), (6144, 4096), (3072, 6144), (6144, 1536), (512, 128), (1 << 15, 4096)]
    assert [cuda.cut_for(*each).shares for each in sizes] == [4, 1, 2, 4, 1, 1, 1]


def test_auto_takes_it_where_it_is_faster_and_can_be_built(monkeypatch, gen):
    weight = quantize_blocks(torch.randn(256, 128, generator=gen))
    as_on(monkeypatch, "gpu", "triton", "hopper")
    monkeypatch.setattr(module.scaled_mm, "refusal", lambda *given: None)

    def choice(T):
        return chosen_by(module.TABLE, torch.zeros(T, 128, dtype=torch.bfloat16), weight)

    monkeypatch.setattr(cuda, "refusal", lambda *given: "needs NVRTC")
    assert [choice(T) for T in (4, 5, 64, 129)] == ["triton", "triton", "triton", "scaled_mm"]
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    assert [choice(T) for T in (4, 5, 64, 65, 129)] == ["triton", "cuda", "cuda", "triton", "scaled_mm"]
    assert [cuda.is_faster(T, 2752, 6144) for T in (4, 5, 128, 129)] == [False, True, True, False]
    assert not cuda.is_faster(32, 8192, 2048)


def test_nobody_quantizes_for_few_rows(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_capability", lambda _device: (9, 0))
    for can_build, few in ((True, 4), (False, 16)):
        monkeypatch.setattr(cuda.cuda_code, "can_build", lambda can_build=can_build: can_build)
        assert module.few_rows(device) == few
    assert module.few_rows(torch.device("cpu")) == 16


def test_refusals(gen):
    x, weight = torch.randn(3, 256, generator=gen), quantize_blocks(torch.randn(128, 256, generator=gen))
    with pytest.raises(ValueError, match=r"\[cuda\] needs up to 128 rows in bfloat16, got 3 in torch.float32"):
        fp8_linear(x, weight, impl="cuda")
    with pytest.raises(ValueError, match="needs Hopper and NVRTC, got cpu; use impl='triton'"):
        fp8_linear(x.bfloat16(), weight, impl="cuda")
