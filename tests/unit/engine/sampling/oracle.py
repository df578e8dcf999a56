"""What a sampler should do, token by token in float64, and how to tell draws that do it from draws that do not."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from glm5.engine.sampling import Placement, Rows

# Chi-square's 1 - 1e-6 quantile, by Wilson and Hilferty: a right sampler with a fixed seed stays far below.
Z_QUANTILE = 4.75


def edited(logits: np.ndarray, placement: Placement, drafts: Sequence[int] = ()) -> np.ndarray:
    """Logits of the token after `placement.output_ids` and `drafts`, by vLLM's definitions."""
    params, written = placement.params, [*placement.output_ids, *drafts]
    z = logits.astype(np.float64)
    barred = set()
    if params.allowed_token_ids is not None:
        barred |= set(range(len(z))) - set(params.allowed_token_ids)
    for word in placement.bad_words:
        head = list(word[:-1])
        if not head or written[-len(head) :] == head:
            barred.add(word[-1])
    if len(written) < params.min_tokens:
        barred |= set(placement.stop_ids)
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in range(len(z)):
        count = written.count(token)
        if count or token in placement.prompt_ids:
            z[token] *= 1 / params.repetition_penalty if z[token] > 0 else params.repetition_penalty
        z[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    z[list(barred)] = -np.inf
    return z


def distribution(logits: np.ndarray, placement: Placement, drafts: Sequence[int] = ()) -> np.ndarray:
    """Probabilities of the next token."""
    params, z = placement.params, edited(logits, placement, drafts) / placement.params.temperature
    probs = np.exp(z - z.max())
    probs[probs < params.min_p * probs.max()] = 0.0
    order = sorted(range(len(z)), key=lambda w: (-probs[w], w))
    for w in order[params.top_k if params.top_k > 0 else len(z) :]:
        probs[w] = 0.0
    probs /= probs.sum()
    mass = 0.0
    for w in order:
        if mass >= params.top_p:
            probs[w] = 0.0
        mass += probs[w]
    return probs / probs.sum()


def chi_square_excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic over its limit: above 1 the counts are not of `probs`. Rare tokens are pooled."""
    expected = probs * counts.sum()
    rare = expected < 10
    observed, expected = [
        np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (counts.astype(float), expected)
    ]
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(len(expected) - 1, 1)
    limit = degrees * (1 - 2 / (9 * degrees) + Z_QUANTILE * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((observed - expected) ** 2 / expected).sum() / limit)


def rows_of(slots: Sequence[int], positions: Sequence[int], offsets: Sequence[int] | None = None) -> Rows:
    slot_T = torch.tensor(slots, dtype=torch.int64)
    offsets = [0] * len(slots) if offsets is None else offsets
    return Rows(slot_T.numpy().copy(), slot_T, torch.tensor(positions), torch.tensor(offsets))
