"""The routed experts' sum with a fixed number of rows per matmul, so that a row's result depends on no other row.

An expert's rows are split into tiles of `tile_rows`, the last one padded with zeros. Rounding and order of the sum are
the reference's. Forward only. Padding rows, whose experts are all -1, get any finite values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import forward_only
from glm5.kernels.grouped_experts.reference import unstack
from glm5.kernels.grouped_experts.shared import SharedExpert, linear
from glm5.kernels.invariant import silu, tile_rows
from glm5.kernels.row_codes import Quantized


@forward_only("grouped_experts[invariant]")
def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    _quantized: Quantized | None = None,
) -> Tensor:
    """[T, D] in x's dtype. Experts that no token chose are not touched."""
    if not len(x_TD):
        return torch.zeros_like(x_TD)
    expert_TA, column_TA = expert_TA.long().clamp_min(0).sort(dim=-1, stable=True)
    weight_TA = weight_TA.gather(1, column_TA)
    gate_ups, downs = unstack(gate_up_proj), unstack(down_proj)
    num_rows = tile_rows(x_TD.device)
    place_G, experts = _tiles(expert_TA.flatten(), len(gate_ups), num_rows)

    x_UD = x_TD.new_zeros(len(experts) * num_rows, x_TD.shape[1])
    x_UD.index_copy_(0, place_G, x_TD.repeat_interleave(expert_TA.shape[1], dim=0))
    if isinstance(gate_up_proj, BlockScaled):
        gate_UF, up_UF = (_project(x_UD, unstack(half), experts) for half in gate_up_proj.split_gate_up())
    else:
        gate_UF, up_UF = _project(x_UD, gate_ups, experts).chunk(2, dim=-1)
    y_UD = _project(silu(gate_UF) * up_UF, downs, experts)
    y_TAD = y_UD.index_select(0, place_G).unflatten(0, expert_TA.shape)
    outputs = (y_TAD * weight_TA[..., None]).to(x_TD.dtype).unbind(1)
    out_TD = sum(outputs[1:], start=outputs[0])
    return out_TD if shared is None else out_TD + shared(x_TD)


def _tiles(expert_G: Tensor, num_experts: int, num_rows: int) -> tuple[Tensor, list[int]]:
    """Where each (token, choice) pair goes among the rows of all tiles, [G], and the expert of each tile."""
    order_G = expert_G.argsort(stable=True)
    count_E = expert_G.bincount(minlength=num_experts)
    num_tiles_E = (count_E + num_rows - 1) // num_rows
    moved_E = (num_tiles_E * num_rows - count_E).cumsum(0) - (num_tiles_E * num_rows - count_E)  # by filling before
    place_G = torch.arange(len(expert_G), device=expert_G.device) + moved_E[expert_G[order_G]]
    experts = [expert for expert, count in enumerate(num_tiles_E.tolist()) for _ in range(count)]
    return torch.empty_like(order_G).scatter_(0, order_G, place_G), experts


def _project(x_UI: Tensor, weights: Sequence[Tensor] | Sequence[BlockScaled], experts: list[int]) -> Tensor:
    """Each tile of rows times the transpose of its expert's weight, [U, O]."""
    tiles = zip(x_UI.split(tile_rows(x_UI.device)), (weights[expert] for expert in experts), strict=True)
    return torch.cat([linear(x, w) for x, w in tiles])
