"""The router by Triton's kernels under the tiling for the rows of a pass, however many there are."""

from typing import Any

from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.dispatch import forward_only
from glm5.kernels.invariant import PASS_ROWS_GPU
from glm5.kernels.router import triton


@forward_only("router[invariant_triton]")
def router(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, **choice: Any) -> tuple[Tensor, Tensor]:
    """As `reference.router`; a row's result depends on no other."""
    num_experts, width = weight_ED.shape
    tiling = tuned.find(triton.Tiling, "router", f"E={num_experts} D={width}", PASS_ROWS_GPU, x_TD.device)
    return triton.router(x_TD, weight_ED, bias_E, **choice, tiling=tiling or triton.tiling_for(PASS_ROWS_GPU))
