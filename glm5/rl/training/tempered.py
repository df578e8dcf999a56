"""Log-probabilities of drawn tokens and the entropies of what they were drawn from, by the engine's own functions.

    z        = logits / temperature, -inf for what was not kept         (sampling/draw.py: `drawn_from`)
    logprob  = log softmax(z)[target]           d logprob / d z = [v = target] - p
    entropy  = - sum_v p log p                  d entropy / d z = - p (log p + entropy)

The logits of some rows exist at a time, forward and backward, where they are computed again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.engine.sampling.draw import divisor, drawn_from
from glm5.rl.training.kept import Kept

_ROWS = 384  # of logits at a time: whole passes of any kind

Head = Callable[[Tensor], Tensor]


def tempered(
    head: Head,
    hidden_GD: Tensor,
    weight_WD: Tensor,
    target_G: Tensor,
    temperature_G: Tensor,
    kept: Kept | None,
) -> tuple[Tensor, Tensor]:
    """(log-probability [G], entropy [G]) in float32, differentiable in `hidden_GD` and `weight_WD`.

    `head` computes logits [rows, W], the product of hidden states with `weight_WD`, a row by itself. Temperature 0, of
    a greedy row, counts as 1, and such a row keeps everything.
    """
    return _Tempered.apply(head, hidden_GD, weight_WD, target_G.long(), temperature_G.float(), kept)


def _log_softmax(head: Head, hidden_GD: Tensor, temperature_G: Tensor, kept: Kept | None, rows: slice) -> Tensor:
    """log softmax(z) of some rows."""
    logits_GW = head(hidden_GD[rows]).float()
    z_GW = None
    if kept is not None:
        dropped_GW = kept.dropped(rows, logits_GW.shape[1], logits_GW.device)
        z_GW = torch.zeros_like(logits_GW).masked_fill_(dropped_GW, -torch.inf)
    return drawn_from(logits_GW, temperature_G[rows], z_GW).log_softmax(dim=-1)


class _Tempered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        hidden_GD: Tensor,
        weight_WD: Tensor,
        target_G: Tensor,
        temperature_G: Tensor,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        logprob_G, entropy_G = torch.empty(2, len(hidden_GD), dtype=torch.float32, device=hidden_GD.device)
        for rows in _parts(len(hidden_GD)):
            logprob_GW = _log_softmax(head, hidden_GD, temperature_G, kept, rows)
            logprob_G[rows] = logprob_GW.gather(1, target_G[rows, None])[:, 0]
            entropy_G[rows] = -_times_p(logprob_GW, logprob_GW).sum(dim=-1)
        ctx.save_for_backward(hidden_GD, weight_WD, target_G, temperature_G, entropy_G)
        ctx.head, ctx.kept = head, kept
        return logprob_G, entropy_G

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_G: Tensor, grad_entropy_G: Tensor) -> tuple[Tensor | None, ...]:
        hidden_GD, weight_WD, target_G, temperature_G, entropy_G = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_GD) if ctx.needs_input_grad[1] else None
        grad_weight = torch.zeros_like(weight_WD, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        scale_G1 = divisor(temperature_G).reciprocal()[:, None]
        for rows in _parts(len(hidden_GD)):
            logprob_GW = _log_softmax(ctx.head, hidden_GD, temperature_G, ctx.kept, rows)
            through = grad_logprob_G[rows, None] + grad_entropy_G[rows, None] * (logprob_GW + entropy_G[rows, None])
            grad_GW = -_times_p(through, logprob_GW)
            grad_GW.scatter_add_(1, target_G[rows, None], grad_logprob_G[rows, None])
            grad_GW = (grad_GW * scale_G1[rows]).to(hidden_GD.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_GW @ weight_WD
            if grad_weight is not None:
                grad_weight += grad_GW.T @ hidden_GD[rows]
        return None, grad_hidden, None if grad_weight is None else grad_weight.to(weight_WD.dtype), None, None, None


def _times_p(x_GW: Tensor, logprob_GW: Tensor) -> Tensor:
    """x times the probability: 0 where that is 0, whatever x is."""
    return torch.where(logprob_GW == -torch.inf, 0.0, x_GW * logprob_GW.exp())


def _parts(num_rows: int) -> list[slice]:
    return [slice(first, min(first + _ROWS, num_rows)) for first in range(0, num_rows, _ROWS)]
