"""coded_linear of few tokens on Hopper, in CUDA C++ (few.cu): int8 codes with a scale a row under int8 tokens, as
attention and shared experts have them. x in bfloat16."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code
from glm5.kernels.coded import Coded, Form
from glm5.kernels.token_quant import token_quant

SOURCE = Path(__file__).with_name("few.cu")
FORM = Form("int8", None, "int8")
# As in few.cu.
_ROWS, _THREADS, _UNIT = 16, 256, 128
MOST_TOKENS = 16
_MOST_SHARED = 100_000  # bytes, with which a multiprocessor has room for two programs


def refusal(x_TD: Tensor, weight: Coded) -> str:
    """Why these cannot be handled; empty if they can."""
    if x_TD.dtype != torch.bfloat16 or weight.form != FORM:
        return f"needs rows in bfloat16 and weights in {FORM}, got {x_TD.dtype} and {weight.form}"
    if not 0 < len(x_TD) <= MOST_TOKENS:
        return f"is for 1 to {MOST_TOKENS} tokens, got {len(x_TD)}"
    width = weight.width
    if width % _UNIT or _shared_bytes(width, len(x_TD)) > _MOST_SHARED:
        return f"takes inputs of a multiple of {_UNIT}, as long as tokens fit into shared memory, got {width}"
    if not x_TD.is_cuda or torch.cuda.get_device_capability(x_TD.device)[0] != 9:
        return f"needs Hopper, got {x_TD.device}"
    return "" if cuda_code.can_build() else "needs NVRTC"


def coded_linear(x_TD: Tensor, weight: Coded) -> Tensor:
    """[T, O] in bfloat16, the reference's bits. Raises ValueError where `refusal` has a reason."""
    weight.check()
    if reason := refusal(x_TD, weight):
        raise ValueError(f"coded_linear[cuda] {reason}; use impl='triton'")
    return run(_kernel(weight.width, _tiles(len(x_TD)), x_TD.device), x_TD, weight)


def run(kernel: Callable[..., None], x_TD: Tensor, weight: Coded) -> Tensor:
    """The kernel, made for these sizes, behind what quantizes tokens."""
    rows, scale_T = token_quant(x_TD, "int8")
    num_tokens, num_rows = len(x_TD), len(weight.codes)
    out_TO = torch.empty(num_tokens, num_rows, dtype=x_TD.dtype, device=x_TD.device)
    programs = (-(-num_rows // _ROWS), 1)
    kernel(programs, _THREADS, rows, scale_T, weight.codes, weight.scale, out_TO, num_tokens, num_rows)
    return out_TO


def constants_for(width: int, num_tokens: int) -> dict[str, int]:
    """What few.cu is compiled with."""
    return {"K": width, "TILES": _tiles(num_tokens), "BLOCKS": 2}


def _tiles(num_tokens: int) -> int:
    """Of 8 tokens."""
    return -(-num_tokens // 8)


def _shared_bytes(width: int, num_tokens: int) -> int:
    return 8 * _tiles(num_tokens) * (width + 64)


@cache
def _kernel(width: int, tiles: int, device: torch.device) -> cuda_code.CudaKernel:
    num_tokens = 8 * tiles
    shared_bytes = _shared_bytes(width, num_tokens)
    kernel = cuda_code.build(SOURCE, "few", shared_bytes, device, **constants_for(width, num_tokens))
    assert kernel is not None
    return kernel
