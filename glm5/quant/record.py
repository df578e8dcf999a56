"""Data types of quantization: grids of values, quantized tensors, schemes, and a log of changes to a tensor.

    kind "int", symmetric     w = scale * code                          code in -2^(b-1) .. 2^(b-1) - 1
    kind "int", asymmetric    w = scale * (code - offset)
    kind "fp8"                w = scale * code                          code e4m3
    kind "nvfp4"              w = (tensor_scale * scale) * e2m1[code]   scale an e4m3 value, code in 0 .. 15

A scale always multiplies. The grid's scope says which elements share one; a writer decides how it is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.kernels.block_scaled import FP8, FP8_MAX, round_once

Kind = Literal["int", "fp8", "nvfp4"]
Scope = Literal["channel", "group", "token", "block", "tensor"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4; bit 3 of a code is the sign."""

_CHUNK = 1 << 22  # elements dequantized at a time: a stack of experts in float64 would not fit in memory
_GROUPED: tuple[Scope, ...] = ("group", "block")


@dataclass(frozen=True)
class Grid:
    """The values that a tensor [..., O, I] can take, and which elements share a scale.

    "channel": a row of a weight; "token": a row of activations; "group": `group` neighbours in a row; "block":
    `group` x `group` elements, ragged at the edges; "tensor": a whole matrix.
    """

    kind: Kind
    bits: int
    scope: Scope
    group: int | None = None
    symmetric: bool = True

    def __post_init__(self):
        bits = {"int": range(2, 9), "fp8": (8,), "nvfp4": (4,)}[self.kind]
        if self.bits not in bits:
            raise ConfigError(f"a grid of kind {self.kind} has {min(bits)} to {max(bits)} bits, got {self.bits}")
        if (self.group is not None) != (self.scope in _GROUPED) or (self.group is not None and self.group < 1):
            raise ConfigError(f"scope {self.scope} with group {self.group}: scopes group and block have a group size")
        if self.kind == "nvfp4" and (self.scope, self.group) != ("group", 16):
            raise ConfigError(f"nvfp4 has scope group and group 16, got {self.scope} and {self.group}")
        if not self.symmetric and (self.kind != "int" or self.scope == "block"):
            raise ConfigError(f"only integer grids outside blocks can be asymmetric, got {self}")

    @property
    def quant_min(self) -> float:
        """Least code, in units of the scale."""
        return {"int": -float(2 ** (self.bits - 1)), "fp8": -FP8_MAX, "nvfp4": -E2M1[-1]}[self.kind]

    @property
    def quant_max(self) -> float:
        """Largest code, in units of the scale."""
        return -self.quant_min - 1 if self.kind == "int" else -self.quant_min

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scale of a tensor [..., O, I]. Raises ConfigError where rows do not divide into groups."""
        *lead, rows, cols = shape
        match self.scope:
            case "channel" | "token":
                return (*lead, rows, 1)
            case "tensor":
                return (*lead, 1, 1)
            case "group":
                assert self.group is not None, f"{self=}"
                if cols % self.group:
                    raise ConfigError(
                        f"rows of {cols} do not divide into groups of {self.group}: choose a group size that does, "
                        "or quantize per channel"
                    )
                return (*lead, rows, cols // self.group)
            case "block":
                assert self.group is not None, f"{self=}"
                return (*lead, -(-rows // self.group), -(-cols // self.group))

    def broadcast(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        """`scale` for every element of a tensor [..., O, I]: [..., O or 1, I or 1], ready to broadcast."""
        if self.group is None:
            return scale
        if self.scope == "block":
            scale = scale.repeat_interleave(self.group, -2)[..., : shape[-2], :]
        return scale.repeat_interleave(self.group, -1)[..., : shape[-1]]


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor [..., O, I]. `codes`: int8, not packed; float8_e4m3fn for kind "fp8".

    `scale`: float32 (float64 where a float64 tensor was quantized) of `grid.scale_shape`. `offset`: integers, of the
    dtype and shape of `scale`, for asymmetric grids. `tensor_scale`: float32 [..., 1, 1], for nvfp4.
    """

    grid: Grid
    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    tensor_scale: Tensor | None = None

    def check(self) -> Self:
        """Return self. Raises ValueError where a tensor is missing or has a wrong shape or dtype."""
        grid, expected = self.grid, self.grid.scale_shape(self.codes.shape)
        dtype = FP8 if grid.kind == "fp8" else torch.int8
        for name, part, needed in (
            ("scale", self.scale, True),
            ("offset", self.offset, not grid.symmetric),
            ("tensor_scale", self.tensor_scale, grid.kind == "nvfp4"),
        ):
            if (part is not None) != needed:
                raise ValueError(f"Quantized: {grid} {'needs' if needed else 'has no'} {name}")
            shape = (*expected[:-2], 1, 1) if name == "tensor_scale" else expected
            if part is not None and tuple(part.shape) != shape:
                raise ValueError(
                    f"Quantized: codes {list(self.codes.shape)} need a {name} {list(shape)}, got {list(part.shape)}"
                )
        if self.codes.dtype != dtype:
            raise ValueError(f"Quantized: codes of kind {grid.kind} are {dtype}, got {self.codes.dtype}")
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The tensor [..., O, I]: its exact value, rounded once to `dtype`."""
        self.check()
        rows, cols = self.codes.shape[-2:]
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        unit = self.grid.group if self.grid.scope == "block" and self.grid.group else 1
        step = max(1, _CHUNK // (unit * max(cols, 1))) * unit
        parts = (self.codes, self.scale, self.offset, self.tensor_scale)
        flat = [None if p is None else p.reshape(-1, *p.shape[-2:]) for p in parts]
        for idx, into in enumerate(out.view(-1, rows, cols)):
            for row in range(0, rows, step):
                some = [None if p is None else _rows(p[idx], slice(row, row + step), rows, unit) for p in flat]
                into[row : row + step] = self._exact(some, dtype)
        return out

    def _exact(self, parts: list[Tensor | None], dtype: torch.dtype) -> Tensor:
        # A code has at most 8 bits, a scale 24 and an e4m3 value 4, so their product is exact in float64.
        codes, scale, offset, tensor_scale = parts
        assert codes is not None
        assert scale is not None
        if self.grid.kind == "nvfp4":
            levels = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
            value = levels[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
        else:
            value = codes.double()
        if offset is not None:
            value = value - self.grid.broadcast(offset.double(), codes.shape)
        combined = scale.double() if tensor_scale is None else scale.double() * tensor_scale.double()
        return round_once(value * self.grid.broadcast(combined, codes.shape), dtype)


def _rows(part: Tensor, which: slice, rows: int, unit: int) -> Tensor:
    """The rows of `part` for rows `which` of the tensor. `part` has one row in all, or one for each row or `unit`."""
    if part.shape[0] == 1:
        return part
    return part[which] if part.shape[0] == rows else part[which.start // unit : -(-which.stop // unit)]


@dataclass(frozen=True)
class Scheme:
    """The grid of a linear layer's weight, and of its input at run time (None: not quantized)."""

    weight: Grid
    act: Grid | None = None


