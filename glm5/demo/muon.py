"""Muon for small matrices on a CPU: momentum, orthogonalised by five Newton-Schulz steps, heads apart (Muon Split).

    m = beta m + (1 - beta) g        u = (1 - beta) g + beta m        W -= lr (0.2 sqrt(max(rows, cols)) orth(u) + wd W)

Stacks of experts are batches; the rows of q_b_proj and kv_b_proj are orthogonalised head by head (GLM-5 report, Muon
Split), so that a head with small gradients is updated as much as the others.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# Odd quintic polynomials a x + b x^3 + c x^5 whose composition pushes singular values in (0, 1] towards 1.
_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, of each matrix in [..., rows, cols]."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
    for a, b, c in _COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """`heads` gives the number of heads that the rows of a parameter are split into, where they are."""

    def __init__(
        self,
        params: Iterable[Tensor],
        heads: Mapping[torch.nn.Parameter, int],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._heads = heads

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here re-evaluates a loss
        for group in self.param_groups:
            beta, lr = group["momentum"], group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - beta)
                update = weight.grad.lerp(momentum, beta).unflatten(0, (self._heads.get(weight, 1), -1))
                step = orthogonalize(update if weight.dim() == 2 else update.squeeze(0))
                step = step * (0.2 * max(step.shape[-2:]) ** 0.5)
                weight.mul_(1 - lr * group["weight_decay"]).sub_(step.view_as(weight), alpha=lr)
