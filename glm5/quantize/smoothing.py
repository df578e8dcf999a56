"""Smoothing of one layer: which subgraphs a recipe smooths, with what inputs, and the scales put into the weights."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.checkpoint.names import STACK
from glm5.config.recipe import FlexAwq, FlexSmooth, WeightGrid
from glm5.quant.fuse import smooth
from glm5.quant.graph import SUBGRAPHS, Subgraph
from glm5.quant.minmax import fake_quantize
from glm5.quant.record import Scheme
from glm5.quant.smooth import (
    RoundWeight,
    Smoothing,
    Target,
    flex_awq,
    flex_smooth,
    round_ssz,
    round_ssz_upstream,
)
from glm5.quantize.calibrate import Inputs
from glm5.quantize.devices import on_devices
from glm5.quantize.errors import evenly
from glm5.quantize.plan import Plan, scheme_of
from glm5.quantize.source import Layer
from glm5.quantize.weights import Options, some_at_a_time

SEARCH_TOKENS = 2048
EXPERT_TOKENS = 512


def smooth_layer(
    options: Options, plan: Plan, layer_idx: int, tensors: Layer, inputs: Inputs, norm_dtype: torch.dtype
) -> dict[str, Any]:
    """Smooth every subgraph of the layer that the recipe names, in place of `tensors`' entries and of `inputs`'.

    Returns figures by source: exponents, and the error of the search before and after.
    """
    stats: dict[str, Any] = {}
    for subgraph in SUBGRAPHS:
        if f"{subgraph.source}.weight" not in tensors:
            continue
        step = plan.smoothing(layer_idx, subgraph.source, subgraph.kind)
        targets = [target for target in subgraph.targets if f"{target}.weight" in tensors]
        if step is None or not targets:
            continue
        if subgraph.source.startswith(STACK):
            found = _experts(options, plan, layer_idx, step, tensors, inputs)
        else:
            seen = inputs.by_site.get(subgraph.source)
            if seen is None:
                continue
            readers = _targets(plan, layer_idx, step, targets, tensors)
            found = _search(step, evenly(seen, SEARCH_TOKENS), readers, None, options.upstream)
        if found is None:
            continue
        _apply(plan, subgraph, tensors, found.scale, norm_dtype)
        if subgraph.source in inputs.by_site:
            seen = inputs.by_site[subgraph.source]
            inputs.by_site[subgraph.source] = seen / found.scale.to(seen)
        stats[subgraph.source] = {
            "alpha": found.alpha.mean().item(),
            "beta": found.beta.mean().item(),
            "error": found.error.square().mean().sqrt().item(),
            "error_before": found.error_before.square().mean().sqrt().item(),
        }
    return stats


def _apply(plan: Plan, subgraph: Subgraph, tensors: Layer, scale: Tensor, norm_dtype: torch.dtype) -> None:
    """A norm is rounded as it will be stored before its readers take up what it lost."""
    name = f"{subgraph.source}.weight"
    wide = tensors[name].dtype
    if subgraph.kind == "norm-linear":
        tensors[name] = tensors[name].to(norm_dtype)
    tensors |= smooth(tensors, plan.cfg, subgraph, scale)[0]
    tensors[name] = tensors[name].to(wide)


def _targets(plan: Plan, layer_idx: int, step: FlexSmooth | FlexAwq, names: list[str], tensors: Layer) -> list[Target]:
    """With the scheme that the search is to assume: the step's own, or what the layer's plan has for each."""
    linears = plan.layer(layer_idx)
    found: list[Target] = []
    for name in names:
        scheme: Scheme | None = linears[name].scheme if name in linears else None
        if isinstance(step, FlexAwq) and scheme is not None:
            scheme = scheme_of(step.qconfig)
        found.append(Target(tensors[f"{name}.weight"], scheme))
    return found


def _search(
    step: FlexSmooth | FlexAwq, x: Tensor, targets: list[Target], counts: Tensor | None, upstream: bool
) -> Smoothing | None:
    if all(target.scheme is None for target in targets):
        return None  # nothing that reads it is quantized
    if isinstance(step, FlexAwq):
        rounding = _rounding(step.qconfig.weight, upstream)
        return flex_awq(x, targets, alpha=step.alpha, counts=counts, upstream=upstream, round_weight=rounding)
    return flex_smooth(x, targets, alpha=step.alpha, beta=step.beta, upstream=upstream)


def _rounding(weight: WeightGrid, upstream: bool) -> RoundWeight | None:
    """How a step's search rounds; None: as `flex_awq` does by itself."""
    if weight.method == "minmax":
        return fake_quantize
    if weight.ext.step is None:
        return None
    if upstream:
        return partial(round_ssz_upstream, steps=weight.ext.step)
    return partial(round_ssz, refine=weight.ext.step)


def _experts(
    options: Options, plan: Plan, layer_idx: int, step: FlexSmooth | FlexAwq, tensors: Layer, inputs: Inputs
) -> Smoothing | None:
    """Of routed experts, some at a time: each with the tokens that it saw. Those that saw too few keep scale 1."""
    module = f"{STACK}down_proj"
    down = tensors[f"{module}.weight"]

    def work(some: slice, device: torch.device) -> Smoothing | None:
        x_ETF, counts = (
            each.to(device) for each in expert_inputs(tensors, inputs, some, options.all_experts, EXPERT_TOKENS)
        )
        few = counts < options.min_tokens
        x_ETF[few] = 0
        targets = _targets(plan, layer_idx, step, [module], {f"{module}.weight": down[some].to(device)})
        found = _search(step, x_ETF, targets, counts, options.upstream)
        if found is None:
            return None
        found = found._replace(scale=torch.where(few.unsqueeze(-1), torch.ones_like(found.scale), found.scale))
        return Smoothing(*(part.to(down.device) for part in found))

    each = on_devices(options.devices, some_at_a_time(len(down)), work)
    found = [one for one in each if one is not None]
    return Smoothing(*(torch.cat(parts) for parts in zip(*found, strict=True))) if found else None


def expert_inputs(tensors: Layer, inputs: Inputs, some: slice, all_experts: bool, most: int) -> tuple[Tensor, Tensor]:
    """What down_proj of some experts is given, rows of zeros behind: ([E, T, F], number of real rows [E])."""
    gate, up = tensors[f"{STACK}gate_proj.weight"][some], tensors[f"{STACK}up_proj.weight"][some]
    rows = [evenly(inputs.routed(some.start + i, everyone=all_experts), most) for i in range(len(gate))]
    counts = torch.tensor([len(row) for row in rows], device=gate.device)
    out = gate.new_zeros(len(gate), max(1, int(counts.max())), gate.shape[1])
    x_TD = inputs.by_site["post_attention_layernorm"]
    for i, row in enumerate(rows):
        x_GD = x_TD[row]
        out[i, : len(row)] = F.silu(F.linear(x_GD, gate[i])) * F.linear(x_GD, up[i])
    return out, counts
