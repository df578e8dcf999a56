"""Codes and scales in GGUF's blocks: 32 neighbours of a row under one float16 scale.

    Q4_0   float16 scale | 16 bytes: code + 8 of value j in the low half of byte j, of value j + 16 in the high half
    Q8_0   float16 scale | 32 bytes: int8 codes

Both are w = scale * code. A group of 128, or a row, is several blocks with the same scale, so nothing is rounded if
float16 holds the scale. Those of `quant.qat` are such numbers: 8 significant bits, from 1e-5 up. Source: ggml-quants.c.
"""

import torch
from torch import Tensor

from glm5.common.errors import CheckpointError
from glm5.quant.record import Grid, Quantized

BLOCK = 32
TYPES = {4: "Q4_0", 8: "Q8_0"}
"""GGUF's type by bits of a code."""
_SCALE_BYTES = 2
MAX_SCALE = torch.finfo(torch.float16).max
_MIN_SCALE = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
"""The least number above 0 in float16, 2^-24."""


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row; `columns` is a multiple of 32."""
    return columns // BLOCK * (_SCALE_BYTES + BLOCK * bits // 8)


def block_scale(scale: Tensor) -> Tensor:
    """Scales as blocks hold them: rounded to float16, above 0; in the dtype they came in. At most MAX_SCALE come in."""
    return scale.to(torch.float16).to(scale.dtype).clamp_min(_MIN_SCALE)


def pack(weight: Quantized) -> Tensor:
    """Symmetric integer codes [O, I] of 4 or 8 bits as blocks: uint8 [O, bytes of a row]."""
    codes, num_blocks = weight.codes, weight.codes.shape[1] // BLOCK
    scale = weight.scale.to(torch.float16).repeat_interleave(num_blocks // weight.scale.shape[1], 1)
    assert torch.equal(scale.float(), weight.scale.repeat_interleave(num_blocks // weight.scale.shape[1], 1))
    values = codes.contiguous().view(torch.uint8).unflatten(1, (num_blocks, BLOCK))
    if weight.grid.bits == 4:
        low, high = (values + 8).bitwise_and_(15).chunk(2, -1)
        values = low | high << 4
    return torch.cat([scale.unsqueeze(-1).view(torch.uint8), values], -1).flatten(1)


def unpack(packed: Tensor, grid: Grid) -> Quantized:
    """What `pack` was given. Raises CheckpointError where the blocks of a group have several scales."""
    size = row_bytes(BLOCK, grid.bits)
    scale, values = packed.unflatten(1, (-1, size)).split([_SCALE_BYTES, size - _SCALE_BYTES], -1)
    if grid.bits == 4:
        values = torch.cat([values & 15, values >> 4], -1) - 8
    codes = values.contiguous().view(torch.int8).flatten(1)
    blocks = scale.contiguous().view(torch.float16).squeeze(-1).float()
    groups = blocks.unflatten(1, (grid.scale_shape(codes.shape)[1], -1))
    if not torch.equal(groups, groups[..., :1].expand_as(groups)):
        raise CheckpointError("blocks of one group have several scales")
    return Quantized(grid, codes, groups[..., 0].contiguous())
