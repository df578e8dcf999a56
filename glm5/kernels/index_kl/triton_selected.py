"""Scores, attention and gradients over the selected keys of each query: a program gathers the keys of one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.add_rows.triton import add_rows
from glm5.kernels.index_kl.reference import Served
from glm5.kernels.paging import slots_or_none
from glm5.kernels.triton_gather import give, products, rows

_KEYS = 64  # at a time
_VALUES = 64  # of a latent: 9 pieces of 576
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _hits(q_JI, key_ptr, slot_N, I, scale, BLOCK_I: tl.constexpr):
    """(q . key scale of gathered keys [J, N], the keys)"""
    key_1NI = rows(key_ptr, slot_N * I, slot_N >= 0, I, BLOCK_I, 1)
    return tl.dot(q_JI, tl.trans(key_1NI[0]), input_precision="ieee") * scale, key_1NI[0]


@triton.jit
def _scores(
    q_ptr, key_ptr, w_ptr, slot_ptr, count_ptr, score_ptr, scale, K, J, I,
    BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    j, n = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_N)
    q_1JI = rows(q_ptr, (t * J + j) * I, j < J, I, BLOCK_I, 1)
    w_J = tl.load(w_ptr + t * J + j, mask=j < J, other=0.0)
    for first in range(0, tl.load(count_ptr + t), BLOCK_N):
        inside = first + n < K
        slot_N = tl.load(slot_ptr + t * K + first + n, mask=inside, other=-1).to(tl.int64)
        hits_JN, _ = _hits(q_1JI[0], key_ptr, slot_N, I, scale, BLOCK_I)
        score_N = tl.sum(tl.maximum(hits_JN, 0.0) * w_J[:, None], axis=0)
        tl.store(score_ptr + t * K + first + n, tl.where(slot_N >= 0, score_N, float("-inf")), mask=inside)


@triton.jit
def _attention(
    q_ptr, latent_ptr, lse_ptr, slot_ptr, count_ptr, target_ptr, scale, share, K, H, L,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """target += share sum_h exp(q . latent scale - lse)"""
    t = tl.program_id(0).to(tl.int64)
    h, n = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    q_GHL = rows(q_ptr, (t * H + h) * L, h < H, L, BLOCK_L, GROUPS)
    lse_H = tl.load(lse_ptr + t * H + h, mask=h < H, other=0.0) * _LOG2E
    for first in range(0, tl.load(count_ptr + t), BLOCK_N):
        inside = first + n < K
        slot_N = tl.load(slot_ptr + t * K + first + n, mask=inside, other=-1).to(tl.int64)
        latent_GNL = rows(latent_ptr, slot_N * L, slot_N >= 0, L, BLOCK_L, GROUPS)
        logits_HN = products(q_GHL, latent_GNL, tl.zeros([BLOCK_H, BLOCK_N], tl.float32), GROUPS)
        p_HN = tl.where((h < H)[:, None], tl.exp2(logits_HN * (scale * _LOG2E) - lse_H[:, None]), 0.0)
        at = target_ptr + t * K + first + n
        sum_N = tl.load(at, mask=inside, other=0.0) + tl.sum(p_HN, axis=0) * share
        tl.store(at, tl.where(slot_N >= 0, sum_N, 0.0), mask=inside)


@triton.jit
def _gradients(
    q_ptr, key_ptr, w_ptr, slot_ptr, count_ptr, grad_score_ptr, grad_q_ptr, grad_w_ptr, grad_key_ptr, scale, K, J, I,
    BLOCK_J: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    j, n, i = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_I)
    q_JI = rows(q_ptr, (t * J + j) * I, j < J, I, BLOCK_I, 1)[0]
    w_J = tl.load(w_ptr + t * J + j, mask=j < J, other=0.0)
    grad_q_JI, grad_w_J = tl.zeros([BLOCK_J, BLOCK_I], tl.float32), tl.zeros([BLOCK_J], tl.float32)
    for first in range(0, tl.load(count_ptr + t), BLOCK_N):
        slot_N = tl.load(slot_ptr + t * K + first + n, mask=first + n < K, other=-1).to(tl.int64)
        hits_JN, key_NI = _hits(q_JI, key_ptr, slot_N, I, scale, BLOCK_I)
        grad_N = tl.load(grad_score_ptr + t * K + first + n, mask=(first + n < K) & (slot_N >= 0), other=0.0)
        grad_w_J += tl.sum(tl.maximum(hits_JN, 0.0) * grad_N[None, :], axis=1)
        grad_JN = tl.where(hits_JN > 0, w_J[:, None] * grad_N[None, :] * scale, 0.0).to(q_JI.dtype)
        grad_q_JI = tl.dot(grad_JN, key_NI, grad_q_JI, input_precision="ieee")
        row_N = slot_N * I if ATOMIC else (t * K + first + n) * I
        give(grad_key_ptr, row_N, slot_N >= 0, tl.dot(tl.trans(grad_JN), q_JI, input_precision="ieee"), i, I, ATOMIC)
    at = grad_q_ptr + ((t * J + j) * I)[:, None] + i[None, :]
    tl.store(at, grad_q_JI.to(q_JI.dtype), mask=(j < J)[:, None] & (i < I)[None, :])
    tl.store(grad_w_ptr + t * J + j, grad_w_J, mask=j < J)


class QueryPass:
    """One pass over the queries, some at a time."""

    def __init__(self, q_TJI: Tensor, key_PZI: Tensor, w_TJ: Tensor, served: list[Served], where):
        self.q_TJI, self.key_PZI, self.w_TJ = q_TJI, key_PZI, w_TJ
        self.served = [(q.contiguous(), latent.contiguous(), lse.contiguous()) for q, latent, lse in served]
        self.keys_TK, self.page_table_BN, self.row_T, self.end_T = where
        self.num_columns = self.keys_TK.shape[1]
        self.grad_q, self.grad_w = torch.empty_like(q_TJI), torch.empty_like(w_TJ)
        self.grad_key_SI = torch.zeros(key_PZI.shape, dtype=torch.float32, device=key_PZI.device).flatten(0, 1)
        _, J, I = q_TJI.shape
        self._sizes = {
            "BLOCK_J": max(16, triton.next_power_of_2(J)),
            "BLOCK_I": max(16, triton.next_power_of_2(I)),
            "BLOCK_N": _KEYS,
        }

    def scores(self, part: slice, index_scale: float) -> tuple[Tensor, Tensor]:
        """Scores of these queries, and the number of columns of each row."""
        keys_TK, page_size = self.keys_TK[part], self.key_PZI.shape[1]
        self._slots = slots_or_none(keys_TK, self.page_table_BN, self.row_T[part], self.end_T[part], page_size)
        score_TK = torch.empty(keys_TK.shape, dtype=torch.float32, device=keys_TK.device)
        of = self.q_TJI[part], self.key_PZI, self.w_TJ[part], *self._slots, score_TK
        _scores[(len(keys_TK),)](*of, index_scale, self.num_columns, *self.q_TJI.shape[1:], **self._sizes)
        return score_TK, self._slots[1]

    def target(self, part: slice, scale: float) -> Tensor:
        target_TK = torch.zeros(self._slots[0].shape, dtype=torch.float32, device=self.q_TJI.device)
        for q_THL, latent_PZL, lse_TH in self.served:
            _, H, L = q_THL.shape
            block = min(_VALUES, max(16, triton.next_power_of_2(L)))
            _attention[(len(target_TK),)](
                q_THL[part], latent_PZL, lse_TH[part], *self._slots, target_TK, scale, 1 / (H * len(self.served)),
                self.num_columns, H, L, BLOCK_H=max(16, triton.next_power_of_2(H)), BLOCK_L=block,
                GROUPS=triton.cdiv(L, block), BLOCK_N=_KEYS, num_warps=8 if H > 16 else 4, num_stages=2,
            )  # fmt: skip
        return target_TK

    def accumulate_grad(self, part: slice, grad_score_TK: Tensor, index_scale: float) -> None:
        _, J, I = self.q_TJI.shape
        in_order = torch.are_deterministic_algorithms_enabled()
        step = max(1, (1 << 28) // (self.num_columns * I)) if in_order else len(grad_score_TK)
        for first in range(0, len(grad_score_TK), step):
            inner = slice(first, first + step)
            slot_TK, count_T = self._slots[0][inner], self._slots[1][inner]
            to = self.grad_key_SI.new_empty(slot_TK.numel(), I) if in_order else self.grad_key_SI
            of = self.q_TJI[part][inner], self.key_PZI, self.w_TJ[part][inner], slot_TK, count_T, grad_score_TK[inner]
            grads = self.grad_q[part][inner], self.grad_w[part][inner], to
            _gradients[(len(slot_TK),)](
                *of, *grads, index_scale, self.num_columns, J, I, ATOMIC=not in_order, **self._sizes
            )
            if in_order:
                add_rows(self.grad_key_SI, slot_TK.flatten(), to)

    def gradients(self, key_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, key and w."""
        return self.grad_q, self.grad_key_SI.to(key_dtype).view(self.key_PZI.shape), self.grad_w.to(w_dtype)
