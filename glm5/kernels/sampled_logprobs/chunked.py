"""sampled_logprobs some positions at a time: never more than `chunk` rows of logits exist, forward or backward.

    dz[t, v] = dlogprob[t] ([v = target[t]] - p[t, v]) - dentropy[t] p[t, v] (log p[t, v] + entropy[t])

Backward computes the logits again. The gradient of the weight is summed over chunks in float32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from glm5.kernels.sampled_logprobs.kept import Kept
from glm5.kernels.sampled_logprobs.reference import Head, divisor, entropy, log_distribution


def sampled_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    kept: Kept | None,
    chunk: int,
    head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.sampled_logprobs`."""
    words_N, count_T = (None, None) if kept is None else kept
    given = hidden_TD, weight_WD, target_T.long(), temperature_T, words_N, count_T, chunk, head
    return _SampledLogprobs.apply(*given)


def _parts(num: int, chunk: int, kept: Kept | None) -> Iterator[tuple[slice, Kept | None]]:
    for start in range(0, num, chunk):
        yield slice(start, start + chunk), None if kept is None else kept.rows(start, start + chunk)


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_WD, target_T, temperature_T, words_N, count_T, chunk, head):  # type: ignore[no-untyped-def]
        kept = None if words_N is None else Kept(words_N, count_T)
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprob_T, entropy_T = (torch.empty(len(target_T), dtype=wide, device=hidden_TD.device) for _ in range(2))
        for part, kept_part in _parts(len(target_T), chunk, kept):
            logprob_TW, dropped_TW = log_distribution(hidden_TD[part], weight_WD, temperature_T[part], kept_part, head)
            logprob_T[part] = logprob_TW.gather(1, target_T[part].unsqueeze(1)).squeeze(1)
            entropy_T[part] = entropy(logprob_TW, dropped_TW)
        ctx.save_for_backward(hidden_TD, weight_WD, target_T, temperature_T, words_N, count_T, entropy_T)
        ctx.chunk, ctx.head = chunk, head
        ctx.set_materialize_grads(False)
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob_T, grad_entropy_T):  # type: ignore[no-untyped-def]
        hidden_TD, weight_WD, target_T, temperature_T, words_N, count_T, entropy_T = ctx.saved_tensors
        kept = None if words_N is None else Kept(words_N, count_T)
        hidden_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TD) if hidden_needs_grad else None
        grad_weight = torch.zeros_like(weight_WD, dtype=entropy_T.dtype) if weight_needs_grad else None
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(entropy_T)
        for part, kept_part in _parts(len(target_T), ctx.chunk, kept):
            given = hidden_TD[part], weight_WD, temperature_T[part], kept_part, ctx.head
            logprob_TW, dropped_TW = log_distribution(*given)
            scale_T1 = 1 / divisor(temperature_T[part], entropy_T.dtype)[:, None]
            grad_T1 = grad_logprob_T[part, None] * scale_T1
            p_TW = logprob_TW.exp()
            if grad_entropy_T is None:
                grad_TW = p_TW.mul_(-grad_T1)
            else:
                if dropped_TW is not None:
                    logprob_TW.masked_fill_(dropped_TW, 0.0)
                logprob_TW.add_(entropy_T[part, None]).mul_(grad_entropy_T[part, None] * scale_T1).add_(grad_T1)
                grad_TW = p_TW.mul_(logprob_TW).neg_()
            grad_TW.scatter_add_(1, target_T[part].unsqueeze(1), grad_T1)
            grad_TW = grad_TW.to(hidden_TD.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_TW @ weight_WD
            if grad_weight is not None:
                grad_weight += grad_TW.T @ hidden_TD[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_WD.dtype), *(None,) * 6
