"""token_logprobs some positions at a time: never more than `chunk` rows of logits exist, forward or backward.

    dlogits[t, v] = dlogprob[t] ([v = target[t]] - softmax(logits[t])[v])

Forward keeps the log-sum-exp of each row; backward computes the logits again. The gradient of the weight is summed over
chunks in float32.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def token_logprobs(hidden_TD: Tensor, weight_WD: Tensor, target_T: Tensor, chunk: int) -> Tensor:
    """As `reference.token_logprobs`."""
    return _TokenLogprobs.apply(hidden_TD, weight_WD, target_T.long(), chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD: Tensor, weight_WD: Tensor, target_T: Tensor, chunk: int) -> Tensor:
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        lse_T, logprob_T = (torch.empty(len(target_T), dtype=wide, device=hidden_TD.device) for _ in range(2))
        for start in range(0, len(target_T), chunk):
            part = slice(start, start + chunk)
            logits_TW = F.linear(hidden_TD[part], weight_WD)
            # The sum of log_softmax, in its order: the same bits as the definition.
            logprobs_TW = logits_TW.log_softmax(dim=-1, dtype=wide)
            chosen_T1 = target_T[part].unsqueeze(1)
            logprob_T[part] = logprobs_TW.gather(1, chosen_T1).squeeze(1)
            lse_T[part] = logits_TW.gather(1, chosen_T1).squeeze(1).to(wide) - logprob_T[part]
        ctx.save_for_backward(hidden_TD, weight_WD, target_T, lse_T)
        ctx.chunk = chunk
        return logprob_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_T: Tensor):
        hidden_TD, weight_WD, target_T, lse_T = ctx.saved_tensors
        hidden_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TD) if hidden_needs_grad else None
        grad_weight = torch.zeros_like(weight_WD, dtype=lse_T.dtype) if weight_needs_grad else None
        for start in range(0, len(target_T), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits_TW = F.linear(hidden_TD[part], weight_WD).to(lse_T.dtype)
            grad_TW = logits_TW.sub_(lse_T[part, None]).exp_().mul_(-grad_T[part, None])
            grad_TW.scatter_add_(1, target_T[part].unsqueeze(1), grad_T[part, None])
            grad_TW = grad_TW.to(hidden_TD.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_TW @ weight_WD
            if grad_weight is not None:
                grad_weight += grad_TW.T @ hidden_TD[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_WD.dtype), None, None
