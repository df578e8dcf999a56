"""Weights held twice: in the dtype that the model computes in, and in the one that the optimizers add to.

A gradient is added to its master's as soon as it is whole, in the master's dtype, and given up: sums over the batches
of a step do not round as the model does. After an update every weight is its master, rounded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_torch: Any = torch  # for its operations on lists of tensors, which are public in all but name


class MasterWeights:
    """Copies of a model's parameters, by name, in the dtype that they have now; the model goes on in `compute`.

    `named` takes the parameters' place before optimizers and in saved states.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype):
        self.named = {name: nn.Parameter(weight.detach().clone()) for name, weight in model.named_parameters()}
        model.to(compute)
        self._weights = dict(model.named_parameters())
        for name, weight in self._weights.items():
            asked = weight.requires_grad
            weight.requires_grad_()  # torch takes the hook of no other
            weight.register_post_accumulate_grad_hook(_handing_to(self.named[name]))
            weight.requires_grad_(asked)

    def trained(self) -> dict[str, nn.Parameter]:
        """MasterWeights of the parameters that require a gradient, which they then do too."""
        for name, master in self.named.items():
            master.requires_grad_(self._weights[name].requires_grad)
        return {name: master for name, master in self.named.items() if master.requires_grad}

    @torch.no_grad()
    def hand_back(self) -> None:
        """Round the masters that are trained to the model's weights."""
        names = list(self.trained())
        _torch._foreach_copy_([self._weights[name] for name in names], [self.named[name] for name in names])

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state with masters in place of its weights."""
        return {**model.state_dict(), **self.named}

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Of `state_dict`, masters and model."""
        model.load_state_dict(state)
        for name, master in self.named.items():
            master.copy_(state[name])


def _handing_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return hand_over
