"""Pools of FP8 rows, in the two formats of DSA engines (model spec 3.9 and 4):

    index key   I e4m3 values and one float32 scale            key    = data * scale                     132 bytes
    latent      C e4m3 values in groups of 128, one float32    latent = [data * scale of its group, rope]
                scale a group, R bfloat16 rotated values                                                 656 bytes

(bytes of GLM-5). The last group may be ragged. A key's scale is the smallest power of two >= max(amax, 1e-4) / 448, a
latent's is max(amax, 1e-4) / 448 itself, as in act_quant; data is the quotient to nearest even. A row is read as the
float32 product, rounded once, so all kernels read the same value.

In a page, all index keys come before all scales. A latent row is contiguous, with every part at a multiple of 4 bytes.
Pools may be strided by page.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.act_quant.reference import MIN_AMAX
from glm5.kernels.block_scaled import BLOCK, FP8, FP8_MAX, divided, num_blocks

ROPE_DTYPE = torch.bfloat16
_WORD = 4


class Fp8Keys(NamedTuple):
    """Index keys: float8_e4m3fn data [P, Z, I] and float32 scale [P, Z]."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(P, Z, I)."""
        num_pages, page_size, width = self.data.shape
        return num_pages, page_size, width


class LatentFormat(NamedTuple):
    """Layout of a latent row: `num_values` (C) quantized values and `rope_dim` (R) unquantized ones."""

    num_values: int
    rope_dim: int

    @property
    def scales_at(self) -> int:
        return _words(self.num_values)

    @property
    def rope_at(self) -> int:
        return self.scales_at + num_blocks(self.num_values) * torch.float32.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.rope_at + _words(self.rope_dim * ROPE_DTYPE.itemsize)


class Fp8Latents(NamedTuple):
    """Latent rows, uint8 [P, Z, format.num_bytes]."""

    row: Tensor
    format: LatentFormat

    @property
    def shape(self) -> tuple[int, int, int]:
        """(P, Z, L) of the dequantized rows."""
        num_pages, page_size, _ = self.row.shape
        return num_pages, page_size, self.format.num_values + self.format.rope_dim


Pool = Tensor | Fp8Keys | Fp8Latents


@torch.no_grad()
def quantize_keys(key_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Index keys as data [T, I] float8_e4m3fn and scale [T] float32, a power of two."""
    key_TI = key_TI.float()
    amax_T = key_TI.abs().amax(dim=-1).clamp_min(MIN_AMAX)
    least_T = divided(amax_T, FP8_MAX)
    # Round up to a power of two: add the largest fraction, so that any nonzero one carries, then clear the 23 bits.
    scale_T = ((least_T.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return (key_TI / scale_T[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale_T


def dequantize_keys(data: Tensor, scale: Tensor) -> Tensor:
    """float32 keys [..., I] of data [..., I] and scale [...]."""
    return _widened(data).mul_(scale.unsqueeze(-1))


@torch.no_grad()
def quantize_latents(latent_TL: Tensor, form: LatentFormat) -> Tensor:
    """Latent rows as bytes, uint8 [T, form.num_bytes]; padding is zeros."""
    values_TC, rope_TR = latent_TL.split([form.num_values, form.rope_dim], dim=-1)
    data_TC, scale = act_quant(values_TC)
    row_TB = latent_TL.new_zeros(latent_TL.shape[0], form.num_bytes, dtype=torch.uint8)
    row_TB[:, : form.num_values] = data_TC.view(torch.uint8)
    _scales(row_TB, form).copy_(scale)
    _rope(row_TB, form).copy_(rope_TR)
    return row_TB


def dequantize_latents(row: Tensor, form: LatentFormat) -> Tensor:
    """float32 latents [..., L] of rows uint8 [..., form.num_bytes]."""
    num_values, width = form.num_values, form.num_values + form.rope_dim
    latent = torch.empty(*row.shape[:-1], width, dtype=torch.float32, device=row.device)
    latent[..., :num_values] = _widened(row[..., :num_values].view(FP8))
    scales = _scales(row, form)
    for group in range(scales.shape[-1]):
        latent[..., group * BLOCK : min(num_values, (group + 1) * BLOCK)] *= scales[..., group : group + 1]
    latent[..., num_values:] = _rope(row, form)
    return latent


def _scales(row: Tensor, form: LatentFormat) -> Tensor:
    return row[..., form.scales_at : form.rope_at].view(torch.float32)


def _rope(row: Tensor, form: LatentFormat) -> Tensor:
    return row[..., form.rope_at : form.rope_at + form.rope_dim * ROPE_DTYPE.itemsize].view(ROPE_DTYPE)


def _widened(data: Tensor) -> Tensor:
    """e4m3 values as float32, in new memory."""
    if data.device.type != "cpu":
        return data.float()
    # By a table of all 256 values: five times as fast as the cast (0.6 and 3.0 ns a value on one core).
    table = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return table.index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)


def _words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD
