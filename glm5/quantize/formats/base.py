"""What a format of files is: which schemes it holds, what a quantized matrix becomes, and how it is read again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5.quant.record import Grid, Quantized, Scheme
from glm5.quantize.plan import Plan

Fetch = Callable[[str], Tensor]
"""A tensor of the files by its name."""


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix [O, I] on its way to a file. `module`: its name on disk without `.weight`."""

    module: str
    weight: Quantized
    act: Grid | None
    input_amax: float | None = None
    """Largest calibration input, for formats with static scales; None where nothing was calibrated."""


@dataclass
class Extras:
    """Files beside the weights: JSON by file name."""

    json: dict[str, Any] = field(default_factory=dict)


class Format(Protocol):
    """A way to store quantized matrices. Tensors that are not quantized keep their names in every format."""

    name: str
    shard_prefix: str
    """Of the files of weights."""

    def refusal(self, module: str, scheme: Scheme) -> str | None:
        """Why this format cannot hold a scheme for a module of a layer; None if it can."""
        ...

    def stored_scale(self, scale: Tensor, grid: Grid) -> Tensor:
        """The scale as its reader will use it: codes are rounded for this one (float32 in and out)."""
        ...

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        """By name on disk."""
        ...

    def read(self, module: str, scheme: Scheme, fetch: Fetch) -> Quantized:
        """What `tensors` stored."""
        ...

    def config(self, plan: Plan) -> dict[str, Any] | None:
        """`quantization_config` of config.json; None for none."""
        ...

    def extras(self, plan: Plan, stored: dict[str, str]) -> Extras:
        """Further files; `stored`: all tensors on disk, with the module's scheme by name ("" for plain ones)."""
        ...


def scheme_name(scheme: Scheme) -> str:
    """A short name: w8a8, w4a8, w4a8-g128-fp8, w4a16-g128, fp8-block, nvfp4..."""
    weight, act = scheme.weight, scheme.act
    if weight.kind == "nvfp4":
        return "nvfp4"
    if weight.kind == "fp8":
        return "fp8-block" if weight.scope == "block" else "fp8"
    name = f"w{weight.bits}a{8 if act else 16}"
    name += f"-g{weight.group}" if weight.scope == "group" else ""
    name += "-fp8" if act and act.kind == "fp8" else ""
    return name if weight.symmetric else f"{name}-asymmetric"


def exact_bf16(scale: Tensor) -> Tensor:
    """Scales that a bfloat16 file holds without loss, never 0."""
    return scale.to(torch.bfloat16).to(scale.dtype).clamp_min(torch.finfo(torch.bfloat16).tiny)


def needs_int4_g128(scheme: Scheme) -> bool:
    """int4, symmetric, in groups of 128."""
    weight = scheme.weight
    return (weight.kind, weight.bits, weight.scope, weight.group, weight.symmetric) == ("int", 4, "group", 128, True)
