"""The indexer's loss: KL from the attention of the layers that it selects for."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.index_kl.reference import Served

TABLE = Table(
    __name__,
    triton=Impl("tiles on a GPU", on="triton", when=lambda q_TJI: q_TJI.element_size() == 2),
    streamed=Impl("nothing of size T x S exists"),
    reference=Impl("the definition"),
)


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
    impl: str = "auto",
) -> Tensor:
    """Sum over queries of KL( mean attention of the served layers || softmax of the index scores ), a scalar.

    `served`: (queries, latents, lse) of each layer that attended to the selection, as `sparse_mla` took and returned
    them; no gradient reaches them. q, key, w and `index_scale` are `index_score`'s. Over `keys_TK`, or, where it is
    None, over every visible key. `streamed` never holds anything of size T x S.
    `triton`: the same on a GPU, up to float32; without `keys_TK` the queries must be all tokens of their sequences, in
    order, as those of a training pass are.
    """
    run = TABLE.module(impl, q_TJI).index_kl
    where = (page_table_BN, row_T, end_T)
    return run(q_TJI, key_PZI, w_TJ, served, keys_TK, *where, index_scale=index_scale, scale=scale)


__all__ = ["Served", "index_kl"]
