"""Kernels compiled before they are needed, which takes no GPU: each once, and again when it changes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm5.kernels import compile_ahead, cuda_code

REPO = Path(__file__).parents[3]

# Triton is not imported here: other tests run it interpreted.
KERNEL = """
import triton, triton.language as tl

@triton.jit
def twice(x_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * FACTOR, mask=i < n)
"""
PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from glm5.kernels.compile_ahead import Compilers
from glm5.kernels.compile_worker import CompileJob
from a_kernel import twice

target = GPUTarget("cuda", 90, 32)
options = dict(make_backend(target).parse_options({}).__dict__)
types = {"x_ptr": "*fp32", "n": "i32", "B": "constexpr"}
wanted = [CompileJob(twice, types, {(2,): block}, {}, options, target) for block in (32, 64, 128)]
with Compilers(2) as compilers:
    for _ in range(2):
        done = []
        compilers.compile(wanted, done.append)
        assert done == [1, 2, 3], done
    try:
        compilers.compile([CompileJob(twice, types | {"x_ptr": "fp32"}, {(2,): 32}, {}, options, target)], done.append)
    except Exception as error:
        assert "could not be compiled" in str(error), error
    else:
        raise AssertionError("an error went unnoticed")
"""


def entries(folder):
    return {path.relative_to(folder) for path in folder.rglob("twice.cubin")}


@pytest.mark.slow
def test_entries_on_disk_are_found_again_and_never_stale(tmp_path):
    pytest.importorskip("triton")
    folder, kernel = tmp_path / "cache", tmp_path / "a_kernel.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{tmp_path}:{REPO}"}

    def run(factor):
        kernel.write_text(KERNEL.replace("FACTOR", factor))
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
        return entries(folder)

    first = run("2.0")
    assert len(first) == 3
    assert len(run("3.0") - first) == 3


def test_kernels_in_cuda_are_not_launched_while_others_are_only_noted(monkeypatch):
    """What one sends to other GPUs would stay there: those that take it in are noted, and not launched."""
    launched, kernel = [], object.__new__(cuda_code.CudaKernel)
    driver = SimpleNamespace(cuLaunchKernelEx=lambda *given: launched.append(given) or 0)
    monkeypatch.setattr(cuda_code, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_code.CudaKernel, "_config", lambda *given: ctypes.c_int(0))
    kernel._function = ctypes.c_void_p(0)
    knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    with compile_ahead.missing():
        kernel((1, 1), 32, 7)
    assert not launched
    kernel((1, 1), 32, 7)
    assert len(launched) == 1


def test_what_would_be_anything_is_zeros():
    with compile_ahead._Zeros():
        x = torch.ones(3, 2)
        made = [torch.empty(4), torch.empty_like(x), x.new_empty(5), torch.empty_strided((2, 2), (2, 1))]
        assert torch.equal(x + 1, torch.full((3, 2), 2.0))
    assert all(not tensor.any() for tensor in made)
