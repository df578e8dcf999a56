"""What a policy's weight function sees of the tokens of a pass: log-probabilities by three policies, and advantages.

    rho = old trainer / rollout     two implementations of the same weights
    r   = current / old trainer     what optimizer steps on this batch have changed since
    s   = current / rollout = r rho

`old` is the trainer's own pass before the first of several optimizer steps on a batch. With one step, the current
pass is the old one: r is 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratios:
    """Of the T policy tokens of a pass, without gradients: `current_T`, `old_T` and `rollout_T` are log-probabilities
    of the sampled tokens, `advantage_T` their advantages, all float32 (float64 for float64).

    `sequence_T`: the number (int64) of a token's sequence, of the `num_sequences` in the pass. `total`: sums over the
    ranks that share sequences (context parallelism), None where none do.
    """

    current_T: Tensor
    old_T: Tensor
    rollout_T: Tensor
    advantage_T: Tensor
    sequence_T: Tensor
    num_sequences: int
    total: Callable[[Tensor], Tensor] | None = None

    @property
    def rho(self) -> Tensor:
        return (self.old_T - self.rollout_T).exp()

    @property
    def r(self) -> Tensor:
        return (self.current_T - self.old_T).exp()

    @property
    def s(self) -> Tensor:
        return (self.current_T - self.rollout_T).exp()

    def sequence_mean(self, value_T: Tensor) -> Tensor:
        """For each token, the mean of a value over the tokens of its sequence, [T]."""
        both_2S = value_T.new_zeros(2, self.num_sequences, dtype=torch.float64)
        both_2S.index_add_(1, self.sequence_T, torch.stack([value_T.double(), torch.ones_like(value_T).double()]))
        if self.total is not None:
            both_2S = self.total(both_2S)
        return (both_2S[0] / both_2S[1].clamp_min(1))[self.sequence_T].to(value_T.dtype)


def binary_kl(log_p_T: Tensor, log_q_T: Tensor) -> Tensor:
    """D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)): whether the sampled token comes or another one."""
    p_T = log_p_T.exp()
    tiny = torch.finfo(p_T.dtype).tiny  # log 0 would be infinite where both are certain of the token
    rest_p_T, rest_q_T = (-torch.expm1(one_T).clamp_max(-tiny) for one_T in (log_p_T, log_q_T))
    return p_T * (log_p_T - log_q_T) + rest_p_T * (rest_p_T.log() - rest_q_T.log())
