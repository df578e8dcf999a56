"""fp8_linear of many rows on Hopper, in CUDA C++ (rows.cu). For a row-parallel weight, partial rows are sent to the
ranks that sum them, while other rows are computed."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels import cuda_code, triton_support
from glm5.kernels.act_quant import act_quant
from glm5.kernels.block_scaled import BLOCK, BlockScaled

SOURCE = Path(__file__).with_name("rows.cu")
SHARED_BYTES = 231_520  # of a program of rows.cu, which checks that it needs as many
SAME_OWNER = 16  # neighbouring rows that go to one rank
_THREADS, _PEERS, _ROWS = 384, 2, 128  # as in rows.cu


class PeerBuffers(NamedTuple):
    """Symmetric buffers of ranks (triton_buffers.py), over which rows are sharded in equal shares: their addresses
    [ranks], the index of the current buffer [1], this rank, and the words of a buffer."""

    buffers: Tensor
    slot_index: Tensor
    rank: int
    num_words: int


def refusal(x_TD: Tensor, weight: BlockScaled) -> str:
    """Why these cannot be handled; empty if they can."""
    rows, cols = weight.data.shape
    if x_TD.dtype != torch.bfloat16 or not len(x_TD):
        return f"needs rows in bfloat16, got {len(x_TD)} in {x_TD.dtype}"
    if rows % (_PEERS * BLOCK) or cols % (2 * BLOCK) or not weight.data.is_contiguous():
        return f"needs whole weights of multiples of {_PEERS * BLOCK} and {2 * BLOCK}, got [{rows}, {cols}]"
    return cuda_code.missing_on(x_TD.device)


def fp8_linear(
    x_TD: Tensor,
    weight: BlockScaled,
    quantized: tuple[Tensor, Tensor] | None = None,
    *,
    to: PeerBuffers | None = None,
) -> Tensor:
    """[T, O] in bfloat16. Raises ValueError where `refusal` has a reason.

    `to`: where rows of other ranks are sent; they are not in the result.
    """
    if reason := refusal(x_TD, weight.check()):
        raise ValueError(f"fp8_linear[rows] {reason}; use impl='scaled_mm'")
    (num_rows, cols), outputs, device = x_TD.shape, len(weight.data), x_TD.device
    buffers, slot_index, rank, num_words = to or (None, None, 0, 0)
    assert buffers is None or not num_rows % (SAME_OWNER * len(buffers)), f"{num_rows=}"
    share = num_rows // (1 if buffers is None else len(buffers))
    y_TO = torch.empty(num_rows, outputs, dtype=x_TD.dtype, device=device)
    x_fp8, x_scale = quantized or act_quant(x_TD)
    x_fp8 = x_fp8.contiguous()
    tiles = -(-num_rows // _ROWS) * (outputs // (_PEERS * BLOCK))
    _kernel(cols // BLOCK, device)(
        (_PEERS * min(tiles, triton_support.multiprocessors(device) // _PEERS), 1),
        _THREADS,
        cuda_code.tile_map(x_fp8.data_ptr(), num_rows, cols, _ROWS // _PEERS),
        cuda_code.tile_map(weight.data.data_ptr(), outputs, cols, BLOCK),
        x_scale.T.contiguous(),
        weight.scale.contiguous(),
        y_TO,
        buffers,
        slot_index,
        rank,
        num_words,
        share,
        num_rows,
        outputs,
        cluster=_PEERS,
    )
    return y_TO


@cache
def _kernel(blocks: int, device: torch.device) -> cuda_code.CudaKernel:
    return cuda_code.build(SOURCE, "rows", SHARED_BYTES, device, **constants(blocks))


def constants(blocks: int) -> dict[str, int]:
    """Constants of rows.cu for a number of blocks of columns."""
    group = next(n for n in (16, 8, 4, 2) if not blocks % n)
    return {"BLOCKS": blocks, "GROUP": group, "SHARED_BYTES": SHARED_BYTES}
