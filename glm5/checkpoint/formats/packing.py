"""4-bit values in bytes as engines want them, and back.

PAIRS    two neighbours of a row a byte, even in the low half             SGLang, ModelOpt, glm5
INT32    eight neighbours of a row in four bytes, plus 8, lowest first    compressed-tensors
ROWS     the same column of two neighbouring rows a byte                  AscendV1
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from glm5.common.errors import ConfigError


class Unpack(Protocol):
    """The inverse of a packing, int8 [..., O, I]; `signed`: 4 bits are -8..7, else 0..15."""

    def __call__(self, packed: Tensor, /, *, signed: bool = True) -> Tensor: ...


class Packing(NamedTuple):
    """How values [..., O, I] lie in a tensor. `to_pairs`: bytes of rows as kernels take them; None where rows share
    bytes."""

    pack: Callable[[Tensor], Tensor]
    unpack: Unpack
    to_pairs: Callable[[Tensor], Tensor] | None = None


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
    return (pack_pairs(codes) ^ 0x88).view(torch.int32)


def unpack_int32(packed: Tensor, *, signed: bool = True) -> Tensor:
    """The inverse, int8 [..., O, I]."""
    return unpack_pairs(_int32_to_pairs(packed), signed=signed)


def pack_rows(codes: Tensor) -> Tensor:
    """int8 [..., O, I] in -8..7 to int8 [..., O / 2, I]: even rows in the low half."""
    _divides(codes.shape[-2], 2, "a column")
    nibbles = codes.view(torch.uint8) & 15
    return (nibbles[..., 0::2, :] | (nibbles[..., 1::2, :] << 4)).view(torch.int8)


def unpack_rows(packed: Tensor, *, signed: bool = True) -> Tensor:
    """The inverse, int8 [..., O, I]."""
    apart = unpack_pairs(packed, signed=signed).unflatten(-1, (-1, 2))
    return apart.movedim(-1, -2).flatten(-3, -2)


def _int32_to_pairs(packed: Tensor) -> Tensor:
    # A value plus 8 differs from its two's complement in the highest bit.
    return packed.contiguous().view(torch.uint8) ^ 0x88


def _unchanged(codes: Tensor, **_signed: bool) -> Tensor:
    return codes


def _divides(size: int, unit: int, what: str) -> None:
    if size % unit:
        raise ConfigError(f"{what} of {size} 4-bit codes cannot be packed {unit} at a time")


UNPACKED = Packing(_unchanged, _unchanged, _unchanged)
PAIRS = Packing(pack_pairs, unpack_pairs, lambda packed: packed.view(torch.uint8))
INT32 = Packing(pack_int32, unpack_int32, _int32_to_pairs)
ROWS = Packing(pack_rows, unpack_rows)
