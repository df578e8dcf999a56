"""The routed experts' sum over plain weights on a GPU, where a row's result depends on no other row, without host
synchronization: rows are sorted by expert, each expert's padded to whole tiles of row_linear's products.

Outputs are rounded to x's dtype and summed in float32, in the order of experts; the shared expert is added last.
"""

import torch
from torch import Tensor

from glm5.kernels.grouped_experts.shared import SharedExpert
from glm5.kernels.row_linear.triton import TILE, products
from glm5.kernels.swiglu import swiglu
from glm5.kernels.weighted_rows import weighted_rows


def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None,
) -> Tensor:
    """[T, D] in x's dtype; rows whose experts are all -1 get zeros."""
    slot_TA, token_G, expert_N = _slots(expert_TA, len(down_proj))
    hidden_GF = swiglu(products(x_TD, gate_up_proj, expert_N, token_G), impl="triton")
    out_TD = weighted_rows(products(hidden_GF, down_proj, expert_N), slot_TA, weight_TA)
    if shared is not None:
        gate_up_TF = torch.cat([products(x_TD, _plain(weight)) for weight in (shared.gate, shared.up)], dim=-1)
        out_TD += products(swiglu(gate_up_TF, impl="triton"), _plain(shared.down))
    return out_TD.masked_fill_(expert_TA[:, :1] < 0, 0.0)


def _plain(weight: object) -> Tensor:
    assert isinstance(weight, Tensor), f"{type(weight)=}"
    return weight


def _slots(expert_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The slot of each (token, choice) pair; the token of each slot; the expert of each tile, -1 where there is none.
    Sizes follow from shapes alone."""
    device, num_chosen = expert_TA.device, expert_TA.shape[1]
    expert_G = torch.where(expert_TA < 0, num_experts, expert_TA).flatten().long()  # padding comes last
    num_pairs = len(expert_G)
    order_G = expert_G.argsort(stable=True)
    count_E = torch.zeros(num_experts + 1, dtype=torch.long, device=device)
    count_E.index_add_(0, expert_G, torch.ones_like(expert_G))
    filled_E = (count_E + TILE - 1) // TILE * TILE
    end_E = filled_E.cumsum(0)
    moved_E = (end_E - filled_E) - (count_E.cumsum(0) - count_E)
    place_G = torch.arange(num_pairs, device=device) + moved_E[expert_G[order_G]]
    num_tiles = -(-(num_pairs + (num_experts + 1) * (TILE - 1)) // TILE)
    slot_TA = torch.empty_like(order_G).scatter_(0, order_G, place_G).view(expert_TA.shape)
    token_G = torch.zeros(num_tiles * TILE, dtype=torch.long, device=device)
    token_G.scatter_(0, place_G, order_G // num_chosen)
    first_N = torch.arange(num_tiles, device=device) * TILE
    expert_N = torch.searchsorted(end_E, first_N, right=True)
    return slot_TA, token_G, torch.where(expert_N < num_experts, expert_N, -1).int()
