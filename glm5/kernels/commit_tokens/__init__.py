"""The end of a decoding step: which drawn tokens are accepted, and the update of the slots."""

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
    token_T: Tensor,
    slot_T: Tensor,
    offset_T: Tensor,
    position_T: Tensor,
    drafts_Y: Tensor,
    sampling_slot_B: Tensor,
    token_YS: Tensor,
    len_Y: Tensor,
    committed: CommittedTokens,
    *,
    impl: str = "auto",
) -> None:
    """Row t drew `token_T[t]` for `position_T[t]` of the sequence in slot `slot_T[t]`, after `offset_T[t]` drafts.

    A sequence gains the drawn tokens up to and including the first that differs from its draft in `drafts_Y`. Writes
    drawn tokens to `token_YS`, adds the gains to `len_Y`, and fills `committed` for `sampling_slot_B`. The last slot is
    for padding and gains nothing. All tensors are int64; those of `committed` are contiguous.
    """
    where = token_T, slot_T, offset_T, position_T, drafts_Y, sampling_slot_B, token_YS, len_Y, committed
    TABLE.module(impl, token_T).commit_tokens(*where)
