"""The factor of each token's log pi in the loss, for each algorithm.

    loss = - sum_t unit_t w_t log pi(t) / denominator           w_t is a constant: no gradient passes through it

Since grad pi / pi = grad log pi, the gradient of a surrogate such as r A is r A grad log pi: with the weight of a
function below, the gradient of this loss is that of the algorithm's own. A token that an algorithm masks has the weight
0 and exactly no gradient; it stays in the denominator. Names: `ratios.py`; A is the advantage.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from glm5.rl.algorithms.ratios import Ratios, binary_kl


class Weights(NamedTuple):
    """`weight_T`: of log pi. `masked_T`: bool, tokens without a gradient because of a bound of the algorithm."""

    weight_T: Tensor
    masked_T: Tensor


def icepop(of: Ratios, *, beta: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.28) -> Weights:
    """pop(rho) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), with pop(rho) = rho if 1/beta <= rho <= beta, else 0.

    GLM-5 report, equation 1 (IcePop, arXiv 2510.18855, with clip-higher of DAPO, arXiv 2503.14476).
    """
    rho_T = of.rho
    return _clipped(of, rho_T, (rho_T < 1 / beta) | (rho_T > beta), eps_low, eps_high)


def tis(of: Ratios, *, cap: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.28) -> Weights:
    """min(rho, cap) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): truncated importance sampling.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; slime's `vanilla_tis`.
    """
    return _clipped(of, of.rho.clamp_max(cap), torch.zeros_like(of.rho, dtype=torch.bool), eps_low, eps_high)


def kpop(of: Ratios, *, phi: float = 0.75, eps_low: float = 0.2, eps_high: float = 0.28) -> Weights:
    """rho min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) if D(p || q) <= phi and D(q || p) <= phi, else 0.

    D is the binary KL, p and q the token's probabilities by the old trainer and by the rollout (KPop, Ling team, 2026;
    phi 0.75 for mathematics, 2 for code).
    """
    there_T, back_T = binary_kl(of.old_T, of.rollout_T), binary_kl(of.rollout_T, of.old_T)
    return _clipped(of, of.rho, ~((there_T <= phi) & (back_T <= phi)), eps_low, eps_high)


def gspo(of: Ratios, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Weights:
    """min(s_i A, clip(s_i, 1 - eps_low, 1 + eps_high) A), s_i = exp(mean of log r over the sequence), whose gradient is
    s_i A times the mean of grad log pi: a sequence is clipped as a whole (GSPO, arXiv 2507.18071)."""
    ratio_T = of.sequence_mean(of.current_T - of.old_T).exp()
    return _masked(ratio_T * of.advantage_T, _is_clipped(ratio_T, of.advantage_T, eps_low, eps_high))


def cispo(of: Ratios, *, high: float = 5.0) -> Weights:
    """sg(min(r, high)) A log pi: the ratio is clipped, no token is masked.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5, without a lower bound as there; `high` as in ScaleRL, arXiv
    2510.13786.
    """
    return Weights(of.r.clamp_max(high) * of.advantage_T, torch.zeros_like(of.r, dtype=torch.bool))


def dis(of: Ratios, *, eps_low: float = 0.3, eps_high: float = 5.0) -> Weights:
    """sg(s) A log pi if 1 - eps_low < s < 1 + eps_high, else 0: direct double-sided importance sampling.

    GLM-5 report, equations 3 to 5, which leave the bounds open; these are SAO's (arXiv 2607.07508).
    """
    s_T = of.s
    return _masked(s_T * of.advantage_T, ~((s_T > 1 - eps_low) & (s_T < 1 + eps_high)))


def reinforce(of: Ratios) -> Weights:
    """A log pi, whatever weights sampled the token: for comparisons."""
    return Weights(of.advantage_T, torch.zeros_like(of.s, dtype=torch.bool))


def dppo(of: Ratios, *, delta: float = 0.2, tau: float = 1e-3) -> Weights:
    """s A - tau log^2 s, unless the probability has already moved by more than delta to where A pushes it:
    A > 0 and pi - pi_rollout > delta, or A < 0 and pi - pi_rollout < -delta.

    DPPO, arXiv 2602.04879, with the penalty of prime-rl's default loss (which keeps it on masked tokens).
    """
    moved_T = of.current_T.exp() - of.rollout_T.exp()
    harmful_T = ((of.advantage_T > 0) & (moved_T > delta)) | ((of.advantage_T < 0) & (moved_T < -delta))
    return _masked(of.s * of.advantage_T - 2 * tau * (of.current_T - of.rollout_T), harmful_T)


def flash_reinforce(of: Ratios, *, delta: float = 3e-3) -> Weights:
    """sg(s) A log pi, and 0 for a sequence whose mean binary KL D(pi_rollout || pi) is above delta.

    FlashREINFORCE (NVIDIA, 2026).
    """
    drift_T = of.sequence_mean(binary_kl(of.rollout_T, of.current_T))
    return _masked(of.s * of.advantage_T, ~(drift_T <= delta))


def _clipped(of: Ratios, factor_T: Tensor, dropped_T: Tensor, eps_low: float, eps_high: float) -> Weights:
    """factor min(r A, clip(r) A), 0 where `dropped_T`."""
    r_T = of.r
    return _masked(factor_T * r_T * of.advantage_T, dropped_T | _is_clipped(r_T, of.advantage_T, eps_low, eps_high))


def _is_clipped(ratio_T: Tensor, advantage_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Where the minimum is the clipped side, which has no gradient."""
    return ((advantage_T > 0) & (ratio_T > 1 + eps_high)) | ((advantage_T < 0) & (ratio_T < 1 - eps_low))


def _masked(weight_T: Tensor, masked_T: Tensor) -> Weights:
    return Weights(weight_T.masked_fill(masked_T, 0.0), masked_T)
