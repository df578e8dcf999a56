"""Target of the indexer's KL loss."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(
    __name__,
    tiled=Impl("probabilities exist for a tile of queries at a time"),
    reference=Impl("the definition"),
)


def head_mean_probs(
    q_THL: Tensor,
    latent_PZL: Tensor,
    keys_TK: Tensor | None,
    lse_TH: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    scale: float,
    impl: str = "auto",
) -> Tensor:
    """Mean over heads of the attention probabilities that `sparse_mla` with the same arguments used; no gradient.

    `lse_TH` is what sparse_mla returned. Gives [T, K] aligned with `keys_TK` (0 where a key is -1 or >= end_T), or
    [T, S] where `keys_TK` is None; float32 (float64 for float64). Rows sum to 1, padding rows to 0.
    """
    run = TABLE.module(impl, q_THL).head_mean_probs
    return run(q_THL, latent_PZL, keys_TK, lse_TH, page_table_BN, row_T, end_T, scale=scale)
