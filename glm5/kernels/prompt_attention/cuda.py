"""prompt_attention on Hopper, in CUDA C++ (attend.cu): for GLM-5's head sizes in bfloat16."""

import math
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.row_codes import Quantized, empty_codes

SOURCE = Path(__file__).with_name("attend.cu")
_WIDTHS = (192, 64, 256)  # of a head: unrotated and rotated part of q and k, and values
_QUERIES, _KEYS, _THREADS, _SHARED_STORAGE = 128, 64, 384, 128  # as in attend.cu
_SHARED_BYTES = 1023 + (2 + 5) * 4 * 64 * 128 + _SHARED_STORAGE


def refusal(q_THX: Tensor, k_THN: Tensor, rope_TR: Tensor, v_THV: Tensor) -> str:
    """Why these cannot be handled; empty if they can."""
    widths = k_THN.shape[2], rope_TR.shape[1], v_THV.shape[2]
    given = {"q_THX": q_THX, "k_THN": k_THN, "rope_TR": rope_TR, "v_THV": v_THV}
    if {x.dtype for x in given.values()} != {torch.bfloat16} or widths != _WIDTHS:
        dtypes = sorted({str(x.dtype) for x in given.values()})
        return f"needs bfloat16 and widths of {list(_WIDTHS)}, got {', '.join(dtypes)} and {list(widths)}"
    for name, x in given.items():
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(step % 8 for step in x.stride()[:-1]):
            return f"needs {name} with rows at multiples of 16 bytes, got strides {x.stride()}"
    return cuda_code.missing_on(q_THX.device)


def prompt_attention(
    q_THX: Tensor, k_THN: Tensor, rope_TR: Tensor, v_THV: Tensor, first_T: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """As `reference.prompt_attention`, without a gradient, for a scale above zero.

    Raises ValueError where `refusal` has a reason.
    """
    out_THV = torch.empty_like(v_THV, memory_format=torch.contiguous_format)
    return out_THV, _attend((q_THX, k_THN, rope_TR, v_THV), first_T, scale, out_THV, None)


def prompt_attention_quantized(
    q_THX: Tensor, k_THN: Tensor, rope_TR: Tensor, v_THV: Tensor, first_T: Tensor, *, scale: float
) -> Quantized:
    """`act_quant` of the same [T, H * V], without writing the unquantized result."""
    codes_TV, scale_TB = empty_codes(len(v_THV), v_THV.shape[1] * v_THV.shape[2], "blocks", v_THV.device)
    _attend((q_THX, k_THN, rope_TR, v_THV), first_T, scale, codes_TV, scale_TB)
    return codes_TV, scale_TB


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], first_T: Tensor, scale: float, to: Tensor, scale_TB: Tensor | None
) -> Tensor:
    """lse [T, H]; fills `to` with values, or with codes if a buffer for scales is given."""
    q_THX, k_THN, rope_TR, v_THV = inputs
    if reason := refusal(*inputs):
        raise ValueError(f"prompt_attention[cuda] {reason}; use impl='triton'")
    if not scale > 0:
        raise ValueError(f"prompt_attention[cuda] needs a scale above zero, got {scale}; use impl='triton'")
    (num_tokens, num_heads, _), device = q_THX.shape, q_THX.device
    lse_TH = q_THX.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if num_tokens == 0:
        return lse_TH
    tiles = -(-num_tokens // _QUERIES)
    shares = num_shares(num_heads, tiles, triton_support.multiprocessors(device))
    (factor,) = struct.unpack("i", struct.pack("f", scale * math.log2(math.e)))
    maps = (cuda_code.heads_map(x, _KEYS) for x in (q_THX, k_THN, rope_TR[:, None], v_THV))
    kernel, sizes = _kernel(shares, scale_TB is not None, device), (num_tokens, num_heads, factor)
    given = first_T, to, lse_TH if scale_TB is None else scale_TB, lse_TH
    kernel((num_heads * shares, tiles), _THREADS, *maps, *given, *sizes, cluster=shares)
    return lse_TH


def num_shares(num_heads: int, tiles: int, multiprocessors: int) -> int:
    """Number of programs that split a tile's keys, 1 or 2, by the estimated time if all tokens are of one request.

    The estimate, in blocks of keys, adds the work per multiprocessor, the overhead of programs, and the longest
    program.
    """
    blocks, count = num_heads * tiles * (tiles + 1), num_heads * tiles
    whole = max(2 * tiles + 3.0, (blocks + 4.2 * count) / multiprocessors)
    halves = max(tiles + 5.8, (blocks + 14.4 * count) / multiprocessors)
    return 1 if whole <= halves else 2


@cache
def _kernel(shares: int, quantize: bool, device: torch.device) -> cuda_code.CudaKernel:
    constants = {"SHARES": shares, "SHARED_STORAGE": _SHARED_STORAGE, "QUANTIZE": int(quantize)}
    return cuda_code.build(SOURCE, "attend_prompt", _SHARED_BYTES, device, **constants)
