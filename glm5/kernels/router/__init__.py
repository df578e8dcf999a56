"""Expert routing."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.router.reference import replay

__all__ = ["MAX_CHOICES", "replay", "router"]

MAX_CHOICES = 32  # of the Triton kernel

TABLE = Table(
    __name__,
    triton=Impl(
        "two launches, of one group of experts",
        on="triton",
        when=lambda *given: given[3] == 1 and given[4] <= MAX_CHOICES,
        gradient=False,
    ),
    reference=Impl("the definition"),
    invariant=Impl("a sigmoid that computes all elements alike"),
    invariant_triton=Impl("the same kernels under one tiling", on="triton", module="triton_invariant"),
)


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
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(weight [T, A] float32, expert [T, A] int32, ascending) of the A = top_k experts of each token (model spec 3.6).

    Differentiable in x and weight through the chosen sigmoid scores; the choice itself and the bias get no gradient.
    `invariant`: for one T, a row's result does not depend on the others, bit for bit; `invariant_triton`, on a GPU: for
    any T; no gradient at all. `triton`: no gradient, one group, and a NaN score counts as the lowest. Raises ValueError
    if groups and experts do not match.
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
    return TABLE.module(impl, x_TD, weight_ED, bias_E, n_group, top_k).router(
        x_TD,
        weight_ED,
        bias_E,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling_factor=scaling_factor,
    )
