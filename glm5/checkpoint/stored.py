"""Quantized matrices as they lie in a checkpoint, and where their bytes go in memory.

    int4, nvfp4   two codes a byte, even input in the low half; compressed-tensors: the same bytes as int32, plus 8 each
    int8, e4m3    one code a byte

A model holds what its kernels multiply: symmetric int4, int8 and e4m3 per row or group (`kernels.quantized_weight`),
and e4m3 in blocks. Everything that a scheme can say can be dequantized, on the way from the file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glm5.checkpoint.names import SCALE_SUFFIX, slot_of
from glm5.checkpoint.schemes import method_of, schemes_of
from glm5.checkpoint.shard import DTYPES, TensorEntry, read_columns, read_into, read_tensor
from glm5.checkpoint.staging import Staging
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import FP8
from glm5.kernels.quantized_weight import PRODUCTS, QuantizedWeight, WeightFormat
from glm5.parallel.table import Shard, Span, scale_span, span_of
from glm5.quant.record import FP8_BLOCK, FP8_GROUP, NVFP4, Grid, Quantized, Scheme

Role = Literal["codes", "scale", "offset", "tensor_scale"]
BLOCKS: Literal["blocks"] = "blocks"
HOLD_SUFFIX = "_scale"
GPU_GROUP = 64  # groups of a multiple of this have kernels on a GPU
_FLOATS = ("F32", "BF16", "F16")


class StoredTensor(NamedTuple):
    """One tensor of a quantized matrix: its name, the types it may have, its shape."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A quantized matrix [O, I] on disk. `flips`: 4-bit codes are stored plus 8. `beside`: tensors that say no more."""

    name: str
    """Of the weight, as a plain checkpoint has it."""
    scheme: Scheme
    shape: tuple[int, int]
    parts: dict[Role, StoredTensor]
    flips: bool = False
    beside: tuple[str, ...] = ()

    @property
    def form(self) -> "WeightFormat | Literal['blocks']":
        """How a model holds it. ConfigError where no kernel multiplies such codes."""
        return form_of(self.name.removesuffix(".weight"), self.scheme)


def form_of(module: str, scheme: Scheme) -> "WeightFormat | Literal['blocks']":
    """How a model holds a matrix of a scheme; ConfigError names what it cannot."""
    grid, act = scheme.weight, scheme.act
    if grid == FP8_BLOCK and act == FP8_GROUP:
        return BLOCKS
    weight = f"int{grid.bits}" if grid.kind == "int" else grid.kind
    kind = None if act is None else "fp8" if act.kind == "fp8" else "int8"
    fits = grid.symmetric and grid.scope in ("channel", "group") and (act is None or act.scope == "token")
    fits &= act is None or (act.symmetric and act.bits == 8)
    if not fits or (weight, kind) not in PRODUCTS:
        raise ConfigError(
            f"{module}: weights in {_say(grid)} under inputs in {_say(act) if act else '16 bits'} have no kernel "
            "here; allowed: symmetric int4, int8 and fp8 per channel or group, with inputs in 16 bits or per token, "
            "and fp8 in blocks; dtype bfloat16 loads it dequantized"
        )
    return WeightFormat(weight, grid.group, kind)  # type: ignore[arg-type]


def _say(grid: Grid) -> str:
    name = "nvfp4" if grid.kind == "nvfp4" else f"{grid.kind}{grid.bits}" if grid.kind == "int" else "fp8"
    group = f" of {grid.group}" if grid.group else ""
    return f"{name} per {grid.scope}{group}{'' if grid.symmetric else ', asymmetric'}"


def stored_of(cfg: ModelConfig, entries: Mapping[str, TensorEntry] | None = None) -> dict[str, Stored]:
    """The quantized matrices that `cfg` speaks of, by the weight's name; native FP8 is not among them.

    Of w4afp8, whose config says nothing, `entries` tell; without them all experts are int4.
    """
    method, found = method_of(cfg), dict[str, Stored]()
    schemes = schemes_of(cfg)
    for spec in tensor_specs(cfg) if schemes else ():
        module = spec.name.removesuffix(".weight")
        if module not in schemes:
            continue
        if method == "w4afp8" and entries is not None:
            entry = entries.get(spec.name)
            if entry is not None and entry.dtype not in ("I8", "U8"):
                continue
        shape, scheme = (spec.shape[0], spec.shape[1]), schemes[module]
        builders = {"glm5": _own, "compressed-tensors": _compressed, "w4afp8": _w4afp8, "modelopt": _modelopt}
        build = builders[method or ""]
        try:
            found[spec.name] = build(spec.name, module, scheme, shape)
        except ConfigError as error:
            raise ConfigError(f"quantization_config: {module}: {error}") from None
    return found


