"""The sum over a token's routed experts."""

from typing import Literal

from torch import Tensor

from glm5.kernels.block_scaled import BlockScaled
from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.grouped_experts.reference import grouped_experts as _reference


def grouped_experts(
    x_TD: Tensor,
    gate_up_proj: Tensor | BlockScaled,
    down_proj: Tensor | BlockScaled,
    weight_TA: Tensor,
    expert_TA: Tensor,
    *,
    impl: Literal["auto", "reference"] = "auto",
) -> Tensor:
    """out[t] = sum over experts e of t: down_e(silu(gate_e x) * up_e x) * weight[t, e], [T, D] in x's dtype.

    `gate_up_proj` [E, 2F, D] holds gate rows first, `down_proj` [E, D, F]; either may be BlockScaled (then through
    fp8_linear, no gradient; the gate_up scale has 2 * ceil(F/128) rows, gate's first). Each term is rounded to x's
    dtype and summed in it, in expert order (model spec 3.6). Differentiable in x, both weights and weight_TA.
    """
    if impl in ("auto", "reference"):
        return _reference(x_TD, gate_up_proj, down_proj, weight_TA, expert_TA)
    raise unknown_impl("grouped_experts", impl, ("reference",))
