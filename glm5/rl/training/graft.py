"""A value that one arithmetic computed, with the gradient of another.

    forward     value                                  (given)
    backward    d run(x) / d (x, parameters)           (`run` is computed at x in the backward pass)

This is activation checkpointing whose forward pass was computed elsewhere: only x is kept for the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def graft(value: Tensor, run: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """`value`, which `run(x)` equals but for rounding, differentiable in x and in those `parameters` that learn.

    `run` must choose as the computation of `value` did, wherever it chooses (experts, keys): the gradient is then that
    of the same function. It is called once in the backward pass.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    return _Graft.apply(_Value(value, run), x, *learning)


class _Value:
    """Not a tensor to autograd, which otherwise would mark a result that is also an input."""

    def __init__(self, value: Tensor, run: Callable[[Tensor], Tensor]):
        self.value, self.run = value, run


class _Graft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: _Value, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.run = given.run
        return given.value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            out = ctx.run(x)
        inputs = [x, *parameters]
        wanted = [each for each, is_needed in zip(inputs, ctx.needs_input_grad[1:], strict=True) if is_needed]
        found = iter(torch.autograd.grad(out, wanted, grad_outputs, allow_unused=True))
        return None, *(next(found) if is_needed else None for is_needed in ctx.needs_input_grad[1:])
