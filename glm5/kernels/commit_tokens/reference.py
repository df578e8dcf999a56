"""gained[s] = 1 + number of drafts before the first that differs from the drawn token; 0 for slots without rows."""

from typing import NamedTuple

import torch
from torch import Tensor


class CommittedTokens(NamedTuple):
    """For the sampling slots, with n drafts: drawn tokens [B, 1 + n], the number accepted [B], the drafts [B, n]."""

    tokens_B: Tensor
    count_B: Tensor
    drafts_B: Tensor


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
) -> None:
    num_slots, depth = drafts_Y.shape
    tokens_Y = token_T.new_zeros(num_slots, depth + 1)
    accepted_Y = torch.zeros(num_slots, depth + 1, dtype=torch.bool, device=token_T.device)
    tokens_Y[slot_T, offset_T] = token_T
    accepted_Y[slot_T, offset_T] = torch.ones_like(slot_T, dtype=torch.bool)
    accepted_Y[:, 1:] &= tokens_Y[:, :-1] == drafts_Y
    accepted_Y[-1:] &= torch.zeros_like(accepted_Y[-1:])
    count_Y = accepted_Y.int().cumprod(dim=1).sum(dim=1)
    token_YS[slot_T, position_T] = token_T
    len_Y += count_Y
    for part, now in zip(
        committed, (tokens_Y[sampling_slot_B], count_Y[sampling_slot_B], drafts_Y[sampling_slot_B]), strict=True
    ):
        part.copy_(now)
