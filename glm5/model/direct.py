"""Modules that are called without detours: no hooks. A small layer on a CPU takes hardly longer than the detour."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn


class Direct(nn.Module):
    """Calling it is calling `forward`. It takes no hooks, which would not be run."""

    forward: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__call__ = cls.forward

    def register_forward_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} runs no hooks (it is called directly): hook the module around it")

    register_forward_pre_hook = register_forward_hook


def pin_members(module: nn.Module) -> None:
    """Make parameters and modules within `module` plain attributes besides what they are: they are found in a tenth of
    the time. What is set later in their place is found like anywhere else. For models that only run from now on."""
    for part in module.modules():
        vars(part).update(part.named_parameters(recurse=False))
        vars(part).update({name: value for name, value in part.named_children() if not name.isdigit()})
