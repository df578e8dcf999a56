"""Deferred weight gradients of linear layers, for zero-bubble pipeline schedules.

    backward of y = x W^T    dx = dy W immediately, for the previous stage;    dW = dy^T x when `runner` is called

Experts, norms and the head compute both at once. (torch's own split of the backward pass supports neither weights that
are used several times, as MTP's, nor operations that compute both gradients together.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.model.glm5 import Glm5
from glm5.model.linear import Linear


class Queue:
    """Weight gradients of the last backward pass that are still to be computed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def add(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> None:
        self._waiting.append((weight, x, grad))

    def runner(self) -> Callable[[], None]:
        """A function that adds the gradients queued so far to the weights' gradients; empties the queue."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()
        def run() -> None:
            for weight, x, grad in waiting:
                found = grad.flatten(0, -2).mT @ x.flatten(0, -2)
                weight.grad = found if weight.grad is None else weight.grad + found
            waiting.clear()

        return run


class DeferredLinear(Linear):
    """A linear layer whose weight gradient goes to the queue."""

    def __init__(self, linear: Linear, queue: Queue) -> None:
        nn.Module.__init__(self)
        self.weight, self.queue = linear.weight, queue

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad and x.requires_grad:
            return _Deferred.apply(x, self.weight, self.queue)
        return F.linear(x, self.weight)


def defer_linears(model: Glm5, queue: Queue) -> None:
    """Replace the linear layers in the decoder layers of this stage by `DeferredLinear`."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is Linear:
                setattr(module, name, DeferredLinear(child, queue))


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: Queue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        (x,) = ctx.saved_tensors
        ctx.queue.add(ctx.weight, x, grad)
        return grad @ ctx.weight, None, None
