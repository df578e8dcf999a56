"""Quantizes one module's weight by the method of its plan, with scales in the precision of the file.

A stack of experts is split over the devices; the result for an expert does not depend on the others.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.checkpoint.formats.base import Format
from glm5.checkpoint.names import STACK
from glm5.kernels.block_scaled import FP8_MAX
from glm5.quant.gptq import gptq, gram
from glm5.quant.minmax import quantize
from glm5.quant.nvfp4 import quantize_nvfp4
from glm5.quant.qat import minmax_scale
from glm5.quant.record import E2M1, Grid, Quantized
from glm5.quant.ssz import REFINE, ssz, ssz_asymmetric, ssz_upstream
from glm5.quantize.calibrate import Inputs
from glm5.quantize.devices import on_devices
from glm5.quantize.errors import Errors, errors_of, evenly
from glm5.quantize.plan import LinearPlan
from glm5.quantize.source import Layer

UPSTREAM_STEPS = 50
EXPERTS_AT_ONCE = 16
SHOWN_TOKENS = 512
SHOWN_EXPERT_TOKENS = 32


@dataclass(frozen=True)
class Options:
    """What all weights of a run share."""

    format: Format
    devices: Sequence[torch.device]
    upstream: bool = False
    all_experts: bool = False
    min_tokens: int = 16
    trained: bool = False
    """With int4 in view: rounded as then."""


@dataclass
class QuantizedModule:
    """A module that is quantized: on the CPU, scales in float32. `amax`: largest input, [1], of stacks [E]."""

    weight: Quantized
    errors: Errors
    amax: Tensor | None


def quantize_modules(
    options: Options,
    modules: Sequence[str],
    linear: LinearPlan,
    tensors: Layer,
    inputs: Inputs | None,
    tensor_scale: Tensor | None = None,
) -> dict[str, QuantizedModule]:
    """Quantize `<module>.weight` of a layer; the entries in `tensors` then hold the values of the codes.

    Several modules read the same: they are stacks of experts, and one matrix of all their rows is what GPTQ sees.
    `tensor_scale` [..., 1, 1]: of nvfp4, where it is shared with another module.
    """
    weight = tensors[f"{modules[0]}.weight"]
    if not modules[0].startswith(STACK):
        (module,) = modules
        seen = None if inputs is None else inputs.of(module)
        return {module: _one(options, linear, weight, seen, tensor_scale, SHOWN_TOKENS)}

    buffers = [_StackBuffer(len(weight)) for _ in modules]

    def work(some: slice, device: torch.device) -> list[QuantizedModule]:
        its_scale = None if tensor_scale is None else tensor_scale[some].to(device)
        return _some(options, modules, linear, tensors, inputs, some, device, its_scale, buffers)

    parts = on_devices(options.devices, some_at_a_time(len(weight)), work)
    return {
        module: _gathered([part[i] for part in parts], buffers[i], seen=inputs is not None)
        for i, module in enumerate(modules)
    }


class _StackBuffer:
    """Host memory for the codes of a stack, which come some experts at a time: most of what a layer leaves."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts, self._lock = num_experts, threading.Lock()
        self._codes: Tensor | None = None

    def put(self, codes: Tensor, some: slice) -> Tensor:
        """Where the codes of some experts lie from now on."""
        with self._lock:
            if self._codes is None:
                self._codes = torch.empty((self._num_experts, *codes.shape[1:]), dtype=codes.dtype)
        if codes.is_cuda:
            # Through pinned memory: a copy to pages that are not mapped yet faults on each, in one thread.
            codes = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True).copy_(codes)
        return self._codes[some].copy_(codes)

    @property
    def codes(self) -> Tensor:
        assert self._codes is not None, f"{self._num_experts=}"
        return self._codes


def some_at_a_time(num_experts: int) -> list[slice]:
    """Experts of a stack that are worked on together."""
    return [slice(start, start + EXPERTS_AT_ONCE) for start in range(0, num_experts, EXPERTS_AT_ONCE)]


