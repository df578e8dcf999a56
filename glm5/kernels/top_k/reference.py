"""The k best keys of each row, by a total order: larger score first, then smaller index.

torch.topk picks an unspecified member of a tie, and the pick depends on the row's length: prefill and decode of one
model would then read different keys. So its choice is kept only for rows without a tie at the threshold.
"""

import torch
from torch import Tensor


def top_k(score_TS: Tensor, k: int) -> Tensor:
    """Indices int32 [T, k], ascending, then -1 where fewer than k scores are above -inf."""
    num_keys = score_TS.shape[1]
    score_TS = score_TS.detach()
    taken = min(k, num_keys)
    # One more than requested shows whether the threshold is shared by a key that was left out.
    best, keys = score_TS.topk(min(k + 1, num_keys), dim=-1)
    if num_keys > k:
        tied_T = (best[:, k - 1] == best[:, k]) & (best[:, k] != float("-inf"))
        if tied_T.any():
            order = score_TS[tied_T].sort(dim=-1, descending=True, stable=True)
            best[tied_T], keys[tied_T] = order.values[:, : k + 1], order.indices[:, : k + 1]
    keys_TK = keys[:, :taken].int().masked_fill_(best[:, :taken] == float("-inf"), num_keys).sort(dim=-1).values
    keys_TK = torch.nn.functional.pad(keys_TK, (0, k - taken), value=num_keys)
    return keys_TK.masked_fill_(keys_TK == num_keys, -1)
