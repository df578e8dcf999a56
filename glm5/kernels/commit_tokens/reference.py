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
    token_T: Tensor,
    slot_T: Tensor,
    offset_T: Tensor,
    position_T: Tensor,
    draft_SK: Tensor,
    slot_C: Tensor,
    token_SN: Tensor,
    len_S: Tensor,
    committed: CommittedTokens,
) -> None:
    num_slots, depth = draft_SK.shape
    token_SJ = token_T.new_zeros(num_slots, depth + 1)
    alive_SJ = torch.zeros(num_slots, depth + 1, dtype=torch.bool, device=token_T.device)
    token_SJ[slot_T, offset_T] = token_T
    alive_SJ[slot_T, offset_T] = torch.ones_like(slot_T, dtype=torch.bool)
    alive_SJ[:, 1:] &= token_SJ[:, :-1] == draft_SK
    alive_SJ[-1:] &= torch.zeros_like(alive_SJ[-1:])
    count_S = alive_SJ.int().cumprod(dim=1).sum(dim=1)
    token_SN[slot_T, position_T] = token_T
    len_S += count_S
    for part, now in zip(committed, (token_SJ[slot_C], count_S[slot_C], draft_SK[slot_C]), strict=True):
        part.copy_(now)
