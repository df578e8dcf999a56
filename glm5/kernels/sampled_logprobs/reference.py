"""Log-probability of one token per position under the sampler's distribution, and the entropy of that distribution.

    z[t]        = hidden[t] W^T / temperature[t]      logits in the model's dtype, the rest in float32
                  -inf for tokens that are not in the row's kept vocabulary
    logprob[t]  = z[t, target[t]] - logsumexp(z[t])
    entropy[t]  = - sum_v p[t, v] log p[t, v]         p = softmax(z[t])

The order of operations is the engine's (engine/sampling/draw.py). This file is the definition; it holds all logits, and
their gradient, at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.kernels.sampled_logprobs.kept import Kept

Head = Callable[[Tensor], Tensor]


def sampled_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    kept: Kept | None,
    _chunk: int = 0,
    head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """([T], [T]) in float32 (float64 for float64)."""
    logprob_TW, dropped_TW = log_distribution(hidden_TD, weight_WD, temperature_T, kept, head)
    chosen_T = logprob_TW.gather(1, target_T.long().unsqueeze(1)).squeeze(1)
    return chosen_T, entropy(logprob_TW, dropped_TW)


def log_distribution(
    hidden_TD: Tensor, weight_WD: Tensor, temperature_T: Tensor, kept: Kept | None, head: Head | None
) -> tuple[Tensor, Tensor | None]:
    """(log p [T, W], mask of the tokens that are not kept or None)."""
    logits_TW = F.linear(hidden_TD, weight_WD) if head is None else head(hidden_TD)
    wide = torch.promote_types(logits_TW.dtype, torch.float32)
    z_TW = logits_TW.to(wide) / divisor(temperature_T, wide)[:, None]
    dropped_TW = None if kept is None else kept.dropped(weight_WD.shape[0])
    if dropped_TW is not None:
        z_TW = z_TW.masked_fill(dropped_TW, -torch.inf)
    return z_TW.log_softmax(dim=-1), dropped_TW


def entropy(logprob_TW: Tensor, dropped_TW: Tensor | None) -> Tensor:
    finite_TW = logprob_TW if dropped_TW is None else logprob_TW.masked_fill(dropped_TW, 0.0)
    return -(logprob_TW.exp() * finite_TW).sum(dim=-1)


def divisor(temperature_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What logits are divided by: nothing where a row is greedy."""
    return torch.where(temperature_T == 0, 1.0, temperature_T).to(dtype)
