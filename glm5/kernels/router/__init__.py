"""Expert routing."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.router.invariant import router as _invariant
from glm5.kernels.router.reference import router as _reference
from glm5.kernels.triton_support import chosen


def router(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    impl: Literal["auto", "reference", "invariant", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(weight [T, A] float32, expert [T, A] int32, ascending) of the A = top_k experts of each token (model spec 3.6).

    Differentiable in x and weight through the chosen sigmoid scores; the choice itself and the bias get no gradient.
    `invariant`: for one T, a row's result does not depend on the others, bit for bit; no gradient at all. `triton`: no
    gradient, one group, and a score that is no number counts as the lowest. Raises ValueError where groups and experts
    do not fit each other.
    """
    num_experts = weight_ED.shape[0]
    per_group = num_experts // n_group
    if num_experts % n_group or not 1 <= topk_group <= n_group or (n_group > 1 and per_group < 2):
        raise ValueError(
            f"router: got {num_experts} experts, {n_group=}, {topk_group=}; n_group must divide the experts into "
            "groups of at least 2, and topk_group lie between 1 and n_group"
        )
    if not 1 <= top_k <= per_group * topk_group:
        raise ValueError(
            f"router: got {top_k=}, but {topk_group} groups of {per_group} experts allow 1 to {per_group * topk_group}"
        )
    # Also for `invariant`: Triton's tiling follows from T alone.
    if impl in ("auto", "invariant") and n_group == 1 and top_k <= 32 and chosen(x_TD, weight_ED, bias_E):
        impl = "triton"
    if impl in ("auto", "reference"):
        run = _reference
    elif impl == "triton":
        from glm5.kernels.router.triton import router as run
    elif impl == "invariant":
        run = _invariant
    else:
        raise unknown_impl("router", impl, ("reference", "invariant", "triton"))
    return run(
        x_TD,
        weight_ED,
        bias_E,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling_factor=scaling_factor,
    )
