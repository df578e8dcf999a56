"""Quantized matrices of a checkpoint (`formats/`): the format in which a model holds them, and reading them into it.

    int4, nvfp4   two values a byte, even input in the low half
    int8, e4m3    one value a byte

A model holds the formats that kernels multiply: symmetric int4, int8 and e4m3 per row or group
(`kernels.quantized_weight`), and e4m3 in blocks. Matrices of any scheme can be dequantized while they are read.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import Stored
from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.shard import DTYPES, TensorEntry, read_columns, read_into, read_tensor
from glm5.checkpoint.staging import Staging
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import FP8
from glm5.kernels.quantized_weight import PRODUCTS, WeightFormat
from glm5.parallel.table import Shard, Span, scale_span, span_of
from glm5.quant.record import FP8_BLOCK, FP8_GROUP, NVFP4, Grid, Scheme

BLOCKS: Literal["blocks"] = "blocks"
MODEL_SCALE_SUFFIX = "_scale"
Put = Callable[[str, Span | None, int, Callable[[Tensor], object]], None]
"""put(name, span, per_element, consume): call `consume` with a part of the tensor `name` on disk, see `_read`."""
GPU_GROUP = 64  # GPU kernels take group sizes that are a multiple of this


def weight_format(module: str, scheme: Scheme) -> WeightFormat | Literal["blocks"]:
    """The format in which a model holds a matrix of a scheme. Raises ConfigError if no kernel multiplies it."""
    grid, act = scheme.weight, scheme.act
    if grid == FP8_BLOCK and act == FP8_GROUP:
        return BLOCKS
    weight = f"int{grid.bits}" if grid.kind == "int" else grid.kind
    kind = None if act is None else "fp8" if act.kind == "fp8" else "int8"
    fits = grid.symmetric and grid.scope in ("channel", "group") and (act is None or act.scope == "token")
    fits &= act is None or (act.symmetric and act.bits == 8)
    if not fits or (weight, kind) not in PRODUCTS:
        raise ConfigError(
            f"{module}: weights in {_describe(grid)} with inputs in {_describe(act) if act else '16 bits'} have no "
            "kernel; allowed: symmetric int4, int8 and fp8 per channel or group, with inputs in 16 bits or per token, "
            "and fp8 in blocks; dtype bfloat16 loads it dequantized"
        )
    return WeightFormat(weight, grid.group, kind)  # type: ignore[arg-type]


def _describe(grid: Grid) -> str:
    name = "nvfp4" if grid.kind == "nvfp4" else f"{grid.kind}{grid.bits}" if grid.kind == "int" else "fp8"
    group = f" of {grid.group}" if grid.group else ""
    return f"{name} per {grid.scope}{group}{'' if grid.symmetric else ', asymmetric'}"


def weight_formats(
    stored: Mapping[str, Stored], cfg: ModelConfig, device: torch.device
) -> dict[str, WeightFormat | Literal["blocks"]]:
    """Weight formats by module of the model. NVFP4 has no kernel: on a CPU its modules hold dequantized values.

    Raises ConfigError where a stack of experts has several formats, or where a format has no kernel on this device.
    """
    found: dict[str, WeightFormat | Literal["blocks", "values"]] = {}
    for name, matrix in stored.items():
        by_value = matrix.scheme == NVFP4 and device.type == "cpu"
        module, held = slot_of(name).module, "values" if by_value else weight_format(matrix.module, matrix.scheme)
        if found.setdefault(module, held) != held:
            raise ConfigError(f"{name}: is {held}, and others of {module} are {found[module]}; allowed: one for all")
        if device.type == "cuda" and isinstance(held, WeightFormat) and (held.group or GPU_GROUP) % GPU_GROUP:
            raise ConfigError(
                f"{name}: groups of {held.group} have no kernel on a GPU; allowed: multiples of {GPU_GROUP}, or "
                "dtype bfloat16, which dequantizes"
            )
    plain = {slot_of(spec.name).module: spec.name for spec in tensor_specs(cfg) if spec.name not in stored}
    if mixed := sorted(found.keys() & plain.keys()):
        raise ConfigError(
            f"{plain[mixed[0]]}: is not quantized, and others of {mixed[0]} are; allowed: all of them or none"
        )
    return {module: held for module, held in found.items() if held != "values"}


def check_groups(stored: Iterable[Stored], size: int) -> None:
    """ConfigError where sharding over `size` ranks would cut a group, or a byte."""
    for matrix in stored:
        span = span_of(matrix.name, matrix.shape, Shard(0, size))
        packed = matrix.shape[1] // matrix.parts["codes"].shape[1]
        unit = max(packed, matrix.scheme.weight.group or 1)
        if span is not None and (span.dim == 1 or matrix.scheme.weight.scope == "block") and span.stop % unit:
            raise ConfigError(
                f"tensor_parallel_size: got {size}, which cuts {matrix.name} into {span.stop}, no multiple of {unit}; "
                "allowed: fewer ranks"
            )


def read_quantized(
    source: Path | Tensor,
    entries: Mapping[str, TensorEntry],
    matrix: Stored,
    parameters: Mapping[str, Tensor],
    span: Span | None,
    staging: Staging,
) -> None:
    """Read `span` of a matrix into the parameters of a model: as codes if these hold codes, else dequantized."""
    slot = slot_of(matrix.name)
    target = slot.view(parameters[slot.parameter])
    if target.is_floating_point() and target.dtype != FP8:
        dense = matrix.read(lambda name: read_tensor(source, entries[name])).dequantize(target.dtype)
        target.copy_(dense if span is None else dense.narrow(span.dim, span.start, span.stop - span.start))
        return

    def put(name: str, span: Span | None, per_element: int, consume: Callable[[Tensor], object]) -> None:
        staging.submit(_read(source, entries[name], span, per_element, staging), consume)

    place(matrix, parameters, span, put)


def place(matrix: Stored, parameters: Mapping[str, Tensor], span: Span | None, put: Put) -> None:
    """Put `span` of the codes and scales of a matrix, as tensors on disk, into the parameters of a model."""
    slot, grid, codes = slot_of(matrix.name), matrix.scheme.weight, matrix.parts["codes"]
    target, to_pairs = slot.view(parameters[slot.parameter]), matrix.packing.to_pairs
    assert to_pairs is not None, f"{matrix.packing=}"
    put(codes.name, span, matrix.shape[1] // codes.shape[1], lambda held: target.copy_(to_pairs(held)))
    of_scale = slot._replace(parameter=slot.parameter + (SCALE_SUFFIX if grid.scope == "block" else MODEL_SCALE_SUFFIX))
    if span is not None and grid.scope == "block":
        span = scale_span(span)
    per_scale = 1 if grid.scope == "block" else grid.group
    if span is not None and span.dim == 1 and per_scale is None:
        span = None  # one scale for a whole row: every rank needs all of them
    into = of_scale.view(parameters[of_scale.parameter])
    put(matrix.parts["scale"].name, span, per_scale or 1, lambda held: into.copy_(held.float()))


def _read(source: Path | Tensor, entry: TensorEntry, span: Span | None, per_element: int, staging: Staging) -> Tensor:
    """A part of a tensor, in host memory. `per_element`: inputs of a row that each element of the tensor stands for."""
    if span is not None and span.dim == 1:
        columns = range(span.start // per_element, span.stop // per_element)
        return read_columns(source, entry, range(entry.shape[0]), columns).contiguous()
    first, last = (0, entry.shape[0]) if span is None else (span.start, span.stop)
    out = staging.buffer((last - first, *entry.shape[1:]), DTYPES[entry.dtype])
    read_into(source, entry, out, first_byte=first * (entry.num_bytes // entry.shape[0]))
    return out
