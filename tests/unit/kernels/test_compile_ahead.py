"""Kernels compiled before they are needed, which takes no GPU: each once, and again when it changes."""

import os
import subprocess
import sys

import pytest
import torch

from glm5.kernels import compile_ahead
from glm5.kernels.compile_ahead import compile_all

# Triton is not imported here: other tests run it interpreted.
PROGRAM = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from glm5.kernels.compile_ahead import Wanted, compile_all

@triton.jit
def twice(x_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * FACTOR, mask=i < n)

target = GPUTarget("cuda", 90, 32)
options = dict(make_backend(target).parse_options({}).__dict__)
types = {"x_ptr": "*fp32", "n": "i32", "B": "constexpr"}
wanted = [Wanted(twice, types, {(2,): block}, {}, options, target) for block in (32, 64)]
for _ in range(2):
    done = []
    compile_all(wanted, 2, done.append)
    assert done == [1, 2], done
"""


def entries(folder):
    return {path.relative_to(folder) for path in folder.rglob("twice.cubin")}


@pytest.mark.slow
def test_entries_on_disk_are_found_again_and_never_stale(tmp_path):
    pytest.importorskip("triton")
    folder, program = tmp_path / "cache", tmp_path / "program.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(folder)}

    def run(factor):
        program.write_text(PROGRAM.replace("FACTOR", factor))
        subprocess.run([sys.executable, program], env=environment, check=True)
        return entries(folder)

    first = run("2.0")
    assert len(first) == 2
    assert len(run("3.0") - first) == 2


class Job:
    def __init__(self, error=None):
        self.error, self.compiled = error, 0

    def compile(self):
        self.compiled += 1
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(compile_ahead, "hash_compiler", lambda: None)


def test_every_kernel_is_compiled_once_and_told_of():
    jobs, told = [Job() for _ in range(20)], []
    compile_all(jobs, 4, told.append)
    assert [job.compiled for job in jobs] == [1] * 20
    assert told == list(range(1, 21))


def test_a_kernel_that_does_not_compile_is_an_error():
    with pytest.raises(ValueError, match="no such layout"):
        compile_all([Job(), Job(ValueError("no such layout")), Job()], 2, lambda _done: None)


def test_what_would_be_anything_is_zeros():
    with compile_ahead._Zeros():
        x = torch.ones(3, 2)
        made = [torch.empty(4), torch.empty_like(x), x.new_empty(5), torch.empty_strided((2, 2), (2, 1))]
        assert torch.equal(x + 1, torch.full((3, 2), 2.0))
    assert all(not tensor.any() for tensor in made)
