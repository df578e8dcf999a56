"""What a decoding step comes to: which drawn tokens stand, and everything that is written down for it."""

from typing import Literal

from torch import Tensor

from glm5.kernels.commit_tokens.reference import CommittedTokens
from glm5.kernels.dispatch import Impl, Table

__all__ = ["CommittedTokens", "commit_tokens"]


TABLE = Table(
    __name__,
    triton=Impl("one launch, which a CUDA graph can hold", on="triton", gradient=False),
    reference=Impl("the definition"),
)


def commit_tokens(
    token_R: Tensor,
    slot_R: Tensor,
    offset_R: Tensor,
    position_R: Tensor,
    draft_SK: Tensor,
    slot_C: Tensor,
    token_SN: Tensor,
    len_S: Tensor,
    committed: CommittedTokens,
    *,
    impl: Literal["auto", "reference", "triton"] = "auto",
) -> None:
    """Row r drew `token_R[r]` for `position_R[r]` of the sequence in slot `slot_R[r]`, assuming `offset_R[r]` drafts.

    A sequence gains the tokens drawn up to the first draft, of `draft_SK`, that is not the token drawn in its place.
    Writes what was drawn to `token_SN`, adds what was gained to `len_S`, and fills `committed` for the slots `slot_C`.
    The last slot is padding's, and gains nothing. All int64, pieces of `committed` contiguous.
    """
    where = token_R, slot_R, offset_R, position_R, draft_SK, slot_C, token_SN, len_S, committed
    TABLE.module(impl, token_R).commit_tokens(*where)
