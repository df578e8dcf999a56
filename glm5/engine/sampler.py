"""Next tokens from logits: each request by its own rules, none by who shares the batch.

    z     = (logits - max) / temperature
    keep  = z >= log(min_p), then the top_k largest, then the shortest head of those with mass >= top_p
    token = argmax over kept w of  z[w] - log(e[w]),   e[w] ~ Exp(1) hashed from (seed, position, w)

The argmax is an exact draw from softmax(z) (exponential race). The noise is a hash, not a generator's state,
so a token depends on seed and position alone. Equal values rank by smaller token id. float32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.engine.outputs import Logprob
from glm5.engine.params import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Draw:
    """What to sample one row of logits with. `forbidden` tokens are never drawn."""

    params: SamplingParams
    seed: int
    position: int
    forbidden: Sequence[int] = ()


def sample(logits_BW: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row, row b by `draws[b]`."""
    assert len(logits_BW) == len(draws), f"{len(logits_BW)=} {len(draws)=}"
    logits_BW = logits_BW.float()
    if any(draw.forbidden for draw in draws):
        logits_BW = logits_BW.clone()
        for row, draw in enumerate(draws):
            logits_BW[row, list(draw.forbidden)] = -torch.inf
    tokens_B = logits_BW.argmax(dim=-1)
    rows = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if rows:
        chosen = logits_BW if len(rows) == len(draws) else logits_BW[rows]
        tokens_B[rows] = _race(chosen, [draws[row] for row in rows])
    return tokens_B.tolist()


def logprobs_of(logits_BW: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """Log probability under the plain softmax of each row's token, then of its `counts[b]` likeliest tokens."""
    logprob_BW = logits_BW.float().log_softmax(dim=-1)
    taken_B = torch.tensor(token_ids, device=logits_BW.device)
    taken_B1 = logprob_BW.gather(1, taken_B[:, None])
    rank_B = (logprob_BW > taken_B1).sum(dim=-1) + 1
    best = logprob_BW.sort(dim=-1, descending=True, stable=True) if any(counts) else None
    entries = []
    for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True)):
        entry = {token_id: Logprob(taken_B1[row, 0].item(), int(rank_B[row]))}
        if best is not None and count:
            ids, values = best.indices[row, :count].tolist(), best.values[row, :count].tolist()
            for rank, (best_id, value) in enumerate(zip(ids, values, strict=True), start=1):
                entry.setdefault(best_id, Logprob(value, rank))
        entries.append(entry)
    return entries


def _race(logits_BW: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens [B] drawn at random, every row with a temperature above zero."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_BW.device)[:, None]

    params = [draw.params for draw in draws]
    z_BW = logits_BW - logits_BW.amax(dim=-1, keepdim=True)
    z_BW = z_BW / column([p.temperature for p in params])
    if any(p.min_p > 0 for p in params):
        floor = column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params])
        z_BW = z_BW.masked_fill(z_BW < floor, -torch.inf)
    vocab = z_BW.shape[-1]
    ranks = [p.top_k if p.top_k > 0 else vocab for p in params]
    if any(p.top_p < 1 for p in params) or any(rank < vocab for rank in ranks):
        sorted_BW, ids_BW = z_BW.sort(dim=-1, descending=True, stable=True)
        rank_W = torch.arange(vocab, device=z_BW.device)
        sorted_BW = sorted_BW.masked_fill(rank_W >= column(ranks), -torch.inf)
        probs_BW = sorted_BW.softmax(dim=-1)
        before_BW = probs_BW.cumsum(dim=-1) - probs_BW
        # top_p 1 keeps all: rounding may bring the sum to 1 before the last token.
        beyond_BW = before_BW >= column([p.top_p if p.top_p < 1 else math.inf for p in params])
        beyond_BW[:, 0] = False
        z_BW = torch.empty_like(z_BW).scatter_(1, ids_BW, sorted_BW.masked_fill(beyond_BW, -torch.inf))
    return (z_BW - _exponential(draws, vocab, z_BW.device).log()).argmax(dim=-1)


def _exponential(draws: Sequence[Draw], vocab: int, device: torch.device) -> Tensor:
    """Exp(1) noise [B, W], a pure function of (seed, position, token id): splitmix64 of their combination."""
    keys = [_signed(_mix(_mix(draw.seed) + draw.position)) for draw in draws]
    key_B1 = torch.tensor(keys, dtype=torch.int64, device=device)[:, None]
    x_BW = key_B1 + torch.arange(1, vocab + 1, device=device) * _signed(_GOLDEN)
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x_BW = (x_BW ^ _shift_right(x_BW, shift)) * _signed(factor)
    x_BW ^= _shift_right(x_BW, 31)
    # 32 bits at half-integers are never 0; float32 may round the largest to 1, which log1p would send to infinity.
    uniform_BW = ((_shift_right(x_BW, 32).double() + 0.5) * 2.0**-32).float().clamp_max_(1 - 2.0**-24)
    return -torch.log1p(-uniform_BW)


def _mix(x: int) -> int:
    """splitmix64's output function on a Python integer."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The same 64 bits as the signed integer that torch holds; its products wrap as unsigned ones do."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's shifts keep the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
