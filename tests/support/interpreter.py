"""Triton kernels on a CPU: what their tests have in common.

What the interpreter (3.6 and 3.9) gets wrong decides what is tested here and what on a GPU: `tl.dot` of bfloat16 and
rounding to bfloat16 and e4m3 (float32 and float16 are right), dependent launches, inline assembly, programs that wait
for each other.
"""

import os
from importlib.util import find_spec

import pytest
import torch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="needs Triton, and its interpreter, off where there is a GPU: tests/gpu has the kernels there",
)
DTYPES = [torch.float32, torch.float16]
