"""On-policy distillation: what a teacher's log-probabilities of tokens that the policy sampled make of its loss.

    sampled token   A_t = sg(log pi_teacher(t) - log pi(t))       in place of an advantage, inside the algorithm's loss
    top k           KL_t = sum_{v in top k} p(v) log(p(v) / q(v)) + p(rest) log(p(rest) / q(rest))

p is the policy, q the teacher, both at the rollout's temperature over the recorded vocabulary. The sampled form is the
report's: in the mean over the policy's samples it has the gradient of KL(pi || pi_teacher) at each place. The other
takes this mean over the teacher's k likeliest tokens itself, with all others as one, and has less noise.
"""

import torch
from torch import Tensor


def with_teacher(advantage_T: Tensor, teacher_T: Tensor, current_T: Tensor) -> Tensor:
    """Advantages [T]: those of the teacher where `teacher_T`, its log-probabilities, is a number; else as they were.
    `current_T`: log-probabilities by the policy, without gradients (GLM-5 report, equation 2)."""
    return torch.where(teacher_T.isnan(), advantage_T, teacher_T - current_T)


def top_k_kl(logprob_TK: Tensor, teacher_TK: Tensor) -> Tensor:
    """Reverse KL over a teacher's likeliest tokens and one for all others [T], differentiable in `logprob_TK`; 0 where
    the teacher gives none. Places with -inf by the teacher are left out (TA-OPD, arXiv 2608.14728)."""
    has_TK = teacher_TK.isfinite()
    tiny = torch.finfo(torch.float32).eps  # engines report in float32: below it a rest is rounding
    p_TK = logprob_TK.masked_fill(~has_TK, 0.0).exp() * has_TK
    log_ratio_TK = (logprob_TK - teacher_TK).masked_fill(~has_TK, 0.0)
    rest_T, teacher_rest_T = ((1 - one_TK.sum(dim=-1)).clamp_min(tiny) for one_TK in (p_TK, teacher_TK.exp()))
    rest_T = torch.where(has_TK.any(dim=-1), rest_T * (rest_T.log() - teacher_rest_T.log()), 0.0)
    return (p_TK * log_ratio_TK).sum(dim=-1) + rest_T
