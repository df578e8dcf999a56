"""index_kl on a GPU, in Triton: scores, attention and the gradient of scores exist for some queries at a time.

    score[t, s] = sum_j w[t, j] relu(q[t, j] . key[s] scale)     P[t, s] = mean over layers and heads of attention
    grad[t, s]  = softmax(score[t])[s] sum(P[t]) - P[t, s]       which goes on to q, key and w

Over selected keys a program gathers those of one query (triton_selected.py); over every visible key, queries are whole
sequences of a training pass and keys their own tokens: a program has a tile of both (triton_dense.py). Columns of a row
are places in the selection, or positions in the sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.index_kl import triton_dense, triton_selected
from glm5.kernels.index_kl.reference import Served

_SCORES = 1 << 26  # of a piece of the queries: 256 MB, and as much of P
_BLOCK = 1024


@triton.jit
def _compare(score_ptr, target_ptr, count_ptr, loss_ptr, S, BLOCK: tl.constexpr):
    """The KL of a row; its scores are overwritten by their gradient. Scores of -inf are not keys."""
    t = tl.program_id(0).to(tl.int64)
    s, count = tl.arange(0, BLOCK), tl.load(count_ptr + t)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, count, BLOCK):
        score = tl.load(score_ptr + t * S + first + s, mask=first + s < count, other=float("-inf"))
        top = tl.maximum(top, score)
    highest = tl.maximum(tl.max(top, axis=0), -3e38)
    total, target_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        score = tl.load(score_ptr + t * S + first + s, mask=first + s < count, other=float("-inf"))
        target = tl.load(target_ptr + t * S + first + s, mask=first + s < count, other=0.0)
        total += tl.exp(score - highest)
        target_sum += tl.where(score > float("-inf"), target, 0.0)
    divisor = tl.sum(total, axis=0)
    lse, weight = highest + tl.log(tl.where(divisor > 0, divisor, 1.0)), tl.sum(target_sum, axis=0)
    loss = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        score = tl.load(score_ptr + t * S + first + s, mask=first + s < count, other=float("-inf"))
        target = tl.load(target_ptr + t * S + first + s, mask=first + s < count, other=0.0)
        seen = score > float("-inf")
        log_q = tl.where(seen, score - lse, 0.0)
        target = tl.where(seen, target, 0.0)
        loss += tl.where(target > 0, target * (tl.log(tl.where(target > 0, target, 1.0)) - log_q), 0.0)
        grad = tl.where(seen, tl.exp(log_q) * weight - target, 0.0)
        tl.store(score_ptr + t * S + first + s, grad, mask=first + s < count)
    tl.store(loss_ptr + t, tl.sum(loss, axis=0))


def index_kl(
    q_TJI: Tensor,
    key_PZI: Tensor,
    w_TJ: Tensor,
    served: list[Served],
    keys_TK: Tensor | None,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    index_scale: float,
    scale: float,
) -> Tensor:
    """As `reference.index_kl`. Without `keys_TK`, queries must be all of their sequences' tokens, in order."""
    where = (keys_TK, page_table_BN, row_T, end_T)
    return _IndexKl.apply(q_TJI, key_PZI, w_TJ, served, where, index_scale, scale)


class _IndexKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TJI, key_PZI, w_TJ, served: list[Served], where, index_scale: float, scale: float):
        needs_grad = any(ctx.needs_input_grad)
        way = triton_dense.QueryPass if where[0] is None else triton_selected.QueryPass
        found = way(q_TJI.contiguous(), key_PZI.contiguous(), w_TJ.float().contiguous(), served, where)
        losses = []
        step = max(1, _SCORES // found.num_columns)
        for part in (slice(first, first + step) for first in range(0, len(q_TJI), step)):
            score_TS, count_T = found.scores(part, index_scale)
            target_TS = found.target(part, scale)
            loss_T = torch.empty(len(score_TS), dtype=torch.float32, device=q_TJI.device)
            _compare[(len(score_TS),)](score_TS, target_TS, count_T, loss_T, score_TS.shape[1], BLOCK=_BLOCK)
            losses.append(loss_T.sum())
            if needs_grad:
                found.accumulate_grad(part, score_TS, index_scale)
        if needs_grad:
            ctx.save_for_backward(*found.gradients(key_PZI.dtype, w_TJ.dtype))
        return torch.stack(losses).sum() if losses else q_TJI.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return *(one * grad.to(one.dtype) for one in ctx.saved_tensors), None, None, None, None
