"""Fuses smoothing scales into weights: the source of a channel is divided by its scale, its readers are multiplied."""

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.quant.chunks import wide
from glm5.quant.graph import Subgraph, place
from glm5.quant.record import Step
from glm5.quant.rotate import Steps, scale_inputs


def smooth(
    tensors: Mapping[str, Tensor], cfg: ModelConfig, subgraph: Subgraph, scale: Tensor
) -> tuple[dict[str, Tensor], Steps]:
    """The tensors of one layer that change when the channels of `subgraph` are divided by `scale`, and steps that
    describe the changes.

    `scale` [I]; [E, I] for stacked experts; [H * V] for "ov". The weight of a norm is rounded to its dtype first, and
    its readers are multiplied by the exact ratio, so that the product for each channel does not change.
    """
    changed, steps = dict[str, Tensor](), Steps()
    source = next(name for name in tensors if place(name)[1] == subgraph.source and name.endswith(".weight"))
    weight = tensors[source]
    by = wide(scale)
    match subgraph.kind:
        case "norm-linear":
            changed[source] = (wide(weight) / by).to(weight.dtype)
            kept = wide(changed[source]) != 0
            by = torch.where(kept, wide(weight) / wide(changed[source]), by)
        case "ov":
            changed[source] = _divide_values(weight, cfg, by)
        case _:
            changed[source] = (wide(weight) / by.unsqueeze(-1)).to(weight.dtype)
    steps[source] = [Step("smoothed", subgraph.kind, "outputs")]
    for name in tensors:
        if place(name)[1] in subgraph.targets and name.endswith(".weight"):
            changed[name] = scale_inputs(tensors[name], by)
            steps[name] = [Step("smoothed", source, "inputs")]
    return changed, steps


def _divide_values(kv_b: Tensor, cfg: ModelConfig, scale: Tensor) -> Tensor:
    """kv_b_proj [H (N + V), C] with the V value rows of each head divided by scale [H * V]."""
    keys, values = (
        wide(kv_b).unflatten(0, (cfg.num_attention_heads, -1)).split([cfg.qk_nope_head_dim, cfg.v_head_dim], 1)
    )
    values = values / scale.view(cfg.num_attention_heads, -1, 1)
    return torch.cat([keys, values], 1).flatten(0, 1).to(kv_b.dtype)
