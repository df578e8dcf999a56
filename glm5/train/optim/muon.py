"""Muon: momentum, then orthogonalisation of every matrix, scaled so that AdamW's learning rates fit.

    m = mu m + (1 - mu) g        u = (1 - mu) g + mu m        W = W (1 - lr wd) - lr rms sqrt(max(rows, cols)) orth(u)

Rows and columns are those of the orthogonalised matrix, such as one head or one expert. With the factor of the complete
tensor, a head's update would be sqrt(heads) too large (training notes, 2.3). Sources: Jordan, Muon; Liu et al., Muon is
Scalable (the factor); GLM-5 report (Muon Split).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from glm5.train.optim.exchange import Exchange
from glm5.train.optim.newton_schulz import COEFFICIENTS, Triple, orthogonalize
from glm5.train.optim.table import join_matrices, split_matrices

_torch: Any = torch  # for its operations on lists of tensors, which are public in all but name
# Elements of parameters updated together, and of the parts of a larger one. On other devices one by one.
_TOGETHER = {"cuda": 1 << 26}
_PART = {"cuda": 1 << 28}


class Piece(NamedTuple):
    """A parameter, or some of its experts, with gradient and momentum."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """`rows`: row counts of the matrices in parameters that hold several (`table.split_matrices`).

    Momentum exists from the start, so the saved state does not depend on which parameters have had gradients. A
    parameter without a gradient is not changed.

    `shards`: sharded parameters by name, and the exchange of their split matrices, in which all ranks take part in
    every step.
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
        shards: tuple[Mapping[str, nn.Parameter], Exchange] | None = None,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rms": update_rms}
        super().__init__(params, defaults)
        self._rows, self._coefficients, self._compute_dtype = rows, coefficients, compute_dtype
        self._split, self._exchange = ({}, None) if shards is None else shards
        self._split_names = {weight: name for name, weight in self._split.items()}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() < 2:
                    raise ValueError(f"Muon updates matrices, got a parameter of shape {list(weight.shape)}")
                self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=momentum_dtype)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here evaluates a loss again
        split: dict[str, Tensor] = {}
        for group in self.param_groups:
            unsplit: list[nn.Parameter] = []
            for weight in group["params"]:
                if (name := self._split_names.get(weight)) is not None:  # exchanged even without a gradient
                    has_grad = weight.grad is not None
                    split[name] = self._momentum_update(weight, group) if has_grad else torch.zeros_like(weight)
                elif weight.grad is not None and weight.numel():
                    unsplit.append(weight)
            for batch in self._batches_by_shape(unsplit):
                rows = self._rows.get(batch[0], ())
                for pieces in self._pieces(batch):
                    self._update(pieces, rows, group)
        if self._exchange is None:
            return
        rms = self.defaults["rms"]
        updates = self._exchange.updates(split, lambda stack: self._orthogonal(stack, (), rms))
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in self._split_names and weight.grad is not None and weight.numel():
                    self._apply(weight, updates[self._split_names[weight]], group)

    def _batches_by_shape(self, weights: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Weights of equal shape that are updated together, because small matrices do not fill a GPU."""
        by_shape: dict[object, list[nn.Parameter]] = {}
        for weight in weights:
            key = (weight.shape, weight.dtype, weight.device, self._rows.get(weight, ()))
            by_shape.setdefault(key, []).append(weight)
        for batch in by_shape.values():
            at_once = max(1, _TOGETHER.get(batch[0].device.type, 0) // batch[0].numel())
            for first in range(0, len(batch), at_once):
                yield batch[first : first + at_once]

    def _pieces(self, batch: list[nn.Parameter]) -> Iterator[list[Piece]]:
        """All weights, or parts of a large stack of experts, to bound temporary memory."""
        pieces = [Piece(weight, cast("Tensor", weight.grad), self.state[weight]["momentum"]) for weight in batch]
        weight = batch[0]
        at_once = max(1, _PART.get(weight.device.type, weight.numel()) // weight[0].numel())
        if len(pieces) > 1 or weight.dim() == 2 or at_once >= len(weight):
            yield pieces
            return
        for parts in zip(*(one.split(at_once) for one in pieces[0]), strict=True):
            yield [Piece(*parts)]

    def _update(self, pieces: list[Piece], rows: tuple[int, ...], group: dict[str, Any]) -> None:
        """Update pieces of equal shape, in place."""
        mu, lr = group["momentum"], group["lr"]
        weights, grads, momenta = (list(tensors) for tensors in zip(*pieces, strict=True))
        _torch._foreach_lerp_(momenta, [grad.to(momenta[0].dtype) for grad in grads], 1 - mu)
        updates = _torch._foreach_lerp(grads, [momentum.to(grads[0].dtype) for momentum in momenta], mu)
        stacked = torch.stack(updates) if len(updates) > 1 else updates[0].unsqueeze(0)
        stacked = self._orthogonal(stacked, rows, group["rms"])
        _torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        _torch._foreach_sub_(weights, list(stacked.to(weights[0].dtype)), alpha=lr)

    def _momentum_update(self, weight: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum; returns the Nesterov update u."""
        assert weight.grad is not None
        grad, mu = weight.grad, group["momentum"]
        momentum = self.state[weight]["momentum"]
        momentum.lerp_(grad.to(momentum.dtype), 1 - mu)
        return grad.lerp(momentum.to(grad.dtype), mu)

    def _apply(self, weight: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(weight.dtype), alpha=group["lr"])

    def _orthogonal(self, update: Tensor, rows: tuple[int, ...], rms: float) -> Tensor:
        parts = [
            orthogonalize(part, self._coefficients, self._compute_dtype).mul_(rms * max(part.shape[-2:]) ** 0.5)
            for part in split_matrices(update, rows)
        ]
        return join_matrices(parts, update.shape) if rows else parts[0].view(update.shape)
