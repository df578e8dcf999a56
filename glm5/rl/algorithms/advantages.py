"""Advantages of rollouts, from the rewards of all rollouts of a step.

Each function takes rewards [N] and the number of each rollout's group [N] (int64, any numbers) and returns [N] in
float64. Rollouts that a repaired group repeats are given once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6
Advantages = Callable[[Tensor, Tensor], Tensor]


def group_mean_std(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) over a group, std unbiased (GLM-5 report, equation 1; GRPO, arXiv 2402.03300).

    0 in a group of one, which has neither.
    """
    centred_N, number_N, size_G = _centred(reward_N, group_N)
    variance_G = _sums(centred_N.square(), number_N, size_G) / (size_G - 1).clamp_min(1)
    return centred_N / (variance_G.sqrt()[number_N] + EPS)


def group_mean(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """R - mean over a group (GLM-5 report, section 4.1; Dr. GRPO, arXiv 2503.20783). 0 in a group of one."""
    return _centred(reward_N, group_N)[0]


def batch_mean(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """R - mean over all rollouts of the step, for groups of one (FlashREINFORCE)."""
    return group_mean(reward_N, torch.zeros_like(group_N))


def _centred(reward_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R - mean of its group [N], number of its group from 0 [N], sizes of groups [G])."""
    reward_N = reward_N.double()
    _, number_N, size_G = group_N.unique(return_inverse=True, return_counts=True)
    mean_G = _sums(reward_N, number_N, size_G) / size_G
    return reward_N - mean_G[number_N], number_N, size_G


def _sums(value_N: Tensor, number_N: Tensor, size_G: Tensor) -> Tensor:
    return value_N.new_zeros(len(size_G)).index_add_(0, number_N, value_N)
