"""Quantized weights: int8, int4 (two per byte) or e4m3 codes, with one scale per row or per group of a row.

    w[o, i] = scale[o, i // group] * code[o, i]

A byte holds two neighbouring int4 codes of a row, the even one in the low half, in two's complement. A format also says
how activations are quantized: with one scale per token (`token_quant`), or not at all.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from glm5.kernels.block_scaled import FP8, round_once

Element = Literal["int8", "int4", "fp8"]
Act = Literal["int8", "fp8"]
_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}
# Supported (weight, activation) codes: equal kinds, or one that represents the other exactly.
PRODUCTS: tuple[tuple[Element, Act | None], ...] = (
    ("int8", "int8"),
    ("int8", None),
    ("int4", "int8"),
    ("int4", "fp8"),
    ("int4", None),
    ("fp8", "fp8"),
    ("fp8", None),
)
_CHUNK = 1 << 22  # elements dequantized at a time


class WeightFormat(NamedTuple):
    """`weight`: kind of the codes; `group`: values of a row that share a scale, None: the row; `act`: activation
    codes."""

    weight: Element
    group: int | None = None
    act: Act | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor of codes."""
        return _DTYPES[self.weight]

    @property
    def per_byte(self) -> int:
        """Codes per element of that tensor."""
        return 2 if self.weight == "int4" else 1

    def num_scales(self, width: int) -> int:
        """Scales of a row of `width` inputs."""
        return 1 if self.group is None else -(-width // self.group)

    def __str__(self) -> str:
        name = f"w{4 if self.weight == 'int4' else 8}a{8 if self.act else 16}"
        name += f"-g{self.group}" if self.group else ""
        return name + ("-fp8" if "fp8" in (self.weight, self.act) else "")


class QuantizedWeight(NamedTuple):
    """A weight [..., O, I]: codes [..., O, I] (int4: [..., O, I / 2]) and float32 scale [..., O, G]."""

    codes: Tensor
    scale: Tensor
    format: WeightFormat

    @property
    def width(self) -> int:
        """Number of inputs, I."""
        return self.codes.shape[-1] * self.format.per_byte

    def check(self) -> Self:
        """Itself. Raises ValueError if dtypes or shapes do not match."""
        want = (*self.codes.shape[:-1], self.format.num_scales(self.width))
        if tuple(self.scale.shape) != want or (self.codes.dtype, self.scale.dtype) != (
            self.format.dtype,
            torch.float32,
        ):
            raise ValueError(
                f"QuantizedWeight {self.format}: codes {list(self.codes.shape)} {self.codes.dtype} need "
                f"{self.format.dtype} and a float32 scale {list(want)}, got {list(self.scale.shape)} {self.scale.dtype}"
            )
        if (self.format.weight, self.format.act) not in PRODUCTS:
            raise ValueError(
                f"QuantizedWeight: no kernel multiplies {self.format.weight} codes with rows in {self.format.act}"
            )
        return self

    def of(self, expert: int) -> "QuantizedWeight":
        """One matrix of a stack."""
        return QuantizedWeight(self.codes[expert], self.scale[expert], self.format)

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """Some rows of a matrix."""
        return QuantizedWeight(self.codes[start:stop], self.scale[start:stop], self.format)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The codes [..., O, I] as numbers of a dtype that holds them exactly."""
        if self.format.weight != "int4":
            return self.codes.to(dtype)
        byte = self.codes.view(torch.int8)
        # Shifts of int8 keep the sign.
        return torch.stack([(byte << 4) >> 4, byte >> 4], dim=-1).flatten(-2).to(dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The exact product of codes and scale, rounded once to `dtype`: [..., O, I]."""
        self.check()
        width, step = self.width, max(1, _CHUNK // self.width)
        codes, scale = self.codes.flatten(0, -2), self.scale.flatten(0, -2)
        out = torch.empty(len(codes), width, dtype=dtype, device=codes.device)
        for start in range(0, len(codes), step):
            part = QuantizedWeight(codes[start : start + step], scale[start : start + step], self.format)
            of_columns = part.scale.double().repeat_interleave(self.format.group or width, dim=-1)[:, :width]
            out[start : start + step] = round_once(part.values(torch.float64) * of_columns, dtype)
        return out.view(*self.codes.shape[:-1], width)
