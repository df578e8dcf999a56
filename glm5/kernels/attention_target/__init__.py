"""Target of the indexer's KL loss."""

from typing import Literal

from torch import Tensor

from glm5.kernels.attention_target.reference import head_mean_probs as _reference
from glm5.kernels.attention_target.tiled import head_mean_probs as _tiled
from glm5.kernels.dispatch import unknown_impl


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
    impl: Literal["auto", "reference", "tiled"] = "auto",
) -> Tensor:
    """Mean over heads of the attention probabilities that `sparse_mla` with the same arguments used; no gradient.

    `lse_TH` is what sparse_mla returned. Gives [T, K] aligned with `keys_TK` (0 where a key is -1 or >= end_T), or
    [T, S] where `keys_TK` is None; float32 (float64 for float64). Rows sum to 1, padding rows to 0.
    """
    if impl in ("auto", "tiled"):
        run = _tiled
    elif impl == "reference":
        run = _reference
    else:
        raise unknown_impl("head_mean_probs", impl, ("reference", "tiled"))
    return run(q_THL, latent_PZL, keys_TK, lse_TH, page_table_BN, row_T, end_T, scale=scale)
