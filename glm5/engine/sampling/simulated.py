"""Drafts accepted as often as a benchmark asks, whatever the model says: answers are worth nothing.

A model with random weights accepts none of its drafts, so the speed of drafting could not be measured with one. Each
draft is accepted with one probability, given that those before it are, so that a step of k drafts gains on average

    mean = 1 + p + p^2 + ... + p^k        (the 1: the token that needs no draft)

Whether one is accepted is a hash of its sequence's slot and its position: the same on every rank and in every replay
of a CUDA graph.
"""

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.engine.sampling.edits import Rows
from glm5.engine.sampling.noise import mix

_BITS = 31


def probability_of(mean: float, depth: int) -> float:
    """p of the formula above. Raises ConfigError for a mean that `depth` drafts cannot have."""
    if not depth:
        raise ConfigError(
            f"simulate_acceptance: got {mean:g}, but nothing is drafted here; allowed with the MTP layer and "
            "num_speculative_tokens of at least 1"
        )
    if not 1 <= mean <= 1 + depth:
        raise ConfigError(
            f"simulate_acceptance: got {mean:g} tokens a step; allowed with {depth} drafts: 1 to {1 + depth}"
        )
    minimum, maximum = 0.0, 1.0
    for _ in range(60):
        middle = (minimum + maximum) / 2
        minimum, maximum = (middle, maximum) if sum(middle**k for k in range(depth + 1)) < mean else (minimum, middle)
    return maximum


def simulated(token_T: Tensor, rows: Rows, drafts_Y: Tensor, probability: float) -> Tensor:
    """What `rows` draw, int64 [T]: where a row of the same sequence follows, which assumes a draft, that draft or any
    other token; else `token_T`."""
    slot_T, offset_T = rows.slot_T, rows.offset_T
    draft_T = drafts_Y[slot_T, offset_T.clamp_max(drafts_Y.shape[1] - 1)]
    key_T = mix(mix(slot_T) + rows.position_T)
    is_accepted_T = (key_T >> (64 - 1 - _BITS)) & ((1 << _BITS) - 1) < round(probability * (1 << _BITS))
    other_T = torch.where(token_T == draft_T, torch.where(draft_T > 0, draft_T - 1, draft_T + 1), token_T)
    is_followed_T = torch.zeros_like(is_accepted_T)
    is_followed_T[:-1] = (slot_T[1:] == slot_T[:-1]) & (offset_T[1:] == offset_T[:-1] + 1)
    return torch.where(is_followed_T, torch.where(is_accepted_T, draft_T, other_T), token_T)
