"""gained[s] = 1 + number of drafts before the first that was not drawn; 0 for slots without rows."""

from typing import NamedTuple

import torch
from torch import Tensor


class CommittedTokens(NamedTuple):
    """Of the slots asked after: tokens drawn [C, 1 + K], how many of them count [C], the drafts they assumed [C, K]."""

    token_CJ: Tensor
    count_C: Tensor
    draft_CK: Tensor


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
) -> None:
    num_slots, depth = draft_SK.shape
    token_SJ = token_R.new_zeros(num_slots, depth + 1)
    alive_SJ = torch.zeros(num_slots, depth + 1, dtype=torch.bool, device=token_R.device)
    token_SJ[slot_R, offset_R] = token_R
    alive_SJ[slot_R, offset_R] = torch.ones_like(slot_R, dtype=torch.bool)
    alive_SJ[:, 1:] &= token_SJ[:, :-1] == draft_SK
    alive_SJ[-1:] &= torch.zeros_like(alive_SJ[-1:])
    count_S = alive_SJ.int().cumprod(dim=1).sum(dim=1)
    token_SN[slot_R, position_R] = token_R
    len_S += count_S
    for part, now in zip(committed, (token_SJ[slot_C], count_S[slot_C], draft_SK[slot_C]), strict=True):
        part.copy_(now)