def _gathered(done: list[QuantizedModule], buffer: _StackBuffer, *, seen: bool) -> QuantizedModule:
    """A module of a stack, of its parts."""
    errors = Errors()
    for one in done:
        errors.add(one.errors)
    parts = [(one.weight.scale, one.weight.offset, one.weight.tensor_scale) for one in done]
    scale, offset, tensor_scale = (
        None if column[0] is None else torch.cat([part for part in column if part is not None])
        for column in zip(*parts, strict=True)
    )
    assert scale is not None
    weight = Quantized(done[0].weight.grid, buffer.codes, scale, offset, tensor_scale)
    return QuantizedModule(
        weight, errors, torch.cat([one.amax for one in done if one.amax is not None]) if seen else None
    )


def _one(
    options: Options, linear: LinearPlan, weight: Tensor, seen: Tensor | None, tensor_scale: Tensor | None, shown: int
) -> QuantizedModule:
    """A matrix [O, I] with its inputs [T, I]."""
    hessian = None
    if seen is not None and (linear.method == "gptq" or linear.ext.weighted):
        hessian = gram(seen)
    quantized = quantize_weight(options, linear, weight, hessian, tensor_scale)
    value = quantized.dequantize(weight.dtype)
    some = None if seen is None else evenly(seen, shown)
    errors = errors_of(weight, value, linear.scheme.act, some)
    weight.copy_(value)
    return QuantizedModule(
        _on_cpu(quantized), errors, None if seen is None else seen.abs().amax().reshape(1).float().cpu()
    )


def _some(
    options: Options,
    modules: Sequence[str],
    linear: LinearPlan,
    tensors: Layer,
    inputs: Inputs | None,
    some: slice,
    device: torch.device,
    tensor_scale: Tensor | None,
    buffers: Sequence[_StackBuffer],
) -> list[QuantizedModule]:
    """Some experts of stacks on a device: their part of each module."""
    weights = [tensors[f"{module}.weight"][some] for module in modules]
    seen = [expert_reads(options, modules[0], tensors, inputs, some.start + i) for i in range(len(weights[0]))]
    held, hessian = torch.cat([weight.to(device) for weight in weights], dim=-2), None
    if inputs is not None and (linear.method == "gptq" or linear.ext.weighted):
        none = held.new_zeros(held.shape[-1], held.shape[-1])
        hessian = torch.stack([none if x is None or len(x) < options.min_tokens else gram(x.to(device)) for x in seen])
    quantized = quantize_weight(options, linear, held, hessian, tensor_scale)
    del hessian
    value = quantized.dequantize(held.dtype)
    heights = [weight.shape[-2] for weight in weights]
    apart = zip(weights, held.split(heights, -2), value.split(heights, -2), strict=True)
    done: list[QuantizedModule] = []
    for (weight, was, now), codes, buffer in zip(apart, _by_rows(quantized, heights), buffers, strict=True):
        errors, amaxes = Errors(), [torch.zeros(1)] * len(weight)
        for i, x in enumerate(seen):
            shown = None if x is None else evenly(x, SHOWN_EXPERT_TOKENS).to(device)
            errors.add(errors_of(was[i], now[i], linear.scheme.act, shown))
            if x is not None and len(x):
                amaxes[i] = x.abs().amax().reshape(1).float().cpu()
        weight.copy_(now)
        done.append(QuantizedModule(_on_cpu(codes, buffer.put(codes.codes, some)), errors, torch.cat(amaxes)))
    return done


def _by_rows(quantized: Quantized, heights: list[int]) -> list[Quantized]:
    """Matrices that lie one above the other, apart; scales are by row, unless there is only one matrix."""
    if len(heights) == 1:
        return [quantized]
    codes, scales = quantized.codes.split(heights, -2), quantized.scale.split(heights, -2)
    return [Quantized(quantized.grid, code, scale) for code, scale in zip(codes, scales, strict=True)]


