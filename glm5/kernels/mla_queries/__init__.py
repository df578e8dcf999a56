"""What stands between the products that make queries and the kernels that use them: absorption and rotation."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    triton=Impl("absorption and rotation in one launch", on="triton"),
    reference=Impl("the definition"),
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

    cos and sin as in `rope`. `triton`: on a GPU. No gradient passes.

    `early`: room for the result, which may then be made while the kernel before this one runs. That one has nothing to
    do with what this one reads and writes, waited for those before it, and was launched when `early` was there.
    """
    return TABLE.module(impl, q_THX).mla_queries(q_THX, w_HNC, cos_TR2, sin_TR2, early=early)
