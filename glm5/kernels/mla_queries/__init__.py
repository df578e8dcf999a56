"""Absorption and rotation of queries, between their projection and attention."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    triton=Impl("absorption and rotation in one launch", on="triton"),
    reference=Impl("the definition"),
    invariant_triton=Impl("the same kernel under one tiling", on="triton", module="triton_invariant"),
)


def mla_queries(
    q_THX: Tensor,
    w_HNC: Tensor,
    cos_TR2: Tensor,
    sin_TR2: Tensor,
    *,
    early: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Queries [T, H, N + R] absorbed into latents, [T, H, C + R]: the first N dimensions by `w_HNC`, the rest rotated.

    cos and sin as in `rope`. `triton`: on a GPU; `invariant_triton`: a row's result
    does not depend on the others. No gradient passes.

    `early`: a buffer for the result, which is then computed while the previous kernel runs. That kernel must not touch
    inputs or result, must wait for earlier kernels, and must be launched after `early` was allocated.
    """
    return TABLE.module(impl, q_THX).mla_queries(q_THX, w_HNC, cos_TR2, sin_TR2, early=early)
