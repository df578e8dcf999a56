"""Gradients of weights that wait until a schedule has time for them.

    backward of y = x W^T    dx = dy W at once, which the stage before waits for;    dW = dy^T x when `runner` is called

Of linear layers; experts, norms and the head find both at once. (torch's own way of cutting a backward pass in two
cannot take weights that are used several times, as MTP's are, nor operations that find both gradients together.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.model.glm5 import Glm5
from glm5.model.linear import Linear


class Queue:
    """What is still to be computed of the last backward pass."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def add(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> None:
        self._waiting.append((weight, x, grad))

    def runner(self) -> Callable[[], None]:
        """Adds what was waiting to the weights' gradients; later passes wait for theirs."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()
        def run() -> None:
            for weight, x, grad in waiting:
                found = grad.flatten(0, -2).mT @ x.flatten(0, -2)
                weight.grad = found if weight.grad is None else weight.grad + found
            waiting.clear()

        return run


class DeferredLinear(Linear):
    """`linear`, whose weight's gradient goes to the queue."""

    def __init__(self, linear: Linear, queue: Queue) -> None:
        nn.Module.__init__(self)
        self.weight, self.queue = linear.weight, queue

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad and x.requires_grad:
            return _Deferred.apply(x, self.weight, self.queue)
        return F.linear(x, self.weight)


def defer_linears(model: Glm5, queue: Queue) -> None:
    """Let the linear layers of this stage's decoder layers wait in the queue."""
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
