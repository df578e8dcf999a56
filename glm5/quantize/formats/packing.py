"""Codes of fewer than eight bits, packed as engines want them, and back. All are inverses of each other.

pairs    two neighbours of a row a byte, even in the low half         SGLang, ModelOpt, glm5
int32    eight neighbours of a row in four bytes, plus 8, lowest first    compressed-tensors
rows     the same column of two neighbouring rows a byte                 AscendV1
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError


def pack_pairs(codes: Tensor) -> Tensor:
    """int8 [..., O, I] in -8..15 to uint8 [..., O, I / 2]; two's complement for negative ones."""
    _divides(codes.shape[-1], 2, "a row")
    pairs = codes.contiguous().view(torch.int16)  # the first of two in the low byte; a pass over all is what takes time
    return ((pairs & 15) | ((pairs >> 4) & 240)).to(torch.uint8)


def unpack_pairs(packed: Tensor, *, signed: bool = True) -> Tensor:
    """The inverse, int8 [..., O, I]; `signed`: -8..7, else 0..15."""
    packed = packed.view(torch.int8 if signed else torch.uint8)  # of int8 a shift to the right keeps the sign
    codes = torch.empty(*packed.shape, 2, dtype=packed.dtype, device=packed.device)
    torch.bitwise_right_shift(packed << 4, 4, out=codes[..., 0])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
    return codes.flatten(-2).view(torch.int8)


def pack_int32(codes: Tensor) -> Tensor:
    """int8 [..., O, I] in -8..7 to int32 [..., O, I / 8]."""
    _divides(codes.shape[-1], 8, "a row")
    nibbles = (codes + 8).view(torch.uint8)
    pairs = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return pairs.contiguous().view(torch.int32)


def unpack_int32(packed: Tensor) -> Tensor:
    """The inverse, int8 [..., O, I]."""
    return unpack_pairs(packed.contiguous().view(torch.uint8), signed=False) - 8


def pack_rows(codes: Tensor) -> Tensor:
    """int8 [..., O, I] in -8..7 to int8 [..., O / 2, I]: even rows in the low half."""
    _divides(codes.shape[-2], 2, "a column")
    nibbles = codes.view(torch.uint8) & 15
    return (nibbles[..., 0::2, :] | (nibbles[..., 1::2, :] << 4)).view(torch.int8)


def unpack_rows(packed: Tensor) -> Tensor:
    """The inverse, int8 [..., O, I]."""
    byte = packed.view(torch.uint8)
    nibbles = torch.stack([byte & 15, byte >> 4], dim=-2).flatten(-3, -2).to(torch.int8)
    return nibbles - 16 * (nibbles > 7).to(torch.int8)


def _divides(size: int, unit: int, what: str) -> None:
    if size % unit:
        raise ConfigError(f"{what} of {size} 4-bit codes cannot be packed {unit} at a time")
