"""linear.cu on a CPU, a program at a time: every number of columns, a last tile of few outputs, stages used twice."""

import pytest
import torch

from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.fp8_linear import cuda, fp8_linear
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import Matrix, build, needs_compiler

BUDGET = 3e-3  # the result's rounding to bfloat16: measured 1.7e-3


@needs_compiler
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


def test_columns_are_shared_by_as_many_programs_as_run_at_once():
    sizes = [(2752, 6144), (6144, 2048), (2048, 2048), (3072, 6144), (6144, 1536), (512, 128), (1 << 15, 4096)]
    assert [cuda.cut_for(*each).shares for each in sizes] == [4, 2, 8, 4, 2, 1, 1]


def test_refusals(gen):
    x, weight = torch.randn(3, 256, generator=gen), quantize_blocks(torch.randn(128, 256, generator=gen))
    with pytest.raises(ValueError, match=r"\[cuda\] needs up to 128 rows in bfloat16, got 3 in torch.float32"):
        fp8_linear(x, weight, impl="cuda")
    with pytest.raises(ValueError, match="needs Hopper, got cpu; use impl='triton'"):
        fp8_linear(x.bfloat16(), weight, impl="cuda")
