"""The routed experts' sum on a GPU, where a row's result depends on no other row. Over block-scaled weights: Triton's
`tiles` kernels with one fixed tiling. They quantize rows, and sum outputs in float32, in expert order, the shared
expert last. Over plain weights: triton_plain.py. Padding rows, whose experts are all -1, get zeros."""

import torch
from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import forward_only
from glm5.kernels.grouped_experts import triton, triton_plain
from glm5.kernels.grouped_experts.shared import SharedExpert
from glm5.kernels.row_codes import Quantized

_TILING = triton.Tiling("tiles", 128, 8, 128, 8, down_tiles=8, up_stages=5, block_t=16)


@forward_only("grouped_experts[invariant_triton]")
def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    shared: SharedExpert | None = None,
    _quantized: Quantized | None = None,
) -> Tensor:
    """[T, D] in x's dtype."""
    if not len(x_TD):
        return torch.zeros_like(x_TD)
    if isinstance(gate_up_proj, Tensor) and isinstance(down_proj, Tensor):
        return triton_plain.grouped_experts(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA, shared)
    given = x_TD, gate_up_proj, down_proj, weight_TA, expert_TA.int()
    return triton.grouped_experts(*given, shared, tiling=_TILING).masked_fill_(expert_TA[:, :1] < 0, 0.0)
