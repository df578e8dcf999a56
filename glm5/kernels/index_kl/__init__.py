"""The indexer's loss: KL from the attention of the layers that it selects for."""

from typing import Literal

from torch import Tensor

from glm5.kernels.dispatch import unknown_impl
from glm5.kernels.index_kl.reference import Served
from glm5.kernels.index_kl.reference import index_kl as _reference
from glm5.kernels.index_kl.streamed import index_kl as _streamed
from glm5.kernels.triton_support import runs_on


def index_kl(
    q_TJI: Tensor,
    key_PZI: Tensor,
    w_TJ: Tensor,
    served: list[Served],
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    index_scale: float,
    scale: float,
    impl: Literal["auto", "reference", "streamed", "triton"] = "auto",
) -> Tensor:
    """Sum over queries of KL( mean attention of the served layers || softmax of the index scores ), a scalar.

    `served`: (queries, latents, lse) of each layer that attended to the selection, as `sparse_mla` took and returned
    them; no gradient reaches them. q, key, w and `index_scale` are `index_score`'s. Over `keys_TK`, or, where it is
    None, over every visible key. `streamed` never holds anything of size T x S.
    `triton`: the same on a GPU, up to float32; without `keys_TK` the queries must be all tokens of their sequences, in
    order, as those of a training pass are.
    """
    if impl == "auto":
        impl = "triton" if runs_on(q_TJI) and q_TJI.element_size() == 2 else "streamed"
    if impl == "triton":
        from glm5.kernels.index_kl.triton import index_kl as run
    elif impl == "streamed":
        run = _streamed
    elif impl == "reference":
        run = _reference
    else:
        raise unknown_impl("index_kl", impl, ("reference", "streamed", "triton"))
    where = (page_table_BN, row_T, end_T)
    return run(q_TJI, key_PZI, w_TJ, served, keys_TK, *where, index_scale=index_scale, scale=scale)


__all__ = ["Served", "index_kl"]