@dataclass(frozen=True)
class Step:
    """A change to a tensor before quantization, for the report.

    `by`: the name of the tensor that was folded in or divided out, or of a rotation ("residual").
    """

    action: Literal["folded", "rotated", "smoothed", "corrected"]
    by: str
    side: Literal["inputs", "outputs"]
    figures: dict[str, float] = field(default_factory=dict)


INT8_CHANNEL, INT8_TOKEN = Grid("int", 8, "channel"), Grid("int", 8, "token")
INT4_CHANNEL, INT4_GROUP = Grid("int", 4, "channel"), Grid("int", 4, "group", 128)
FP8_CHANNEL, FP8_TOKEN = Grid("fp8", 8, "channel"), Grid("fp8", 8, "token")
FP8_BLOCK, FP8_GROUP = Grid("fp8", 8, "block", 128), Grid("fp8", 8, "group", 128)
NVFP4_GROUP = Grid("nvfp4", 4, "group", 16)

W8A8 = Scheme(INT8_CHANNEL, INT8_TOKEN)
W4A8 = Scheme(INT4_CHANNEL, INT8_TOKEN)
"""int4 weights per channel and int8 activations per token, for Ascend and glm5."""
W4A8_FP8 = Scheme(INT4_GROUP, FP8_TOKEN)
"""int4 weights in groups of 128 and e4m3 activations per token, for vLLM, SGLang and glm5."""
W4A16 = Scheme(INT4_GROUP)
NVFP4 = Scheme(NVFP4_GROUP)
