"""The routed experts' sum (model spec 3.6), expert by expert, with quantized weights:

    out[t] = sum over t's experts e, in index order:  ( down_e( silu(gate_e x_t) * up_e x_t ) * weight[t, e] ).to(dtype)

Invariant: an expert's rows are split into tiles of `tile_rows`, the last one padded with zeros, so that products of
unquantized rows have fixed shapes, too.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.invariant import silu, tile_rows
from glm5.kernels.quantized_linear.reference import quantized_linear
from glm5.kernels.quantized_weight import QuantizedWeight


def quantized_experts(
    x_TD: Tensor,
    gate_up_proj: QuantizedWeight,
    down_proj: QuantizedWeight,
    weight_TA: Tensor,
    expert_TA: Tensor,
    *,
    invariant: bool,
) -> Tensor:
    """[T, D] in x's dtype. Experts that no token chose are not touched."""
    gate_up_proj.check()
    expert_TA, column_TA = expert_TA.long().sort(dim=-1, stable=True)
    weight_TA = weight_TA.gather(1, column_TA)
    outputs_TAD = x_TD.new_zeros(*expert_TA.shape, x_TD.shape[1])
    for expert in expert_TA.unique().tolist():
        row_G, choice_G = (expert_TA == expert).nonzero(as_tuple=True)
        y_GD = _expert(x_TD[row_G], gate_up_proj.of(expert), down_proj.of(expert), invariant=invariant)
        outputs_TAD[row_G, choice_G] = (y_GD * weight_TA[row_G, choice_G, None]).to(x_TD.dtype)
    outputs = outputs_TAD.unbind(1)
    return sum(outputs[1:], start=outputs[0])


def _expert(x_GD: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, *, invariant: bool) -> Tensor:
    if not invariant:
        gate_GF, up_GF = quantized_linear(x_GD, gate_up).chunk(2, dim=-1)
        return quantized_linear(F.silu(gate_GF) * up_GF, down)
    num_rows, size = len(x_GD), tile_rows(x_GD.device)
    tiles: list[Tensor] = []
    for x_RD in F.pad(x_GD, (0, 0, 0, -num_rows % size)).split(size):
        gate_RF, up_RF = quantized_linear(x_RD, gate_up).chunk(2, dim=-1)
        tiles.append(quantized_linear(silu(gate_RF) * up_RF, down))
    return torch.cat(tiles)[:num_rows]
