"""Log-probability of one token per position, straight from hidden states: projection and log-softmax.

    logits[t]   = hidden[t] W^T                       in the model's dtype, as the head gives them
    logprob[t]  = logits[t, target[t]] - logsumexp(logits[t])      in float32

This file is the definition; it holds all logits, and their gradient, at once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def token_logprobs(hidden_TD: Tensor, weight_WD: Tensor, target_T: Tensor, _chunk: int = 0) -> Tensor:
    """[T] in float32 (float64 for float64)."""
    logits_TW = F.linear(hidden_TD, weight_WD)
    wide = torch.promote_types(logits_TW.dtype, torch.float32)
    return logits_TW.log_softmax(dim=-1, dtype=wide).gather(1, target_T.long().unsqueeze(1)).squeeze(1)
