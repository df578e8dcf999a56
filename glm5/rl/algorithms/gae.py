"""Advantages of single tokens from the values that a critic gives them: GAE over sampled tokens, and over segments.

V_t     the value of the state from which token t is sampled
L       the number of sampled tokens of a segment; lambda = 1 - 1 / (1.5 L)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALPHA = 1.5
"""SAO's, of lambda."""


def adaptive_lambda(num_sampled: int) -> float:
    """1 - 1 / (alpha L): credit reaches as far as a segment of L sampled tokens is long (SAO, arXiv 2607.07508; VAPO,
    arXiv 2504.05118)."""
    return 1.0 - 1.0 / (ALPHA * num_sampled)


def skip_observation_gae(
    reward_T: Tensor, value_T: Tensor, is_sampled_T: Tensor, last_value: float, lam: float, gamma: float = 1.0
) -> Tensor:
    """Advantages [T] in float64 of sampled tokens, 0 of all others, which the chain leaves out:

        A_t = delta_t + gamma lam A_next(t)        delta_t = r_t + gamma V_next(t) - V_t

    next(t) is the sampled token after t: for the last one of an action the first of the next action, whatever the
    environment says between them. Behind the last token the value is `last_value`: 0 where the episode has ended, else
    what is expected of its rest. SAO, arXiv 2607.07508; GAE, arXiv 1506.02438.
    """
    sampled_N = is_sampled_T.nonzero()[:, 0]
    value_N, reward_N = value_T[sampled_N].double(), reward_T[sampled_N].double()
    next_N = torch.cat([value_N[1:], value_N.new_tensor([last_value])])
    advantages, after = list[float](), 0.0
    for delta in reversed((reward_N + gamma * next_N - value_N).tolist()):
        after = delta + gamma * lam * after
        advantages.append(after)
    found_T = torch.zeros(len(value_T), dtype=torch.float64)
    found_T[sampled_N] = found_T.new_tensor(advantages[::-1])
    return found_T


def cross_segment_factors(num_sampled: Sequence[int], gamma: float = 1.0) -> Tensor:
    """(gamma lambda_s)^N_after(s) for each segment s of a rollout, [S] in float64, in the order of sampling: what the
    advantages inside of it are multiplied by. `num_sampled`: the trained tokens of each; N_after: those of all later
    ones.

    All segments share the reward of the end, from which the tokens of an early one are further than they are from their
    own end (CompactionRL, arXiv 2607.05378).
    """
    count_S = torch.tensor(num_sampled, dtype=torch.float64)
    lambda_S = torch.tensor([adaptive_lambda(one) for one in num_sampled], dtype=torch.float64)
    return (gamma * lambda_S) ** (count_S.sum() - count_S.cumsum(0))