def _own(name: str, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
    grid = scheme.weight
    scales = grid.scale_shape(shape)
    parts: dict[Role, StoredTensor] = {
        "codes": StoredTensor(name, _code_types(grid), _packed(shape, grid)),
        "scale": StoredTensor(f"{module}.weight_scale", ("F8_E4M3",) if grid.kind == "nvfp4" else ("F32",), scales),
    }
    if not grid.symmetric:
        parts["offset"] = StoredTensor(f"{module}.weight_offset", ("F32",), scales)
    if grid.kind == "nvfp4":
        parts["tensor_scale"] = StoredTensor(f"{module}.weight_scale_2", ("F32",), (1,))
    return Stored(name, scheme, shape, parts)


def _compressed(name: str, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
    grid = scheme.weight
    if not grid.symmetric:
        raise ConfigError("asymmetric weights of compressed-tensors are not read; allowed: symmetric ones")
    scale = StoredTensor(f"{module}.weight_scale", _FLOATS, grid.scale_shape(shape))
    if grid.bits != 4:
        return Stored(name, scheme, shape, {"codes": StoredTensor(name, _code_types(grid), shape), "scale": scale})
    codes = StoredTensor(f"{module}.weight_packed", ("I32",), (shape[0], shape[1] // 8))
    return Stored(name, scheme, shape, {"codes": codes, "scale": scale}, flips=True, beside=(f"{module}.weight_shape",))


def _w4afp8(name: str, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
    """The static scale of inputs is left alone: scales of tokens are found as they come, which is nearer."""
    codes = StoredTensor(name, ("I8", "U8"), _packed(shape, scheme.weight))
    scale = StoredTensor(name + SCALE_SUFFIX, _FLOATS, scheme.weight.scale_shape(shape))
    return Stored(name, scheme, shape, {"codes": codes, "scale": scale}, beside=(f"{module}.input_scale",))


def _modelopt(name: str, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
    """As `_own` has nvfp4, but for the shape of its scale; `input_scale` is for inputs in FP4."""
    matrix = _own(name, module, scheme, shape)
    whole = matrix.parts["tensor_scale"]._replace(shape=())
    return replace(matrix, parts={**matrix.parts, "tensor_scale": whole}, beside=(f"{module}.input_scale",))


def _code_types(grid: Grid) -> tuple[str, ...]:
    return ("U8",) if grid.bits == 4 else ("F8_E4M3",) if grid.kind == "fp8" else ("I8",)


def _packed(shape: tuple[int, int], grid: Grid) -> tuple[int, int]:
    return (shape[0], shape[1] // 2) if grid.bits == 4 else shape


def forms_of(
    stored: Mapping[str, Stored], cfg: ModelConfig, device: torch.device
) -> dict[str, "WeightFormat | Literal['blocks']"]:
    """Forms by module of the model. ConfigError where a stack of experts is not of one form, where a form has no kernel
    on this device, or no kernel at all. NVFP4 has none: on a CPU its modules are plain and hold the values."""
    found: dict[str, WeightFormat | Literal["blocks", "values"]] = {}
    for name, matrix in stored.items():
        by_value = matrix.scheme == NVFP4 and device.type == "cpu"
        module, form = slot_of(name).module, "values" if by_value else matrix.form
        if found.setdefault(module, form) != form:
            raise ConfigError(f"{name}: is {form}, and others of {module} are {found[module]}; allowed: one for all")
        if (
            device.type == "cuda"
            and isinstance(form, WeightFormat)
            and form.group is not None
            and form.group % GPU_GROUP
        ):
            raise ConfigError(
                f"{name}: groups of {form.group} have no kernel on a GPU; allowed: multiples of {GPU_GROUP}, or "
                "dtype bfloat16, which dequantizes"
            )
    plain = {slot_of(spec.name).module: spec.name for spec in tensor_specs(cfg) if spec.name not in stored}
    if torn := sorted(found.keys() & plain.keys()):
        raise ConfigError(
            f"{plain[torn[0]]}: is not quantized, and others of {torn[0]} are; allowed: all of them or none"
        )
    return {module: form for module, form in found.items() if form != "values"}


def check_groups(stored: Iterable[Stored], size: int) -> None:
    """ConfigError where one of `size` ranks would have a part of a group, or half a byte."""
    for matrix in stored:
        span = span_of(matrix.name, matrix.shape, Shard(0, size))
        packed = matrix.shape[1] // matrix.parts["codes"].shape[1]
        unit = max(packed, matrix.scheme.weight.group or 1)
        if span is not None and (span.dim == 1 or matrix.scheme.weight.scope == "block") and span.stop % unit:
            raise ConfigError(
                f"tensor_parallel_size: got {size}, which cuts {matrix.name} into {span.stop}, no multiple of {unit}; "
                "allowed: fewer ranks"
            )


def place(
    directory: Path,
    entries: Mapping[str, TensorEntry],
    matrix: Stored,
    parameters: Mapping[str, Tensor],
    span: Span | None,
    staging: Staging,
) -> None:
    """Read `span` of a matrix into the parameters of a model: as codes where those hold codes, else dequantized."""
    slot, grid = slot_of(matrix.name), matrix.scheme.weight
    target = slot.view(parameters[slot.parameter])
    codes, scale = (entries[matrix.parts[role].name] for role in ("codes", "scale"))
    if target.is_floating_point() and target.dtype != FP8:
        whole = _quantized(directory, entries, matrix).dequantize(target.dtype)
        target.copy_(whole if span is None else whole.narrow(span.dim, span.start, span.stop - span.start))
        return
    held = _read(directory, codes, span, matrix.shape[1] // codes.shape[1], staging)
    staging.send(held, lambda held: target.copy_(_as_held(matrix, held)))
    of_scale = slot._replace(parameter=slot.parameter + (SCALE_SUFFIX if matrix.form == BLOCKS else HOLD_SUFFIX))
    if span is not None and grid.scope == "block":
        span = scale_span(span)
    per_scale = 1 if grid.scope == "block" else grid.group
    if span is not None and span.dim == 1 and per_scale is None:
        span = None  # one of a whole row, which every rank needs
    into = of_scale.view(parameters[of_scale.parameter])
    staging.send(_read(directory, scale, span, per_scale or 1, staging), lambda held: into.copy_(held.float()))


def _read(directory: Path, entry: TensorEntry, span: Span | None, per_element: int, staging: Staging) -> Tensor:
    """A part of a tensor that holds `per_element` inputs of a row in each of its elements, yet to be sent."""
    if span is not None and span.dim == 1:
        columns = range(span.start // per_element, span.stop // per_element)
        return read_columns(directory, entry, range(entry.shape[0]), columns).contiguous()
    first, last = (0, entry.shape[0]) if span is None else (span.start, span.stop)
    out = staging.room((last - first, *entry.shape[1:]), DTYPES[entry.dtype])
    read_into(directory, entry, out, first_byte=first * (entry.num_bytes // entry.shape[0]))
    return out


def _as_held(matrix: Stored, codes: Tensor) -> Tensor:
    """Codes as modules hold them, of codes as they are stored."""
    if matrix.scheme.weight.bits != 4:
        return codes
    codes = codes.view(torch.uint8)
    return codes ^ 0x88 if matrix.flips else codes


def _quantized(directory: Path, entries: Mapping[str, TensorEntry], matrix: Stored) -> Quantized:
    grid = matrix.scheme.weight
    codes, scale = (read_tensor(directory, entries[matrix.parts[role].name]) for role in ("codes", "scale"))
    codes = _as_held(matrix, codes)
    further: dict[str, Tensor] = {
        role: read_tensor(directory, entries[part.name]).float()
        for role, part in matrix.parts.items()
        if role in ("offset", "tensor_scale")
    }
    if grid.bits == 4:
        codes = QuantizedWeight(codes, scale.float(), WeightFormat("int4")).values(torch.int8)
        codes = codes & 15 if grid.kind == "nvfp4" else codes
    whole = further.get("tensor_scale")
    return Quantized(
        grid, codes, scale.float(), further.get("offset"), None if whole is None else whole.reshape(1, 1)
    ).check()
