"""One layer: folded and rotated, smoothed, quantized, and its metrics. Nothing here reads or writes a file.

    tensors as stored -> rotated -> seen by samples -> smoothed -> codes -> the same layer with the codes' values

Everything is computed in the run's dtype; what stays unquantized is rounded to its own dtype before samples see it.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import Format, scheme_name
from glm5.checkpoint.names import STACK, name_of
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.quant.graph import RotationName
from glm5.quant.hadamard import Rotation
from glm5.quant.qat import GROUP, KEY, is_int4
from glm5.quant.record import Grid, Quantized
from glm5.quant.rotate import fold, rotate
from glm5.quantize.calibrate import Activations, Inputs
from glm5.quantize.layer import build_layers
from glm5.quantize.plan import LinearPlan, Plan
from glm5.quantize.smoothing import smooth_layer
from glm5.quantize.source import Layer
from glm5.quantize.weights import Options, quantize_modules, shared_tensor_scale

logger = logging.getLogger(__name__)

_PAIRS = {
    f"{mlp}.{one}_proj": f"{mlp}.{other}_proj"
    for mlp in ("mlp", "mlp.shared_experts", "mlp.experts.*")
    for one, other in (("gate", "up"), ("up", "gate"))
}


@dataclass(frozen=True)
class Run:
    """What all layers of a run share."""

    cfg: ModelConfig
    plan: Plan
    format: Format
    rotations: dict[RotationName, Rotation]
    dtype: torch.dtype
    devices: list[torch.device]
    upstream: bool = False
    all_experts: bool = False
    min_tokens: int = 16

    @property
    def options(self) -> Options:
        trained = KEY in self.cfg.extra
        return Options(self.format, self.devices, self.upstream, self.all_experts, self.min_tokens, trained)

    @property
    def device(self) -> torch.device:
        return self.devices[0]


@dataclass
class LayerResult:
    """A layer as it is to be stored: tensors in their own dtypes, quantized modules, and metrics for the report."""

    layer_idx: int
    plain: Layer
    quantized: dict[str, Quantized]
    input_amax: dict[str, Tensor] = field(default_factory=dict)
    """Of modules that samples reached: largest input, for stacks one an expert."""
    metrics: dict[str, Any] = field(default_factory=dict)
    tensor_scales: dict[frozenset[str], Tensor] = field(default_factory=dict)
    """Of nvfp4, by the modules that share them."""


def rotated(run: Run, tensors: Layer) -> Layer:
    """The tensors in the run's dtype on its first device, folded and rotated as the recipe says; `tensors` is used up,
    one at a time, so that no layer is held twice."""

    def moved(name: str) -> Tensor:
        # Copy to the device in the stored dtype, then convert there: in one call torch would convert on the host.
        there = tensors.pop(name).to(run.device)
        return there.to(_wide(there, run.dtype))

    norms = {name: moved(name) for name, tensor in list(tensors.items()) if tensor.dim() == 1}
    held: Layer = {}
    for name in list(tensors):
        weight = moved(name)
        if run.rotations:
            weight = fold({**norms, name: weight}, run.rotations)[0].get(name, weight)
            weight = rotate({name: weight}, run.cfg, run.rotations)[0].get(name, weight)
        held[name] = weight
    return held | norms | (fold(norms, run.rotations)[0] if run.rotations else {})


def quantize_layer(run: Run, layer_idx: int, stored: Layer, samples: Activations | None) -> LayerResult:
    """Quantize a layer, which is used up, and send the samples through it as it will run.

    Without samples only methods without data.
    """
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    linears = run.plan.layer(layer_idx)
    for module, linear in linears.items():
        refuse_int4(run, layer_idx, module, linear, stored[f"{module}.weight"])
    tensors = rotated(run, stored)
    is_trunk = layer_idx < run.cfg.num_hidden_layers
    inputs = None
    if samples is not None and is_trunk:
        inputs = samples.inputs(build_layers(run.cfg, layer_idx, tensors, run.devices), run.cfg, layer_idx)
    result = LayerResult(layer_idx, {}, {})
    if inputs is not None and run.plan.recipe.smoothing:
        stored_norm = dtypes["input_layernorm.weight"]
        result.metrics["smoothing"] = smooth_layer(run.options, run.plan, layer_idx, tensors, inputs, stored_norm)
    for name in tensors:
        if name.removesuffix(".weight") not in linears:
            rounded = tensors[name].to(dtypes[name])
            result.plain[name], tensors[name] = rounded.cpu(), rounded.to(tensors[name].dtype)
    for module, linear in linears.items():
        if module in result.quantized:
            continue
        shared = _shared_scale(module, linear, tensors, result)
        together = _together(module, linear, linears)
        for name, done in quantize_modules(run.options, together, linear, tensors, inputs, shared).items():
            result.quantized[name] = done.weight
            result.metrics[name] = done.errors.relative()
            if done.amax is not None:
                result.input_amax[name] = done.amax
    _count_tokens(run, layer_idx, inputs, result)
    if samples is not None and is_trunk:
        acts = {module: linear.scheme.act for module, linear in linears.items()}
        samples.through(build_layers(run.cfg, layer_idx, tensors, run.devices, acts), run.cfg, layer_idx)
    return result


def refuse_int4(run: Run, layer_idx: int, module: str, linear: LinearPlan, weight: Tensor) -> None:
    """Raise ConfigError where a plan would move a weight that training has left on int4's grid: it passes unchanged by
    min-max in groups, and by nothing else. Of a stack, its first expert tells."""
    recipe = run.plan.recipe
    is_moved = recipe.rotation is not None or bool(recipe.smoothing) or linear.method != "minmax"
    if linear.scheme.weight == Grid("int", 4, "group", GROUP) and not is_moved:
        return
    first = (weight[0] if weight.dim() == 3 else weight).to(run.device)
    if is_int4(first):
        raise ConfigError(
            f"{name_of(layer_idx, module)} lies on an int4 grid already, as after training with quantization in view; "
            f"{linear.method} to {scheme_name(linear.scheme)} would move it; allowed: glm5 quantize MODEL OUT "
            "--scheme w4a16 --method minmax, which keeps every bit"
        )


def _together(module: str, linear: LinearPlan, linears: dict[str, LinearPlan]) -> list[str]:
    """Gate and up of experts by GPTQ: one Hessian stands for both."""
    other = _PAIRS.get(module)
    if not module.startswith(STACK) or linear.method != "gptq" or other is None or linears.get(other) != linear:
        return [module]
    return [module, other]


def _shared_scale(module: str, linear: LinearPlan, tensors: Layer, result: LayerResult) -> Tensor | None:
    """nvfp4's scale of a whole tensor, one for gate and up; found before either is quantized."""
    if linear.scheme.weight.kind != "nvfp4" or module not in _PAIRS:
        return None
    pair = frozenset((module, _PAIRS[module]))
    if pair not in result.tensor_scales:
        result.tensor_scales[pair] = shared_tensor_scale([tensors[f"{name}.weight"] for name in sorted(pair)])
    return result.tensor_scales[pair]


def _count_tokens(run: Run, layer_idx: int, inputs: Inputs | None, result: LayerResult) -> None:
    counts = None if inputs is None else inputs.tokens_per_expert(run.cfg.n_routed_experts)
    if counts is None:
        return
    result.metrics["tokens_per_expert"] = counts.tolist()
    few = (counts < run.min_tokens).nonzero().flatten().tolist()
    if few and not run.all_experts:
        shown = ", ".join(map(str, few[:8])) + (f" and {len(few) - 8} more" if len(few) > 8 else "")
        logger.warning(
            "%s: experts %s saw fewer than %d calibration tokens: methods without data for them; more samples or "
            "--calibrate-all-experts reach them",
            name_of(layer_idx, "mlp"),
            shown,
            run.min_tokens,
        )


def _wide(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The selection bias is float32 and stays it."""
    return torch.promote_types(tensor.dtype, dtype) if tensor.dtype in (torch.float32, torch.float64) else dtype