def expert_reads(options: Options, module: str, tensors: Layer, inputs: Inputs | None, expert: int) -> Tensor | None:
    """[T, I] what one expert's projection is given: its tokens, for down_proj through gate and up as they are now."""
    if inputs is None:
        return None
    x_GD = inputs.by_site["post_attention_layernorm"][inputs.routed(expert, everyone=options.all_experts)]
    if not module.endswith("down_proj"):
        return x_GD
    gate, up = (tensors[f"{STACK}{name}_proj.weight"][expert] for name in ("gate", "up"))
    return F.silu(F.linear(x_GD, gate)) * F.linear(x_GD, up)


def quantize_weight(
    options: Options, linear: LinearPlan, weight: Tensor, hessian: Tensor | None, tensor_scale: Tensor | None = None
) -> Quantized:
    """weight [..., O, I] on its grid; `hessian` [..., I, I] of its inputs, all zero for a matrix without any."""
    grid = linear.scheme.weight
    if grid.kind == "nvfp4":
        tensor_scale = shared_tensor_scale([weight]) if tensor_scale is None else tensor_scale
        return quantize_nvfp4(weight, grid, options.format.stored_tensor_scale(tensor_scale))
    importance = None if hessian is None else hessian.diagonal(dim1=-2, dim2=-1)
    scale, offset = find_scale(options, weight, grid, linear, importance)
    # As a file holds it: float32 at most, also where everything is computed in float64.
    scale = options.format.stored_scale(scale.float(), linear.scheme).to(scale.dtype)
    if linear.method == "gptq" and hessian is not None:
        return gptq(weight, hessian, grid, scale, damp=linear.ext.damp)
    return quantize(weight, grid, scale, offset)


def find_scale(
    options: Options, weight: Tensor, grid: Grid, linear: LinearPlan, importance: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(scale, offset); gptq stands for the method of its scales."""
    method, ext = linear.method, linear.ext
    if method == "minmax" or (method == "gptq" and ext.scales == "minmax"):
        return minmax_scale(weight, grid, trained=options.trained or options.upstream)
    if options.upstream and grid.symmetric:
        return ssz_upstream(weight, grid, ext.step or UPSTREAM_STEPS), None
    weights = None
    if importance is not None and ext.weighted:
        # Without inputs all count the same.
        empty = importance.amax(-1, keepdim=True) == 0
        weights = torch.where(empty, torch.ones_like(importance), importance)
    refine = ext.step or REFINE
    if not grid.symmetric:
        return ssz_asymmetric(weight, grid, weights, refine=refine)
    return ssz(weight, grid, weights, refine=refine), None


def shared_tensor_scale(weights: list[Tensor]) -> Tensor:
    """nvfp4's tensor_scale [..., 1, 1] for weights that engines compute in one product: gate and up."""
    reach = torch.stack([weight.abs().amax((-2, -1), keepdim=True) for weight in weights]).amax(0).float()
    scale = reach / torch.full_like(reach, E2M1[-1] * FP8_MAX)
    return scale.masked_fill(scale == 0, 1.0)


def part_of(quantized: Quantized, expert: int | None) -> Quantized:
    """One matrix of a stack; the whole where it is none."""
    if expert is None:
        return quantized
    parts = (quantized.scale, quantized.offset, quantized.tensor_scale)
    scale, offset, tensor_scale = (None if part is None else part[expert] for part in parts)
    assert scale is not None
    return Quantized(quantized.grid, quantized.codes[expert], scale, offset, tensor_scale)


def _on_cpu(quantized: Quantized, codes: Tensor | None = None) -> Quantized:
    """As a file holds it. `codes`: where they lie on the CPU already."""
    scales = (quantized.scale, quantized.offset, quantized.tensor_scale)
    scale, offset, tensor_scale = (None if part is None else part.float().cpu() for part in scales)
    assert scale is not None
    return Quantized(quantized.grid, quantized.codes.cpu() if codes is None else codes, scale, offset, tensor_scale)
