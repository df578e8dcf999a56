"""Scores, attention and gradients over every earlier token of each query's sequence: tiles of queries and of keys.

Queries are whole sequences, one after the other, and so are keys: token s is a key of token t if begin[t] <= s <= t.
Its column in t's row is s - begin[t].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.index_kl.reference import Served
from glm5.kernels.paging import key_slots, read_rows
from glm5.kernels.triton_gather import products, rows

_QUERIES, _KEYS, _VALUES = 64, 64, 64  # at a time; a latent of 576 in 9 pieces
_SHARES = 4  # of the heads, for the gradient of keys
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(first_query, begin_ptr, stop_query, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tokens, which are queries, where their sequences begin, tokens that are keys of some of them, which of which) of
    the program's tile of queries and tile of keys."""
    t = first_query + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = t < stop_query
    begin_T = tl.load(begin_ptr + t, mask=real_T, other=2147483647)
    s = tl.min(begin_T, axis=0) // BLOCK_N * BLOCK_N + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    seen_TN = real_T[:, None] & (s[None, :] >= begin_T[:, None]) & (s[None, :] <= t[:, None])
    return t, real_T, begin_T, s, seen_TN


@triton.jit
def _scores(
    q_ptr, key_ptr, w_ptr, begin_ptr, score_ptr, first_query, stop_query, scale, S, J, I,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    t, real_T, begin_T, s, seen_TN = _tile(first_query, begin_ptr, stop_query, BLOCK_T, BLOCK_N)
    if tl.max(seen_TN.to(tl.int32)) > 0:
        key_NI = rows(key_ptr, s.to(tl.int64) * I, s < stop_query, I, BLOCK_I, 1)[0]
        score_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for j in range(J):
            q_TI = rows(q_ptr, (t.to(tl.int64) * J + j) * I, real_T, I, BLOCK_I, 1)[0]
            w_T = tl.load(w_ptr + t.to(tl.int64) * J + j, mask=real_T, other=0.0)
            hits_TN = tl.dot(q_TI, tl.trans(key_NI), input_precision="ieee") * scale
            score_TN += tl.maximum(hits_TN, 0.0) * w_T[:, None]
        at = score_ptr + ((t - first_query).to(tl.int64) * S)[:, None] + (s[None, :] - begin_T[:, None])
        tl.store(at, score_TN, mask=seen_TN)


@triton.jit
def _attention(
    q_ptr, latent_ptr, lse_ptr, begin_ptr, target_ptr, first_query, stop_query, scale, share, S, H, L,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """target = share sum_h exp(q . latent scale - lse), or that much more"""
    t, real_T, begin_T, s, seen_TN = _tile(first_query, begin_ptr, stop_query, BLOCK_T, BLOCK_N)
    if tl.max(seen_TN.to(tl.int32)) > 0:
        latent_GNL = rows(latent_ptr, s.to(tl.int64) * L, s < stop_query, L, BLOCK_L, GROUPS)
        sum_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for h in range(H):
            row_T = t.to(tl.int64) * H + h
            q_GTL = rows(q_ptr, row_T * L, real_T, L, BLOCK_L, GROUPS)
            lse_T = tl.load(lse_ptr + row_T, mask=real_T, other=0.0) * _LOG2E
            logits_TN = products(q_GTL, latent_GNL, tl.zeros([BLOCK_T, BLOCK_N], tl.float32), GROUPS)
            # What is not seen may be anything: not infinite, for it is not stored but is added to.
            sum_TN += tl.exp2(tl.where(seen_TN, logits_TN * (scale * _LOG2E) - lse_T[:, None], 0.0))
        at = target_ptr + ((t - first_query).to(tl.int64) * S)[:, None] + (s[None, :] - begin_T[:, None])
        sum_TN *= share
        if ADD:
            sum_TN += tl.load(at, mask=seen_TN, other=0.0)
        tl.store(at, sum_TN, mask=seen_TN)


@triton.jit
def _grad_hits(q_TI, key_NI, w_T, grad_TN, scale):
    """(relu(hits), gradient of q . key)"""
    hits_TN = tl.dot(q_TI, tl.trans(key_NI), input_precision="ieee") * scale
    grad_TN = tl.where(hits_TN > 0, grad_TN * w_T[:, None] * scale, 0.0).to(q_TI.dtype)
    return tl.maximum(hits_TN, 0.0), grad_TN


@triton.jit
def _query_gradients(
    q_ptr, key_ptr, w_ptr, begin_ptr, grad_score_ptr, grad_q_ptr, grad_w_ptr, first_query, stop_query, scale, S, J, I,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Of a tile of queries and one head."""
    t = first_query + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T, i, n = t < stop_query, tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_N)
    begin_T = tl.load(begin_ptr + t, mask=real_T, other=2147483647)
    row_T = t.to(tl.int64) * J + tl.program_id(1)
    q_TI = rows(q_ptr, row_T * I, real_T, I, BLOCK_I, 1)[0]
    w_T = tl.load(w_ptr + row_T, mask=real_T, other=0.0)
    grad_q_TI, grad_w_T = tl.zeros([BLOCK_T, BLOCK_I], tl.float32), tl.zeros([BLOCK_T], tl.float32)
    stop = tl.max(tl.where(real_T, t, 0), axis=0) + 1
    for first in range(tl.min(begin_T, axis=0), stop, BLOCK_N):
        s = first + n
        seen_TN = real_T[:, None] & (s[None, :] >= begin_T[:, None]) & (s[None, :] <= t[:, None])
        key_NI = rows(key_ptr, s.to(tl.int64) * I, s < stop, I, BLOCK_I, 1)[0]
        at = grad_score_ptr + ((t - first_query).to(tl.int64) * S)[:, None] + (s[None, :] - begin_T[:, None])
        grad_TN = tl.load(at, mask=seen_TN, other=0.0)
        hits_TN, grad_hits_TN = _grad_hits(q_TI, key_NI, w_T, grad_TN, scale)
        grad_w_T += tl.sum(hits_TN * grad_TN, axis=1)
        grad_q_TI = tl.dot(grad_hits_TN, key_NI, grad_q_TI, input_precision="ieee")
    at = grad_q_ptr + (row_T * I)[:, None] + i[None, :]
    tl.store(at, grad_q_TI.to(q_TI.dtype), mask=real_T[:, None] & (i < I)[None, :])
    tl.store(grad_w_ptr + row_T, grad_w_T, mask=real_T)


@triton.jit
def _key_gradients(
    q_ptr, key_ptr, w_ptr, begin_ptr, stop_ptr, grad_score_ptr, grad_key_ptr, first_query, stop_query, num_tokens,
    scale, S, J, I,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys, from every SHARES-th head, added to [SHARES, T, I]."""
    s, i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_I)
    real_N = s < num_tokens
    key_NI = rows(key_ptr, s.to(tl.int64) * I, real_N, I, BLOCK_I, 1)[0]
    stop = tl.minimum(tl.max(tl.load(stop_ptr + s, mask=real_N, other=0), axis=0), stop_query)
    at = grad_key_ptr + ((tl.program_id(1) * num_tokens + s).to(tl.int64) * I)[:, None] + i[None, :]
    inside = real_N[:, None] & (i < I)[None, :]
    total_NI = tl.load(at, mask=inside, other=0.0)
    for first in range(tl.maximum(tl.program_id(0) * BLOCK_N, first_query), stop, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        real_T = t < stop
        begin_T = tl.load(begin_ptr + t, mask=real_T, other=2147483647)
        seen_TN = real_T[:, None] & (s[None, :] >= begin_T[:, None]) & (s[None, :] <= t[:, None])
        where = grad_score_ptr + ((t - first_query).to(tl.int64) * S)[:, None] + (s[None, :] - begin_T[:, None])
        grad_TN = tl.load(where, mask=seen_TN, other=0.0)
        for j in range(tl.program_id(1), J, SHARES):
            row_T = t.to(tl.int64) * J + j
            q_TI = rows(q_ptr, row_T * I, real_T, I, BLOCK_I, 1)[0]
            w_T = tl.load(w_ptr + row_T, mask=real_T, other=0.0)
            _, grad_hits_TN = _grad_hits(q_TI, key_NI, w_T, grad_TN, scale)
            total_NI = tl.dot(tl.trans(grad_hits_TN), q_TI, total_NI, input_precision="ieee")
    tl.store(at, total_NI, mask=inside)


class QueryPass:
    """One pass over the queries, some at a time."""

    def __init__(self, q_TJI: Tensor, key_PZI: Tensor, w_TJ: Tensor, served: list[Served], where):
        _, page_table_BN, row_T, end_T = where
        num_tokens, _, I = q_TJI.shape
        position_T = end_T.long() - 1
        token_T = torch.arange(num_tokens, device=q_TJI.device)
        length_B = torch.zeros(len(page_table_BN), dtype=torch.long, device=q_TJI.device)
        length_B.index_add_(0, row_T.long(), torch.ones_like(position_T))
        self._begin_T = (token_T - position_T).int()
        self._stop_T = self._begin_T + length_B.int()[row_T.long()]
        self._page_size, self._pool = key_PZI.shape[1], key_PZI
        self._slot_T = key_slots(position_T[:, None], page_table_BN, row_T, self._page_size).squeeze(1)
        self.num_columns = page_table_BN.shape[1] * self._page_size
        self.q_TJI, self.w_TJ = q_TJI, w_TJ
        self._key_TI = read_rows(key_PZI.detach(), self._slot_T)
        self._served = [(q.contiguous(), read_rows(pool, self._slot_T), lse.contiguous()) for q, pool, lse in served]
        self.grad_q, self.grad_w = torch.empty_like(q_TJI), torch.empty_like(w_TJ)
        self._grad_key = torch.zeros(_SHARES, num_tokens, I, dtype=torch.float32, device=q_TJI.device)
        self._tile = {"BLOCK_T": _QUERIES, "BLOCK_N": _KEYS}
        self._block_i = max(16, triton.next_power_of_2(I))

    def scores(self, part: slice, index_scale: float) -> tuple[Tensor, Tensor]:
        """Scores of these queries, and their number of columns."""
        first, stop = self._range(part)
        score_TS = torch.empty(stop - first, self.num_columns, dtype=torch.float32, device=self.q_TJI.device)
        of = self.q_TJI, self._key_TI, self.w_TJ, self._begin_T, score_TS, first, stop
        _scores[self._grid(first, stop)](
            *of, index_scale, self.num_columns, *self.q_TJI.shape[1:], BLOCK_I=self._block_i, **self._tile
        )
        self._columns = torch.arange(first, stop, device=self.q_TJI.device).int() + 1 - self._begin_T[first:stop]
        return score_TS, self._columns

    def target(self, part: slice, scale: float) -> Tensor:
        first, stop = self._range(part)
        target_TS = torch.empty(stop - first, self.num_columns, dtype=torch.float32, device=self.q_TJI.device)
        for number, (q_THL, latent_TL, lse_TH) in enumerate(self._served):
            _, H, L = q_THL.shape
            block = min(_VALUES, max(16, triton.next_power_of_2(L)))
            _attention[self._grid(first, stop)](
                q_THL, latent_TL, lse_TH, self._begin_T, target_TS, first, stop, scale, 1 / (H * len(self._served)),
                self.num_columns, H, L, BLOCK_L=block, GROUPS=triton.cdiv(L, block), ADD=number > 0, **self._tile,
                num_warps=4, num_stages=2,
            )  # fmt: skip
        return target_TS

    def accumulate_grad(self, part: slice, grad_score_TS: Tensor, index_scale: float) -> None:
        first, stop = self._range(part)
        num_tokens, J, I = self.q_TJI.shape
        sizes = (index_scale, self.num_columns, J, I)
        of = self.q_TJI, self._key_TI, self.w_TJ, self._begin_T
        _query_gradients[(triton.cdiv(stop - first, _QUERIES), J)](
            *of, grad_score_TS, self.grad_q, self.grad_w, first, stop, *sizes, BLOCK_I=self._block_i, **self._tile
        )
        _key_gradients[(triton.cdiv(stop, _KEYS), _SHARES)](
            *of, self._stop_T, grad_score_TS, self._grad_key, first, stop, num_tokens, *sizes,
            BLOCK_I=self._block_i, SHARES=_SHARES, **self._tile,
        )  # fmt: skip

    def gradients(self, key_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, key and w."""
        grad_key = torch.zeros_like(self._pool, dtype=key_dtype).flatten(0, 1)
        grad_key.index_copy_(0, self._slot_T, self._grad_key.sum(dim=0).to(key_dtype))
        return self.grad_q, grad_key.view(self._pool.shape), self.grad_w.to(w_dtype)

    def _range(self, part: slice) -> tuple[int, int]:
        return part.start, min(part.stop, len(self.q_TJI))

    def _grid(self, first: int, stop: int) -> tuple[int, int]:
        """Tiles of queries, and as many tiles of keys as any of those may see."""
        columns = min(self.num_columns + _QUERIES, stop)
        return triton.cdiv(stop - first, _QUERIES), triton.cdiv(columns, _KEYS) + 1
