"""Muon: momentum, then every matrix orthogonalised, at a size that suits AdamW's learning rates.

    m = mu m + (1 - mu) g        u = (1 - mu) g + mu m        W = W (1 - lr wd) - lr rms sqrt(max(rows, cols)) orth(u)

Rows and columns are those of the matrix that is orthogonalised: of one head, of one expert. With the factor of the
whole tensor, a head's update would be sqrt(heads) too large (training notes, 2.3). Sources: Jordan, Muon; Liu et al.,
Muon is Scalable (the factor); GLM-5 report (heads apart).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glm5.train.optim.newton_schulz import COEFFICIENTS, Triple, orthogonalize
from glm5.train.optim.table import cut, join


class Muon(torch.optim.Optimizer):
    """`rows` names, for parameters that hold several matrices below each other, their sizes (`table.cut`).

    Momentum exists from the start, so what is saved does not depend on which tensors have had gradients. A parameter
    without a gradient is left alone. With `watch`, the root mean square of each parameter's last update, at learning
    rate 1, is kept in `update_rms`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        rows: Mapping[nn.Parameter, tuple[int, ...]],
        *,
        lr: float = 0.0,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        update_rms: float = 0.2,
        coefficients: tuple[Triple, ...] = COEFFICIENTS["quintic"],
        momentum_dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rms": update_rms}
        super().__init__(params, defaults)
        self._rows, self._coefficients, self._compute_dtype = rows, coefficients, compute_dtype
        self.watch = False
        self.update_rms: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() < 2:
                    raise ValueError(f"Muon updates matrices, got a parameter of shape {list(weight.shape)}")
                self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=momentum_dtype)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here evaluates a loss again
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        mu, lr = group["momentum"], group["lr"]
        momentum = self.state[weight]["momentum"]
        momentum.lerp_(grad.to(momentum.dtype), 1 - mu)
        update = self._orthogonal(grad.lerp(momentum.to(grad.dtype), mu), self._rows.get(weight, ()), group["rms"])
        if self.watch:
            self.update_rms[weight] = update.square().mean(dtype=torch.float32).sqrt()
        weight.mul_(1 - lr * group["weight_decay"]).sub_(update.to(weight.dtype), alpha=lr)

    def _orthogonal(self, update: Tensor, rows: tuple[int, ...], rms: float) -> Tensor:
        parts = [
            orthogonalize(part, self._coefficients, self._compute_dtype).mul_(rms * max(part.shape[-2:]) ** 0.5)
            for part in cut(update, rows)
        ]
        return join(parts, update.shape) if rows else parts[0].view(update.shape)
