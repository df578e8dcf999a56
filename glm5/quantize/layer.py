"""One decoder layer that runs with given tensors, sees what reaches its linear layers, and computes as a scheme does.

    y = fake(x) fake(W)^T      fake: through the grid and back, where there is one

Weights come quantized already, as their values; activations are quantized here, per token, as engines do at run time.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.checkpoint.names import STACK
from glm5.config.model import ModelConfig
from glm5.model.block import DecoderLayer
from glm5.model.linear import Linear
from glm5.model.moe import MoE
from glm5.model.mtp import MTPLayer
from glm5.quant.minmax import fake_quantize
from glm5.quant.record import Grid
from glm5.quantize.source import Layer


def fake_input(x_TI: Tensor, act: Grid | None) -> Tensor:
    """x through the grid of activations and back. The last of a row's groups may be shorter, as in act_quant."""
    if act is None or act.group is None or x_TI.shape[-1] % act.group == 0:
        return fake_quantize(x_TI, act)
    width = x_TI.shape[-1]
    return fake_quantize(F.pad(x_TI, (0, -width % act.group)), act)[..., :width]


class FakeQuantizedLinear(nn.Module):
    """A linear layer whose input is quantized on `act`, and kept in `seen` while that is a list."""

    def __init__(self, weight: Tensor, act: Grid | None) -> None:
        super().__init__()
        self.weight, self.act = weight, act
        self.seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is not None:
            self.seen.append(x.detach())
        return F.linear(fake_input(x, self.act), self.weight)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as it is, for absorbed attention."""
        return self.weight.to(dtype)


class FakeQuantizedExperts(nn.Module):
    """Routed experts of three stacks [E, O, I]; keeps in `seen` which experts tokens went to, and with what weights."""

    def __init__(self, stacks: Mapping[str, Tensor], act: Grid | None, act_down: Grid | None) -> None:
        super().__init__()
        self.gate_EFD, self.up_EFD, self.down_EDF = (stacks[f"{part}_proj"] for part in ("gate", "up", "down"))
        self.act, self.act_down = act, act_down
        self.seen: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x_TD: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        """Sum over the chosen experts of weight * expert(x): [T, D]."""
        if self.seen is not None:
            self.seen.append((weight_TA, expert_TA))
        out_TD = torch.zeros_like(x_TD)
        quantized_TD = fake_input(x_TD, self.act)
        for expert in expert_TA.unique().tolist():
            row_G, choice_G = (expert_TA == expert).nonzero(as_tuple=True)
            y_GD = F.linear(fake_input(self.inner(expert, quantized_TD[row_G]), self.act_down), self.down_EDF[expert])
            out_TD.index_add_(0, row_G, (y_GD * weight_TA[row_G, choice_G, None]).to(out_TD.dtype))
        return out_TD

    def inner(self, expert: int, x_GD: Tensor) -> Tensor:
        """What an expert's down_proj is given: [G, F]."""
        return F.silu(F.linear(x_GD, self.gate_EFD[expert])) * F.linear(x_GD, self.up_EFD[expert])


def build_layer(
    cfg: ModelConfig, layer_idx: int, tensors: Layer, acts: Mapping[str, Grid | None] | None = None
) -> DecoderLayer:
    """The layer with these tensors, all of one dtype and device; `acts`: grids of inputs by module."""
    acts = acts or {}
    with torch.device("meta"):
        layer = MTPLayer(cfg) if layer_idx == cfg.num_hidden_layers else DecoderLayer(cfg, layer_idx)
    if isinstance(layer.mlp, MoE):
        stacks = {part: tensors[f"{STACK}{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")}
        experts = FakeQuantizedExperts(stacks, acts.get(f"{STACK}gate_proj"), acts.get(f"{STACK}down_proj"))
        layer.mlp.experts = experts  # type: ignore[assignment]
    linears = [name for name, module in layer.named_modules() if isinstance(module, Linear)]
    for name in linears:
        parent = layer.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], FakeQuantizedLinear(tensors[f"{name}.weight"], acts.get(name)))
    for name, held in [*layer.named_parameters(), *layer.named_buffers()]:
        parent = layer.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        given = tensors[name]
        assert given.shape == held.shape, f"{name=} {given.shape=} {held.shape=}"
        setattr(parent, leaf, nn.Parameter(given, requires_grad=False) if isinstance(held, nn.Parameter) else given)
    return layer.eval()


def linears_of(layer: DecoderLayer) -> dict[str, FakeQuantizedLinear]:
    """By their names in the layer."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, FakeQuantizedLinear)}


def build_layers(
    cfg: ModelConfig,
    layer_idx: int,
    tensors: Layer,
    devices: Sequence[torch.device],
    acts: Mapping[str, Grid | None] | None = None,
) -> list[DecoderLayer]:
    """The layer on each device; where the tensors lie already, with them."""
    placed = [{name: tensor.to(device) for name, tensor in tensors.items()} for device in devices]
    return [build_layer(cfg, layer_idx, each, acts) for each in placed]


def device_of(layer: DecoderLayer) -> torch.device:
    """Where a layer computes."""
    return layer.input_layernorm.weight.device
