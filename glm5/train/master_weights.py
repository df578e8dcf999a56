"""Master weights: optimizers update copies in a wider dtype than the one that the model computes in.

Each gradient is added to the master's gradient, in the master's dtype, when it is complete, and then freed. So sums
over the batches of a step are not rounded to the model's dtype. After an update each weight is its master, rounded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_torch: Any = torch  # for its operations on lists of tensors, which are public in all but name


class MasterWeights:
    """Copies of a model's parameters in their present dtype; the model itself is cast to `compute`, in place.

    `named`: the copies by name, for optimizers and saved states.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype):
        self.named = {name: nn.Parameter(weight.detach().clone()) for name, weight in model.named_parameters()}
        model.to(compute)
        self._weights = dict(model.named_parameters())
        for name, weight in self._weights.items():
            requires_grad = weight.requires_grad
            weight.requires_grad_()  # torch refuses hooks of parameters without gradients
            weight.register_post_accumulate_grad_hook(_accumulate_hook(self.named[name]))
            weight.requires_grad_(requires_grad)

    def trained(self) -> dict[str, nn.Parameter]:
        """Masters of the parameters that require a gradient; sets `requires_grad` of all masters likewise."""
        for name, master in self.named.items():
            master.requires_grad_(self._weights[name].requires_grad)
        return {name: master for name, master in self.named.items() if master.requires_grad}

    @torch.no_grad()
    def update_model(self) -> None:
        """Copy the trained masters into the model's weights, rounded."""
        names = list(self.trained())
        _torch._foreach_copy_([self._weights[name] for name in names], [self.named[name] for name in names])

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state with masters in place of its weights."""
        return {**model.state_dict(), **self.named}

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict` into the masters and the model."""
        model.load_state_dict(state)
        for name, master in self.named.items():
            master.copy_(state[name])


def _accumulate_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
    def accumulate(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None

    return accumulate
